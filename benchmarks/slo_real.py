"""Measured runs for bench_slo: two real engines on one pool, one policy after another on the same requests.

Owns the engines and the measured figures. Repetitions are interleaved: each round runs every policy on one
sample of the trace, in a random order; ratios are taken within a round, and their spread is over the rounds.
"""

import os
import random
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from harness import median_figure
from rich.console import Console
from rich.table import Table
from rig import Rig

from rose.demo.figures import Figure, attainment, percentile, tpots_s, ttfts_s
from rose.demo.plan import DemoOptions, DemoPlan
from rose.demo.records import PhaseName, PhaseResult, RequestRecord
from rose.demo.run import RlSteps
from rose.demo.windows import WindowRunner, WindowSpec
from rose.node.control import EngineControl
from rose.node.processes import ServerProcess
from rose.types import GateMode, Role

ALONE, ROLLOUT_ALONE, DUAL = "serving alone", "rollout alone", "dual"
MODES = {
    "naive": GateMode.OFF,
    "alternate": GateMode.ALTERNATE,
    "idle only": GateMode.IDLE,
    "ttft-only": GateMode.TTFT_ONLY,
    "tpot-only": GateMode.TPOT_ONLY,
    "equations": GateMode.EQUATIONS,
    DUAL: GateMode.DUAL,
}
MAX_FOREIGN_CPU_SHARE = 0.05
"""A window in which others used more than this of the machine is marked in the table."""
SETTLE_S = 0.5

Windows = dict[str, list[PhaseResult]]
LATENCIES: dict[str, Callable[[Iterable[RequestRecord]], list[float]]] = {"ttft": ttfts_s, "tpot": tpots_s}


@dataclass(frozen=True, slots=True)
class _PinnedClients:
    rig: Rig
    cpus: tuple[int, ...] | None

    def run(self, argv: list[str], name: str) -> ServerProcess:
        return self.rig.run(argv, name, self.cpus)


def measure(args: Namespace, console: Console) -> list[Figure]:
    """Starts both engines, profiles them, and runs all rounds."""
    window_s, rounds = (12.0, 1) if args.quick else (24.0, 3)
    with Rig() as rig:
        options = DemoOptions(out_dir=rig.folder, quick=args.quick, seed=args.seed, trace=args.trace)
        plan = DemoPlan.of(options)
        serving, rollout = _start(rig, plan)
        runner = WindowRunner(plan, _PinnedClients(rig, plan.cpus.others), serving, rollout)
        windows: Windows = defaultdict(list)
        steps = RlSteps(rollout)
        for index in range(rounds):
            names = [ALONE, ROLLOUT_ALONE, *MODES]
            for name in random.Random(args.seed + index).sample(names, len(names)):
                _set_gate(MODES.get(name, GateMode.DUAL), serving, rollout)
                windows[name].append(runner.run(_spec(name, index, window_s, rollout), steps.tick))
    _print(windows, plan, console)
    return _figures(windows, plan)


def _start(rig: Rig, plan: DemoPlan) -> tuple[EngineControl, EngineControl]:
    pool = f"slo-{os.getpid()}"
    rig.pool(
        pool,
        num_slabs=plan.pool.num_slabs,
        slab_bytes=plan.pool.slab_bytes,
        headroom_slabs=plan.pool.headroom_slabs,
    )
    for role in Role:
        rig.start_engine(
            str(role),
            role,
            pool=pool,
            slo_ttft_ms=1000 * plan.slo.ttft_s,
            slo_tpot_ms=1000 * plan.slo.tpot_s,
            compute_cpus=plan.cpus.compute,
        )
    controls = {role: rig.wait_engine(str(role), plan.cpus.others) for role in Role}
    # Rollout first: profiling serving takes the whole pool, which cuts rollout's budget to nothing.
    for role in (Role.ROLLOUT, Role.SERVING):
        controls[role].profile()
    return controls[Role.SERVING], controls[Role.ROLLOUT]


def _set_gate(mode: GateMode, *engines: EngineControl) -> None:
    for engine in engines:
        engine.set_gate(mode)
    time.sleep(SETTLE_S)  # an idle engine obeys within 50 ms


def _spec(name: str, index: int, window_s: float, rollout: EngineControl) -> WindowSpec:
    return WindowSpec(
        name=PhaseName.ROSE,
        variant=name.replace(" ", "-"),
        index=index,
        duration_s=window_s,
        has_serving=name != ROLLOUT_ALONE,
        rollout_url=None if name == ALONE else rollout.url,
    )


def _figures(windows: Windows, plan: DemoPlan) -> list[Figure]:
    alone_rates = [window.rollout_tokens / window.duration_s for window in windows[ROLLOUT_ALONE]]
    harvest = {name: _harvest(windows[name], alone_rates) for name in MODES}
    free = [1 - window.serving_busy_s / window.duration_s for window in windows[DUAL]]
    idle_free = [1 - window.serving_busy_s / window.duration_s for window in windows["idle only"]]
    figures = [_attainment(windows, plan, kind) for kind in ("ttft", "tpot", "itl")]
    figures += [
        median_figure(
            "harvested_fraction",
            harvest[DUAL],
            "of rollout alone",
            target=">= 0.80",
            peers={name: _mean(values) for name, values in harvest.items() if name != DUAL},
        ),
        median_figure(
            "harvested_free_fraction", _over(harvest[DUAL], free), "of free time", target=">= 0.97"
        ),
        _ratio("ttft_p99_ratio", windows, DUAL, "ttft", "<= 1.15"),
        _ratio("tpot_p99_ratio", windows, DUAL, "tpot", None),
        _ratio("invisible_p99_ratio[ttft]", windows, "idle only", "ttft", "<= 1.10"),
        _ratio("invisible_p99_ratio[tpot]", windows, "idle only", "tpot", "<= 1.05"),
        median_figure(
            "invisible_idle_fraction",
            _over(harvest["idle only"], idle_free),
            "of idle time",
            target=">= 0.95",
        ),
    ]
    return figures


def _attainment(windows: Windows, plan: DemoPlan, kind: str) -> Figure:
    shares = {name: _attained(many, plan, kind) for name, many in windows.items() if name != ROLLOUT_ALONE}
    value, alone = shares.pop(DUAL), shares[ALONE]
    is_reachable = alone is not None and alone >= 0.99
    target = ">= 0.99" if is_reachable else None
    return Figure(name=f"slo_attainment[{kind}]", value=value, unit="share", target=target, peers=shares)


def _attained(windows: list[PhaseResult], plan: DemoPlan, kind: str) -> float | None:
    requests = [request for window in windows for request in window.requests]
    if kind == "ttft":
        return attainment(requests, lambda request: request.ttft_s, plan.slo.ttft_s)
    if kind == "tpot":
        return attainment(requests, lambda request: request.tpot_s, plan.slo.tpot_s)
    return attainment(requests, lambda request: request.max_itl_s, plan.slo.tpot_s)


def _ratio(name: str, windows: Windows, policy: str, kind: str, target: str | None) -> Figure:
    def ratios(of: str) -> list[float]:
        pairs = zip(windows[of], windows[ALONE], strict=True)
        return [_p99(ours, kind) / _p99(alone, kind) for ours, alone in pairs]

    peers: dict[str, float | None] = {each: _mean(ratios(each)) for each in MODES if each != policy}
    return median_figure(name, ratios(policy), "x serving alone", target=target, peers=peers)


def _p99(window: PhaseResult, kind: str) -> float:
    value = percentile(LATENCIES[kind](window.requests), 99)
    return value if value is not None else float("nan")


def _harvest(windows: list[PhaseResult], alone_rates: list[float]) -> list[float]:
    return _over([window.rollout_tokens / window.duration_s for window in windows], alone_rates)


def _over(values: list[float], by: list[float]) -> list[float]:
    return [value / divisor for value, divisor in zip(values, by, strict=True)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _print(windows: Windows, plan: DemoPlan, console: Console) -> None:
    slo = f"SLO {1e3 * plan.slo.ttft_s:.0f} / {1e3 * plan.slo.tpot_s:.0f} ms"
    table = Table(title=f"MEASURED on two real engines, {slo}")
    columns = (
        "policy",
        "TTFT P50/P95/P99 ms",
        "TPOT P50/P95/P99 ms",
        "rollout tokens/s",
        "serving busy",
        "foreign CPU",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right")
    for name, many in windows.items():
        requests = [request for window in many for request in window.requests]
        seconds = sum(window.duration_s for window in many)
        foreign = max(window.foreign_cpu_share for window in many)
        table.add_row(
            name,
            *(_percentiles(values(requests)) for values in LATENCIES.values()),
            f"{sum(window.rollout_tokens for window in many) / seconds:.0f}",
            f"{sum(window.serving_busy_s for window in many) / seconds:.2f}",
            f"{foreign:.2f}{' (disturbed)' if foreign > MAX_FOREIGN_CPU_SHARE else ''}",
        )
    console.print(table)


def _percentiles(values: list[float]) -> str:
    found = [percentile(values, percent) for percent in (50, 95, 99)]
    return " / ".join("-" if value is None else f"{1e3 * value:.0f}" for value in found)
