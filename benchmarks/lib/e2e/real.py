"""A rollout phase on one own engine and on a borrowed one as well: real engines on this machine, MEASURED.

Owns the miniature's machines and its figures. The first core stands for the lent GPU: a serving engine under
a trace and a rollout engine, which share it and one pool of slabs. The own rollout engine, the router and all
clients stand for other machines; they share the other cores, where the own engine runs only when nothing else
wants a CPU. Serving has its trace in both kinds of phases, so that its objectives come from phases without
rollouts beside it. In each round both kinds run the same turns, in an order that changes with the round.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from lib.harness import median_figure
from lib.load import groups
from lib.load.groups import PhaseResult
from lib.load.traffic import MAX_FOREIGN_SHARE
from lib.slo.engines import LONG_STEPS
from rose.demo.plan import SERVING_LOAD, DemoOptions, DemoPlan
from rose.demo.processes import ALLOWED_HARM, GUEST_NICE, SERVING_STEP_TOKENS
from rose.errors import WorkerError
from rose.measure.figures import LATENCIES, Figure, latency_s, objectives, spread, worse_attainment
from rose.measure.models import make_rollout_model
from rose.measure.records import RequestRecord
from rose.measure.rig import PoolSetup, Rig, give_way
from rose.measure.windows import LEAD_S, BusyMeter, WindowRunner, WindowSpec
from rose.node.control import EngineControl
from rose.node.processes import ServerProcess
from rose.types import SLO, Role

SERVING, BORROWED, OWN = "serving", "borrowed", "own"
ALONE, LENT = "own engine alone", "with the borrowed engine"
POOL = PoolSetup(num_slabs=160, slab_bytes=768 << 10, headroom_slabs=48)
"""A slab holds one block of either model. The router's 16 turns of up to 672 tokens need 96 of them at the
most, and serving's bursts stay below the half of the headroom, where they would cut the rollouts' budget for
the rest of the phase."""
LOAD = replace(SERVING_LOAD, rate_rps=2.4)
"""The demo's traffic, for which its objectives are made, at a rate that suits a core with AVX-512."""
ENGINES_SLO = SLO(ttft_s=0.5, tpot_s=0.15)
"""What a serving engine keeps unless it is told otherwise, as in ROSE for 8B; the gate plans with it."""
NUM_GROUPS, GROUP_SIZE = 16, 8
TRACE_S = 120.0
"""The length of serving's trace, of which a phase takes the beginning."""
PHASE_S = 240.0
ANSWERS_S = 5.0
"""After the phase, for requests that came in it; what has no answer by then misses the objectives."""
STOP_S = 15.0
READY_S = 60.0
POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class RealPhase:
    """One phase of one kind."""

    rollouts: PhaseResult
    requests: Sequence[RequestRecord]
    """Serving's, those that came while the phase ran."""
    serving_busy: float
    """The share of the phase in which serving computed."""
    foreign_cpu_share: float


class Miniature:
    """The engines, the router and the phases on them."""

    def __init__(self, rig: Rig, plan: DemoPlan) -> None:
        """Starts and profiles the engines. The rig stops them."""
        self._rig = rig
        rig.others = plan.cpus.others
        rig.pool(plan.pool_name, **POOL)
        model = make_rollout_model(rig.folder / "long-steps", LONG_STEPS)
        shared: dict[str, Any] = {"pool": plan.pool_name, "compute_cpus": plan.cpus.compute}
        chunks = ("--max-num-batched-tokens", str(SERVING_STEP_TOKENS))
        rig.start_engine(SERVING, Role.SERVING, vllm_args=chunks, allow_harm=ALLOWED_HARM, **shared)
        rig.start_engine(BORROWED, Role.ROLLOUT, model=model, **shared)
        rig.start_engine(OWN, Role.ROLLOUT, model=model)
        engines = {name: rig.wait_engine(name) for name in (SERVING, BORROWED, OWN)}
        give_way(rig.pid(OWN))  # now that it has started
        self._serving, self._borrowed, self._own = (engines[name] for name in (SERVING, BORROWED, OWN))
        # Rollout first: profiling serving takes the whole pool, which cuts rollout's budget to nothing.
        for engine in (self._borrowed, self._serving):
            engine.profile()
        self._own.complete([[1] * 128], max_tokens=4)  # pays what only a first step costs
        self._router_url = rig.start_router([self._own.url], nice=GUEST_NICE)
        self._router = httpx.Client(base_url=self._router_url, timeout=READY_S, trust_env=False)
        self._windows = WindowRunner(plan.traffic, plan.options.out_dir, rig, self._serving, self._borrowed)
        self._step = 0

    def run(self, kind: str, index: int) -> RealPhase:
        """Runs the phase of a round in one of its two kinds."""
        self._set_workers(is_lent=kind == LENT)
        self._step += 1
        self._call("POST", "/admin/rl_step", {"step": self._step})
        name = f"{'lent' if kind == LENT else 'alone'}-{index}"
        spec = WindowSpec(name=name, index=index, duration_s=TRACE_S, has_serving=True)
        start_s = time.monotonic() + LEAD_S
        replay = self._windows.start_replay(spec, start_s)
        out = self._rig.folder / f"phase-{name}.json"
        load = self._start_phase(name, index, start_s, str(out))
        meter = BusyMeter(self._serving, self._borrowed)
        time.sleep(max(start_s - time.monotonic(), 0.0))
        meter.start()
        if load.wait(PHASE_S) != 0:
            raise WorkerError(f"the phase did not end well:\n{load.log_tail()}")
        serving_busy_s, _, foreign = meter.stop()
        rollouts = PhaseResult.read(out)
        time.sleep(ANSWERS_S)
        replay.stop(STOP_S)
        requests = self._windows.finish_replay(replay, spec, lambda: None)
        return RealPhase(
            rollouts=rollouts,
            requests=[each for each in requests if each.scheduled_s <= rollouts.end_s],
            serving_busy=serving_busy_s / rollouts.duration_s,
            foreign_cpu_share=foreign,
        )

    def _start_phase(self, name: str, index: int, start_s: float, out: str) -> ServerProcess:
        argv = [
            *(groups.__file__, "--url", self._router_url, "--model", self._own.model, "--out", out),
            *("--groups", str(NUM_GROUPS), "--group-size", str(GROUP_SIZE)),
            *("--vocab-size", str(LONG_STEPS.vocab_size), "--seed", str(index)),
            *("--start-at", str(start_s), "--cache-salt", name),
        ]
        return self._rig.run(argv, f"phase-{name}")

    def _set_workers(self, *, is_lent: bool) -> None:
        """Lends the serving engine's GPU to the router, or takes it back; returns once the router knows."""
        is_known = worker_id(self._borrowed) in self._alive()
        if is_lent and not is_known:
            self._call("POST", "/workers", {"url": self._borrowed.url, "kind": "serving"})
        elif is_known and not is_lent:
            self._call("DELETE", f"/workers/{worker_id(self._borrowed)}")
        wanted = {worker_id(self._own), *([worker_id(self._borrowed)] if is_lent else [])}
        until = time.monotonic() + READY_S
        while (alive := self._alive()) != wanted:
            if time.monotonic() > until:
                raise WorkerError(f"the router's workers are {sorted(alive)}, not {sorted(wanted)}")
            time.sleep(POLL_S)

    def _alive(self) -> set[str]:
        workers = self._call("GET", "/workers")["workers"]
        return {worker["id"] for worker in workers if worker["alive"]}

    def _call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        answer = self._router.request(method, path, json=body)
        if answer.is_error:
            raise WorkerError(f"{method} {self._router_url}{path}: {answer.status_code} {answer.text[:300]}")
        return dict(answer.json())

    def share_of_borrowed(self, phase: RealPhase) -> float:
        """Returns the share of a phase's tokens that the borrowed engine made."""
        tokens = phase.rollouts.tokens
        return tokens.get(worker_id(self._borrowed), 0) / max(1, sum(tokens.values()))


def worker_id(engine: EngineControl) -> str:
    """Returns the name that the router gives an engine."""
    return engine.url.removeprefix("http://")


def measure(args: argparse.Namespace, console: Console) -> list[Figure]:
    """Starts the engines, runs all rounds and prints each; returns the figures."""
    rounds = 2 if args.quick else 5
    with Rig(args.records) as rig:
        rig.folder.mkdir(parents=True, exist_ok=True)
        options = DemoOptions(out_dir=rig.folder, quick=args.quick, seed=args.seed, trace=args.trace)
        miniature = Miniature(rig, replace(DemoPlan.of(options), serving=LOAD))
        phases: dict[str, list[RealPhase]] = defaultdict(list)
        for index in range(args.rounds if args.rounds is not None else rounds):
            kinds = (ALONE, LENT) if index % 2 == 0 else (LENT, ALONE)
            for kind in kinds:
                phases[kind].append(miniature.run(kind, args.seed + index))
                console.print(f"{kind}: {phases[kind][-1].rollouts.duration_s:.1f} s", markup=False)
        shares = [miniature.share_of_borrowed(phase) for phase in phases[LENT]]
    console.print(_table(phases, shares))
    return figures(phases[ALONE], phases[LENT], shares)


def figures(alone: Sequence[RealPhase], lent: Sequence[RealPhase], shares: Sequence[float]) -> list[Figure]:
    """Makes the figures of all rounds. ``shares``: the borrowed engine's part of the lent phases' tokens."""
    slo = _objectives(alone)
    ratios = [
        one.rollouts.duration_s / other.rollouts.duration_s for one, other in zip(alone, lent, strict=True)
    ]
    median = statistics.median
    peers: dict[str, float | None] = {
        "own alone, s": median(phase.rollouts.duration_s for phase in alone),
        "with the borrowed, s": median(phase.rollouts.duration_s for phase in lent),
        "three quarters of the turns": median(
            one.rollouts.p75_s / other.rollouts.p75_s for one, other in zip(alone, lent, strict=True)
        ),
        "tokens of the borrowed": median(shares),
        "serving busy": median(phase.serving_busy for phase in lent),
        "rounds without others on the CPUs": float(
            sum(_disturbance(*pair) <= MAX_FOREIGN_SHARE for pair in zip(alone, lent, strict=True))
        ),
    }
    return [
        median_figure("e2e_real", ratios, "x", target=">= 1.3", peers=peers),
        _attainment("e2e_real_attainment", alone, lent, ENGINES_SLO),
        _attainment("e2e_real_attainment[medians]", alone, lent, slo),
        Figure(
            name="e2e_real_failed",
            value=float(sum(phase.rollouts.num_failed for phase in (*alone, *lent))),
            unit="turns",
            target="<= 0",
            peers={"turns": float(sum(phase.rollouts.num_turns for phase in (*alone, *lent)))},
        ),
    ]


def _attainment(name: str, alone: Sequence[RealPhase], lent: Sequence[RealPhase], slo: SLO) -> Figure:
    return Figure(
        name=name,
        value=worse_attainment(_requests(lent), slo),
        unit="share, the worse of TTFT and TPOT",
        target=">= 0.99",
        peers={
            "own alone": worse_attainment(_requests(alone), slo),
            "requests": float(sum(len(phase.requests) for phase in lent)),
            "TTFT objective, ms": 1e3 * slo.ttft_s,
            "TPOT objective, ms": 1e3 * slo.tpot_s,
        },
        spread=spread([worse_attainment(phase.requests, slo) for phase in lent]),
    )


def _disturbance(*phases: RealPhase) -> float:
    """Returns the largest share of the machine's CPU time that other processes had in one of the phases."""
    return max(phase.foreign_cpu_share for phase in phases)


def _objectives(phases: Sequence[RealPhase]) -> SLO:
    """Returns serving's objectives, from phases in which it had its GPU for itself. Raises: WorkerError."""
    slo = objectives(_requests(phases))
    if slo is None:
        raise WorkerError("serving alone answered nothing: a phase must be longer than the first arrival")
    return slo


def _requests(phases: Sequence[RealPhase]) -> list[RequestRecord]:
    return [request for phase in phases for request in phase.requests]


def _table(phases: dict[str, list[RealPhase]], shares: Sequence[float]) -> Table:
    """One line for each phase."""
    title = "MEASURED on three real engines: rollout phases, and serving meanwhile"
    table = Table(title=title)
    for column in ("phase", "s", "3/4 of turns, s", "borrowed", "TTFT P50/P99 ms", "TPOT P50/P99 ms", "note"):
        table.add_column(column, justify="left" if column in ("phase", "note") else "right")
    for kind, several in phases.items():
        for index, phase in enumerate(several):
            latencies = (
                "/".join(
                    "-" if value is None else f"{1e3 * value:.0f}"
                    for value in (latency_s(phase.requests, which, percent) for percent in (50, 99))
                )
                for which in LATENCIES
            )
            is_disturbed = phase.foreign_cpu_share > MAX_FOREIGN_SHARE
            notes = [f"others used {phase.foreign_cpu_share:.0%}"] if is_disturbed else []
            notes += [f"{phase.rollouts.num_failed} failed: {error}" for error in phase.rollouts.errors[:1]]
            table.add_row(
                kind,
                f"{phase.rollouts.duration_s:.1f}",
                f"{phase.rollouts.p75_s:.1f}",
                f"{shares[index]:.2f}" if kind == LENT else "",
                *latencies,
                "; ".join(notes),
            )
    return table
