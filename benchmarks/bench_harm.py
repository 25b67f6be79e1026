"""What rollouts cost serving, as the engine reports it, beside what they really cost.

Simulates a serving engine beside rollouts. The true harm is known, because the same traffic also runs without
rollouts (benchmarks/sim/harm.py). The slices, the records, the estimate and the control are the shipped ones.

    python benchmarks/bench_harm.py --json harm.json
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from lib.harness import run_benchmark
from lib.slo.figures import mean
from lib.slo.simulated import Sampling, TwinBench
from rich.console import Console
from rich.table import Table
from sim.harm import HarmedServing, PoissonTraffic, ServedRun
from sim.twin.pairs import PAIR_8B, PAIR_32B

from rose.admission.gate import GateSettings
from rose.admission.harm import Estimate, RequestDelay, StepHarm, estimate_harm
from rose.measure.figures import Figure
from rose.measure.trace import trace_or_synthetic
from rose.types import GateMode

INJECTED = (0.0, 0.02, 0.05, 0.10)
"""Shares by which every step is slower while rollouts are let in; waits for rollout steps come on top."""
HORIZON_S = 600.0
RETREAT_FROM_S = 120.0
RETREAT_ALLOWED = 0.05
LATENCIES: dict[str, Callable[[RequestDelay], float]] = {
    "ttft": lambda one: one.ttft_s,
    "tpot": lambda one: one.tpot_s,
}


def measure(args: argparse.Namespace) -> list[Figure]:
    num_runs = 8 if args.quick else 100
    seeds = [args.seed + 1000 * run for run in range(num_runs)]
    alone = [_run(seed, has_rollouts=False) for seed in seeds]
    table = Table(title=f"SIMULATED: reported and true harm, {num_runs} runs of {HORIZON_S:.0f} s")
    for column in ("slower by", "latency", "true", "reported", "half-width", "within its bounds"):
        table.add_column(column, justify="right")
    figures = []
    for slowdown in INJECTED:
        runs = [_run(seed, has_rollouts=True, slowdown=slowdown) for seed in seeds]
        reports = [estimate_harm(run.requests, StepHarm.of(run.slices)) for run in runs]
        for name in ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99"):
            true = _true_harm(name, runs, alone)
            found = [report.latencies[name] for report in reports if name in report.latencies]
            within = sum(one.low <= true <= one.high for one in found) / len(found)
            table.add_row(f"{slowdown:.0%}", name, f"{true:+.3f}", *_cells(found), f"{within:.2f}")
            figures.append(
                Figure(
                    name=f"harm_error[{slowdown:.0%}, {name}]",
                    value=within,
                    unit="share within bounds",
                    target=">= 0.95",
                    kind="simulated",
                    peers={"true": true, "reported": float(np.mean([one.value for one in found]))},
                )
            )
    Console().print(table)
    return [*figures, _retreat(seeds), *_default_mode(args)]


def _run(seed: int, *, has_rollouts: bool, slowdown: float = 0.0) -> ServedRun:
    return HarmedServing(
        PoissonTraffic(), horizon_s=HORIZON_S, seed=seed, has_rollouts=has_rollouts, slowdown=slowdown
    ).run()


def _true_harm(name: str, runs: Sequence[ServedRun], alone: Sequence[ServedRun]) -> float:
    """Returns the difference of the quantiles over all runs; that of a single run depends on chance."""
    kind, _, percent = name.partition("_p")
    latency = LATENCIES[kind]
    with_rollouts, without = (
        [value for run in many for each in run.requests if (value := latency(each)) > 0]
        for many in (runs, alone)
    )
    return float(np.percentile(with_rollouts, int(percent)) / np.percentile(without, int(percent)) - 1)


def _cells(found: Sequence[Estimate]) -> tuple[str, str]:
    values = np.mean([one.value for one in found])
    return f"{values:+.3f}", f"{np.mean([one.half_width for one in found]):.3f}"


def _retreat(seeds: Sequence[int]) -> Figure:
    """Makes steps a tenth slower beside rollouts, and measures how long it takes until rollouts are held
    back."""
    seconds, shares = [], []
    for seed in seeds[: max(4, len(seeds) // 4)]:
        run = HarmedServing(
            PoissonTraffic(),
            horizon_s=2 * RETREAT_FROM_S,
            seed=seed,
            has_rollouts=True,
            slowdown=0.10,
            slow_from_s=RETREAT_FROM_S,
            allowed=RETREAT_ALLOWED,
        ).run()
        retreats = [at for at, share in run.closed_shares if at > RETREAT_FROM_S and share > 0.2]
        shares += [share for at, share in run.closed_shares if at > RETREAT_FROM_S]
        seconds.append(retreats[0] - RETREAT_FROM_S if retreats else RETREAT_FROM_S)
    return Figure(
        name="retreat_s",
        value=float(np.median(seconds)),
        unit="s",
        target="<= 60",
        kind="simulated",
        spread=(min(seconds), max(seconds)),
        peers={"closed_share": float(np.mean(shares))},
    )


def _default_mode(args: argparse.Namespace) -> list[Figure]:
    """Plays the default gate at GPU scale beside serving alone on the same traffic, with nothing shut out."""
    trace = trace_or_synthetic(args.trace, args.seed)
    sampling = Sampling(horizon_s=200.0, repeats=2 if args.quick else 6, seed=args.seed)
    bench, figures = TwinBench(trace, sampling, Console()), []
    for pair in (PAIR_8B, PAIR_32B):
        gate = GateSettings(slo=pair.slo, mode=GateMode.IDLE)
        samples = bench.traffic(pair, 1.0)
        alone, shared = (bench.run(pair, gate, samples, rollouts=rollouts) for rollouts in (False, True))
        for kind in ("ttft", "tpot"):
            figures.append(
                Figure(
                    name=f"default_harm[{pair.name}, {kind} P99]",
                    value=shared.pooled(kind, 99) / alone.pooled(kind, 99),
                    unit="x serving alone",
                    target="<= 1.02",
                    kind="simulated",
                    peers={"P50": shared.pooled(kind, 50) / alone.pooled(kind, 50)},
                )
            )
        figures.append(
            Figure(
                name=f"default_harvest_of_idle[{pair.name}]",
                value=mean(shared.harvest) / mean(alone.free),
                unit="share",
                target=">= 0.95",
                kind="simulated",
                peers={"harvest": mean(shared.harvest), "closed_share": 0.0},
            )
        )
    return figures


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, help="Azure-style CSV; default: a generated trace like it")


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, _add_arguments))
