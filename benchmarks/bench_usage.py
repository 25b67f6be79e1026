"""Jobs in shared groups leave their nodes idle for a smaller share of the time than on nodes of their own.

SIMULATED, with the shipped policies, jobs of WEAVE's Table 6 and the times of a trace (as bench_cost.py).
Medians over the seeds, with the smallest and the largest.

idle[POLICY,POOL] (Figure 14b and c): the share of the paid time of a pool's nodes in which they compute
nothing, while phases take their longest times. Beside it stands the reduction against `solo`, as a share of
`solo`'s, and the paper's (of its own trace of 200 jobs). peak_nodes[POLICY,POOL]: the most nodes of eight
GPUs at once; beside it `solo`'s over this, and the paper's. placed[POLICY,KIND] (§6.4): the share of the
arrivals that join nodes in use, bring rollout nodes, or begin a group; beside it the paper's.
drift_use[DRIFT,POOL] (Figure 18): the share of the time in which the nodes compute under static `weave`,
minus the same under a regrouping to the optimum at every event and every hour. Regrouping stops a job for 300
s a move. In the paper it uses the rollout nodes better, by at most 0.059, and the training nodes worse. Not
measured without OR-tools (the extra `cluster`).

`--quick` plays the trace's first 60 jobs, and one kind of drift.

    python benchmarks/bench_usage.py --trace philly_300_segment.csv --json usage.json
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from lib.harness import run_benchmark
from sim.drift import SCALES, drifts
from sim.usage import Usage, UsageSimulation

from rose.measure.figures import Figure
from rose.scheduler.cluster.candidates import CandidateKind
from rose.scheduler.cluster.choice import POLICIES
from rose.scheduler.cluster.exact import Exact
from rose.scheduler.cluster.policies import ClusterPolicy, Weave
from rose.scheduler.group.model import Phase
from rose.scheduler.sim.loop import SimulationResult
from rose.scheduler.sim.workloads import Arrival, Workload, generate_trace, read_trace, submissions

SHARED = ("weave", "lifetime", "lifetime-multirate")
NUM_QUICK = 60
OPTIMUM_S = {True: 0.3, False: 10.0}
"""How long one search for the optimum takes at the most, quick or not."""
PAPER_LESS_IDLE = {Phase.ROLLOUT: 0.244, Phase.TRAIN: 0.431}
PAPER_LOWER_PEAK = {Phase.ROLLOUT: 328 / 216, Phase.TRAIN: 328 / 152}
PAPER_PLACED = {
    CandidateKind.DIRECT: 0.605,
    CandidateKind.SCALED: 0.15,
    CandidateKind.ISOLATED: 0.245,
}
"""Source: WEAVE §6.4."""


def measure(args: argparse.Namespace) -> list[Figure]:
    trace = read_trace(args.trace) if args.trace is not None else generate_trace(args.seed)
    if args.quick:
        trace = trace[:NUM_QUICK]
    seeds = range(args.seed, args.seed + (1 if args.quick else args.seeds))
    figures = _shared(trace, seeds)
    if find_spec("ortools") is not None:
        for kind in ("mixed",) if args.quick else SCALES:
            figures += _drift(kind, trace, seeds, OPTIMUM_S[args.quick])
    return figures


def _shared(trace: Sequence[Arrival], seeds: Sequence[int]) -> list[Figure]:
    solo = [_run("solo", trace, seed)[0] for seed in seeds]
    figures = [_figure(f"idle[solo,{phase}]", [1 - each.share(phase) for each in solo]) for phase in Phase]
    for name in SHARED:
        runs = [_run(name, trace, seed) for seed in seeds]
        for phase in Phase:
            idle = [1 - usage.share(phase) for usage, _ in runs]
            less = [1 - mine / (1 - one.share(phase)) for mine, one in zip(idle, solo, strict=True)]
            peers = {"less than solo": statistics.median(less), "paper": PAPER_LESS_IDLE[phase]}
            figures.append(_figure(f"idle[{name},{phase}]", idle, peers))
            peaks = [float(usage.peak[phase]) for usage, _ in runs]
            lower = [one.peak[phase] / mine for mine, one in zip(peaks, solo, strict=True)]
            peers = {"solo over it": statistics.median(lower), "paper": PAPER_LOWER_PEAK[phase]}
            figures.append(_figure(f"peak_nodes[{name},{phase}]", peaks, peers, unit="nodes"))
        for kind, paper in PAPER_PLACED.items():
            shares = [result.kinds[kind] / sum(result.kinds.values()) for _, result in runs]
            figures.append(_figure(f"placed[{name},{kind}]", shares, {"paper": paper}))
    return figures


def _run(name: str, trace: Sequence[Arrival], seed: int) -> tuple[Usage, SimulationResult]:
    simulation = UsageSimulation(submissions(trace, Workload.MIXED, seed), POLICIES[name](seed))
    return simulation.usage, simulation.run()


def _drift(kind: str, trace: Sequence[Arrival], seeds: Sequence[int], limit_s: float) -> list[Figure]:
    static, regrouped = list[Usage](), list[Usage]()
    for seed in seeds:
        jobs = submissions(trace, Workload.MIXED, seed)
        changes = drifts(jobs, kind, seed)
        best = Exact(charges_moves=True, limit_s=limit_s)
        policies: tuple[tuple[list[Usage], ClusterPolicy], ...] = ((static, Weave()), (regrouped, best))
        for found, policy in policies:
            simulation = UsageSimulation(jobs, policy, changes=changes)
            simulation.run()
            found.append(simulation.usage)
    return [
        _figure(
            f"drift_use[{kind},{phase}]",
            [mine.share(phase) - other.share(phase) for mine, other in zip(static, regrouped, strict=True)],
            {
                "static": statistics.median(each.share(phase) for each in static),
                "regrouping": statistics.median(each.share(phase) for each in regrouped),
            },
        )
        for phase in Phase
    ]


def _figure(
    name: str, values: Sequence[float], peers: dict[str, float] | None = None, unit: str = "share"
) -> Figure:
    return Figure(
        name=name,
        value=statistics.median(values),
        unit=unit,
        kind="simulated",
        peers=dict(peers) if peers is not None else {},
        spread=(min(values), max(values)) if len(values) > 1 else None,
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", type=Path, metavar="CSV", help="arrival_s,duration_s; else a generated one"
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N")


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, _add_arguments))
