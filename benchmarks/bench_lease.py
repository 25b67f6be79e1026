"""A 10 s lease keeps almost all prefix hits of rollout turns, and gives the memory back on time.

One serving engine stays up; the rollout engine beside it is restarted for each lease. Then, per lease:

`lease_hits_kept`: multi-turn sessions run without serving traffic, with a tool's run of 1 to 9.5 s between
two turns. Hits are cached prompt tokens over prompt tokens from the second turn on; the figure is that share
over the share without expiry. `rollout_tokens_per_s`, `ttft_p99_ms`, `tpot_p99_ms`: while the sessions' cache
is still leased, the closed-loop rollout load runs beside the demo's serving replay. The gate is always off,
so only memory differs.

`lease_error_ms` (shortest lease, idle engine): from the client's end of a request until the ledger shows its
slabs back, minus the lease. The client sees the end a few ms after the engine, so the true error is that much
more.

`resident_over_live`: bytes of the slabs that both engines own over bytes of their blocks that are in use or
hold prefix cache. Loaded: it is summed over the windows. Idle: it is taken after the last lease and serving's
usage window, when only each engine's padding block is live, so it is counted in slabs. Beside it stand the
slabs owned over the fewest that could hold the live blocks, for each engine and for both, because serving
keeps empty slabs until rollouts want them.

ROSE Table 4 (Qwen3-8B, H800; another model, machine and gate, hence only here): P99 of TTFT/TPOT with leases
of 10, 20, 50, 100 s: 338.1/136.1, 334.7/135.3, 371.1/140.7, 491.9/148.1 ms; rollout time 492 to 502 s in all.

    python benchmarks/bench_lease.py --json lease.json
    python benchmarks/bench_lease.py --leases 2 10 --json lease.json
"""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lib.engines.residency import Residency, both_engines, over_fewest, over_live
from lib.harness import run_benchmark
from lib.load.traffic import add_trace, latency_ms, note_foreign_share, plan_traffic, window_runner

from rose.demo.plan import DemoPlan
from rose.demo.records import PhaseName
from rose.errors import WorkerError
from rose.measure.figures import Figure
from rose.measure.models import ROLLOUT_SPEC
from rose.measure.records import Window
from rose.measure.rig import Rig
from rose.measure.rollout_load import RolloutLoad, RolloutWorkload
from rose.measure.windows import RlSteps, WindowSpec
from rose.memory.pool.pool import PoolClient
from rose.node.control import EngineControl
from rose.types import GateMode, Role

NEVER_S = 3600.0
LEASES_S = (2.0, 10.0, 20.0, 50.0, 100.0)
"""ROSE Table 4's, and a shorter one."""
QUICK_LEASES_S = (2.0, 10.0)
SERVING_WINDOW_S = 10.0
"""How long rollout budgets leave serving its recent peak; short, as windows here are."""
CONCURRENCY = 12
NUM_SESSIONS = 12
TASK_TOKENS = 256
ANSWER_TOKENS, TOOL_TOKENS = 48, 80
"""Answer and tool together fill a block of 128 tokens: prefix cache comes in whole blocks."""
TOOL_S = (1.0, 9.5)
PATIENCE_S = 600.0
LONG_PROMPT_TOKENS = 900
"""Two of them overflow the slab that every engine keeps."""
RETURN_TIMEOUT_S = 5.0
ERRORS_S = {True: 10.0, False: 40.0}
"""The seconds spent on waiting for leases to end, with --quick or without."""


@dataclass(slots=True)
class _Measured:
    """What one lease brought."""

    lease_s: float
    hits: float
    window: Window

    @property
    def name(self) -> str:
        return "none" if self.lease_s == NEVER_S else f"{self.lease_s:g} s"


@dataclass(slots=True)
class _Bench:
    """The running rig, and what is measured on it."""

    args: argparse.Namespace
    rig: Rig
    plan: DemoPlan
    pool: PoolClient
    serving: EngineControl
    loaded: list[Residency]

    def measure_lease(self, lease_s: float, rollout: EngineControl) -> _Measured:
        num_turns, window_s = (3, 12.0) if self.args.quick else (6, 24.0)
        RlSteps(rollout).tick()
        hits = asyncio.run(_hit_share(rollout, num_turns, self.args.seed))
        rl_steps = RlSteps(rollout)

        def tick() -> None:
            rl_steps.tick()
            for residency, engine in zip(self.loaded, (rollout, self.serving), strict=True):
                residency.sample(engine)

        spec = WindowSpec(
            name=PhaseName.NAIVE, index=0, duration_s=window_s, has_serving=True, rollout_url=rollout.url
        )
        window = window_runner(self.plan, self.rig, self.serving, rollout).run(spec, tick)
        return _Measured(lease_s, hits, window)

    def lease_errors_ms(self, lease_s: float, rollout: EngineControl) -> list[float]:
        """Returns several requests' errors, each on an engine that holds only the slab it keeps."""
        rng = random.Random(self.args.seed)
        _wait_returned(self.pool, lease_s)
        errors = []
        for _ in range(max(1, int(ERRORS_S[self.args.quick] / lease_s))):
            prompts = [
                [rng.randrange(ROLLOUT_SPEC.vocab_size) for _ in range(LONG_PROMPT_TOKENS)] for _ in range(2)
            ]
            rollout.complete(prompts, max_tokens=2)
            errors.append((_wait_returned(self.pool, lease_s) - lease_s) * 1e3)
        return errors

    def idle(self, rollout: EngineControl) -> list[Residency]:
        time.sleep(SERVING_WINDOW_S)
        residency = both_engines(self.pool.slab_bytes)
        for one, engine in zip(residency, (rollout, self.serving), strict=True):
            one.sample(engine)
        return residency


def measure(args: argparse.Namespace) -> list[Figure]:
    chosen = args.leases if args.leases is not None else QUICK_LEASES_S if args.quick else LEASES_S
    # The shortest lease comes last: it is over soonest, and the idle engine is measured with it.
    leases = (NEVER_S, *sorted(chosen, reverse=True))
    with Rig() as rig:
        plan = plan_traffic(args, rig, concurrency=CONCURRENCY)
        pool = rig.pool(plan.pool_name, **plan.pool)
        shared: dict[str, Any] = {
            "pool": plan.pool_name,
            "gate": GateMode.OFF,
            "compute_cpus": plan.cpus.compute,
            "serving_window_s": SERVING_WINDOW_S,
        }
        rig.start_engine("serving", Role.SERVING, **shared)
        bench: _Bench | None = None
        measured = []
        for number, lease_s in enumerate(leases):
            name = f"rollout-{number}"
            flags = ("--enable-prompt-tokens-details",)
            server = rig.start_engine(name, Role.ROLLOUT, vllm_args=flags, lease_s=lease_s, **shared)
            if bench is None:
                serving = rig.wait_engine("serving")
                bench = _Bench(args, rig, plan, pool, serving, both_engines(pool.slab_bytes))
            rollout = rig.wait_engine(name)
            measured.append(bench.measure_lease(lease_s, rollout))
            if lease_s == leases[-1]:
                errors_ms = bench.lease_errors_ms(lease_s, rollout)
                idle = bench.idle(rollout)
            server.stop()
    assert bench is not None
    note_foreign_share([one.window for one in measured])
    return [
        *_hit_figures(measured),
        Figure(
            name="lease_error_ms",
            value=max(map(abs, errors_ms)),
            unit="ms, worst",
            target="<= 100",
            peers={"repeats": len(errors_ms)},
            spread=(min(errors_ms), max(errors_ms)),
        ),
        *_resident_figures(bench.loaded, idle),
        *_window_figures(measured),
    ]


def _hit_figures(measured: Sequence[_Measured]) -> list[Figure]:
    base = next(one.hits for one in measured if one.lease_s == NEVER_S)
    return [
        Figure(
            name=f"lease_hits_kept[{one.name}]",
            value=one.hits / base if base else None,
            unit="x no expiry",
            target=">= 0.95" if one.lease_s == 10.0 else None,
            peers={"hit share": one.hits, "hit share without expiry": base},
        )
        for one in sorted(measured, key=lambda one: one.lease_s)
    ]


def _resident_figures(loaded: Sequence[Residency], idle: Sequence[Residency]) -> list[Figure]:
    rollout, serving = loaded
    return [
        Figure(
            name="resident_over_live[loaded]",
            value=over_live(loaded),
            unit="x",
            target="<= 1.10",
            peers={
                "rollout alone": over_live([rollout]),
                "serving alone": over_live([serving]),
                "over fewest slabs": over_fewest(loaded),
            },
        ),
        Figure(
            name="resident_over_live[idle]",
            value=over_fewest(idle),
            unit="x",
            target="<= 1.05",
            peers={"slabs": sum(one.owned for one in idle)},
        ),
    ]


def _window_figures(measured: Sequence[_Measured]) -> list[Figure]:
    figures = []
    for one in sorted(measured, key=lambda one: one.lease_s):
        window = one.window
        rate = window.rollout_tokens / window.duration_s
        figures.append(Figure(name=f"rollout_tokens_per_s[{one.name}]", value=rate, unit="tokens/s"))
        for kind in ("ttft", "tpot"):
            p99 = latency_ms([window], kind, 99)
            peers: dict[str, float | None] = {"requests": len(window.requests)}
            figures.append(Figure(name=f"{kind}_p99_ms[{one.name}]", value=p99, unit="ms", peers=peers))
    return figures


# Sessions ------------------------------------------------------------------------------------------------


async def _hit_share(rollout: EngineControl, num_turns: int, seed: int) -> float:
    """Plays all sessions at once; cached prompt tokens over prompt tokens from the second turn on."""
    sessions = RolloutWorkload(
        task_tokens=TASK_TOKENS,
        min_action_tokens=ANSWER_TOKENS,
        max_action_tokens=ANSWER_TOKENS,
        observation_tokens=TOOL_TOKENS,
        turns=num_turns,
        max_trajectories=1,
        tool_s=TOOL_S,
        vocab_size=ROLLOUT_SPEC.vocab_size,
        temperature=0.0,
        seed=seed,
    )
    load = RolloutLoad(rollout.url, rollout.model, sessions, concurrency=NUM_SESSIONS)
    played = await load.run(duration_s=PATIENCE_S)
    if played.trajectories < NUM_SESSIONS or played.errors or played.aborts:
        raise WorkerError(
            f"{played.trajectories} of {NUM_SESSIONS} sessions ended within {PATIENCE_S:g} s; aborted turns: "
            f"{played.aborts}, errors: {played.first_errors}"
        )
    return played.later_cached_tokens / played.later_prompt_tokens


# The ledger --------------------------------------------------------------------------------------------


def _wait_returned(pool: PoolClient, lease_s: float) -> float:
    """Returns the seconds until rollout holds one slab and none is on its way back."""
    ledger, start_s = pool.ledger, time.monotonic()
    slot = next(slot for slot, engine in ledger.engines().items() if engine.role is Role.ROLLOUT)
    while ledger.num_owned(slot) > 1 or ledger.num_draining:
        if time.monotonic() > start_s + lease_s + RETURN_TIMEOUT_S:
            raise WorkerError(f"rollout still holds {ledger.num_owned(slot)} slabs, lease {lease_s:g} s")
        ledger.wait_change(ledger.change_seq, 0.001)
    return time.monotonic() - start_s


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_trace(parser)
    parser.add_argument(
        "--leases", type=float, nargs="+", metavar="S", help="these beside no expiry, instead of all five"
    )


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, _add_arguments))
