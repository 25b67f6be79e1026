"""Groups chosen by lifetime cost, with a few moves, cost a good part less than WEAVE's. SIMULATED.

The shipped policies place jobs of WEAVE's Table 6 at the times of a trace (scheduler/sim). Jobs leave after
the trace's durations, as in the paper; moves pause a job for 300 s, which is in the bill and in its SLO
budget. Ratios are computed seed by seed; the table has their median over the seeds, with the smallest and the
largest.

cost_over_opt[POLICY,CASE]: dollars an hour over the optimum's. The optimum is, at every event, the proven
cheapest grouping under round-robin and a per-iteration SLO, regrouped for free. Policies that leave that
class may come below 1: `-multirate` gives jobs periods of their own, `-bank` holds the SLO over the lifetime
(a looser promise than WEAVE's). attainment[POLICY,CASE]: jobs whose SLO was kept, in the worst seed.
cheaper_than_weave[POLICY,CASE]: 1 - dollars over those of our own Algorithm 1. over_weave[verl,CASE],
[solo,CASE] (Figure 14): dollars over our Algorithm 1's of jobs that run both phases on their own H800 nodes,
as fast as on both kinds, and of jobs on their own nodes of both kinds. Beside it over `lifetime`.
dollars_over_opt[POLICY,CASE]: total dollars where slowed jobs stay longer, the optimum's as well.
cost_over_opt_live[CASE]: the same ratio as cost_over_opt with the trace played through the scheduler itself
(scheduler/sim/live.py): every submission, certificate, permit, iteration and move. CASE is mixed or
rollout-heavy under `lifetime-multirate`, and banking: mixed under `lifetime-multirate` with SLOs over the
lifetime. Beside it the policy alone, attainment and moves a job. drift[CASE] (Figure 17): dollars over those
of a regrouping to the optimum at every event and every hour, charged 300 s a move, while times drift by up to
30%. Beside it attainment over the lifetime, moves a job, and static WEAVE. Figures that need the optimum are
not measured without OR-tools (the extra `cluster`).

Cases: workloads (Figure 15a; `mixed` is Figure 20), uniform SLOs (15b), largest groups (15c). Beside the
figures stand total dollars, moves a job, and the paper's value where it has one. Nodes cost $14.80 (H20) and
$42.24 (H800) an hour; every job takes one of each. The search for each optimum takes about 10 s at most, with
`--quick` 0.3 s. If many jobs run at once the optimum is not proven, and `optimum's gap` is the mean share of
its cost that an unknown one might save. `--quick` plays the trace's first 60 jobs. Progress is on stderr.

    python benchmarks/bench_cost.py --trace philly_300_segment.csv --parts workloads --json cost.json
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lib.harness import run_benchmark
from sim.drift import drifts

from rose.measure.figures import Figure
from rose.scheduler.cluster.choice import MULTI_RATE, POLICIES
from rose.scheduler.cluster.exact import Exact
from rose.scheduler.cluster.lifetime import Lifetime
from rose.scheduler.cluster.policies import ClusterPolicy, Weave
from rose.scheduler.cluster.pools import Pools
from rose.scheduler.group.model import SloKind
from rose.scheduler.sim.live import SchedulerReplay
from rose.scheduler.sim.loop import Simulation, SimulationResult
from rose.scheduler.sim.progress import ProgressLines
from rose.scheduler.sim.workloads import Arrival, Workload, generate_trace, read_trace, submissions

PARTS = ("workloads", "slo", "size", "stretch", "drift", "live")
OPTIMUM_S = {True: 0.3, False: 10.0}
"""How long one search for the optimum takes at the most, quick or not."""
NUM_QUICK = 60
BANK = "-bank"
"""Suffix of a policy that is asked to keep SLOs over the lifetime only."""
FEW = ("weave", "lifetime", "lifetime-multirate", f"lifetime{BANK}")
EVERY = ("solo", "random", "greedy", "weave-unpruned", "lifetime-static", *FEW)
TARGETS = {
    ("lifetime", "mixed"): "<= 1.04",
    ("lifetime-multirate", "mixed"): "<= 0.99",
    (f"lifetime{BANK}", "mixed"): "<= 0.99",
    ("lifetime-multirate", "rollout-heavy"): "<= 0.90",
}
CHEAPER = {
    ("lifetime", "mixed"): ">= 0.08",
    ("lifetime-multirate", "mixed"): ">= 0.08",
    ("lifetime-multirate", "rollout-heavy"): ">= 0.20",
}
LIVE: dict[str, tuple[Workload, SloKind, str]] = {
    "mixed": (Workload.MIXED, SloKind.ITERATION, "<= 1.04"),
    "rollout-heavy": (Workload.ROLLOUT_HEAVY, SloKind.ITERATION, "<= 0.90"),
    "banking": (Workload.MIXED, SloKind.LIFETIME, "<= 0.95"),
}
PAPER = {("weave", "mixed"): 1.06, ("random", "mixed"): 1.97, ("greedy", "mixed"): 1.66}
PAPER_OVER_WEAVE = {"verl": 1.38, "solo": 1.84}
PAPER_DRIFT = {"increasing": 1.11, "decreasing": 1.10, "mixed": 1.08}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    name: str
    workload: Workload = Workload.MIXED
    slo: tuple[float, float] = (1.0, 2.0)
    max_residents: int = 5
    keeps_ends: bool = True
    policies: tuple[str, ...] = FEW


def measure(args: argparse.Namespace) -> list[Figure]:
    trace = read_trace(args.trace) if args.trace is not None else generate_trace(args.seed)
    num_seeds = args.seeds if args.seeds is not None else 1 if args.quick else 10
    if args.quick:
        trace = trace[:NUM_QUICK]
    seeds = range(args.seed, args.seed + num_seeds)
    limit_s = OPTIMUM_S[args.quick]
    figures: list[Figure] = []
    for case in _cases(args):
        figures += _figures(case, trace, seeds, limit_s)
    if "drift" in args.parts and find_spec("ortools") is not None:
        for kind in ("mixed",) if args.quick else PAPER_DRIFT:
            figures.append(_drift(kind, trace, seeds, limit_s))
    if "live" in args.parts and find_spec("ortools") is not None:
        figures += [_live(name, trace, seeds, limit_s) for name in LIVE]
    return figures


def _cases(args: argparse.Namespace) -> list[_Case]:
    if args.quick:
        heavy = _Case(name="rollout-heavy", workload=Workload.ROLLOUT_HEAVY)
        cases = [_Case(name="mixed", policies=EVERY), heavy] if "workloads" in args.parts else []
    else:
        cases = [
            _Case(
                name=workload.value, workload=workload, policies=EVERY if workload is Workload.MIXED else FEW
            )
            for workload in args.workloads
            if "workloads" in args.parts
        ]
    if "slo" in args.parts and not args.quick:
        cases += [_Case(name=f"slo={slo}", slo=(slo, slo)) for slo in (1.2, 1.5, 2.0)]
    if "size" in args.parts and not args.quick:
        cases += [_Case(name=f"size={size}", max_residents=size) for size in (2, 3, 4)]
    if "stretch" in args.parts:
        cases.append(_Case(name="mixed", keeps_ends=False))
    return cases


def _figures(case: _Case, trace: Sequence[Arrival], seeds: Sequence[int], limit_s: float) -> list[Figure]:
    exact = [Exact(limit_s=limit_s) for _ in seeds] if find_spec("ortools") is not None else []
    best = [_run("exact", case, trace, seed, one) for one, seed in zip(exact, seeds, strict=False)]
    gaps = [gap for one in exact for gap in one.gaps]
    results = {name: [_run(name, case, trace, seed) for seed in seeds] for name in case.policies}
    figures = []
    for name, runs in results.items():
        peers: dict[str, float | None] = {
            "total dollars": statistics.median(run.dollars for run in runs),
            "optimum's": statistics.median(run.dollars for run in best) if best else None,
            "optimum's gap": statistics.fmean(gaps) if gaps else None,
            "moves a job": statistics.fmean(run.num_moves / run.num_jobs for run in runs),
        }
        if not case.keeps_ends:
            ratios = [run.dollars / opt.dollars for run, opt in zip(runs, best, strict=False)]
            figures.append(_figure(f"dollars_over_opt[{name},{case.name}]", ratios, "x", None, peers))
            continue
        ratios = [run.dollars_per_hour / opt.dollars_per_hour for run, opt in zip(runs, best, strict=False)]
        paper = PAPER.get((name, case.name))
        target = TARGETS.get((name, case.name))
        figures.append(
            _figure(f"cost_over_opt[{name},{case.name}]", ratios, "x", target, peers | {"paper": paper})
        )
        kept = [run.attainment for run in runs]
        target = None if name in ("random", "greedy") else "== 1"
        figures.append(_figure(f"attainment[{name},{case.name}]", [min(kept)], "share", target, {}))
        if name.startswith("lifetime"):
            saved = [
                1 - run.dollars / weave.dollars for run, weave in zip(runs, results["weave"], strict=True)
            ]
            target = CHEAPER.get((name, case.name))
            figures.append(_figure(f"cheaper_than_weave[{name},{case.name}]", saved, "share", target, {}))
    return figures + (_over_weave(case, trace, seeds, results) if "solo" in results else [])


def _over_weave(
    case: _Case, trace: Sequence[Arrival], seeds: Sequence[int], results: dict[str, list[SimulationResult]]
) -> list[Figure]:
    """What jobs cost that share nothing: veRL on training nodes alone, and a pair of nodes for each job."""
    node = Pools().train.dollars_per_node_hour
    jobs = [submissions(trace, case.workload, seed, slo=case.slo) for seed in seeds]
    verl = [sum(one.job.num_train_nodes * one.work_s for one in each) * node / 3600 for each in jobs]
    solo = [run.dollars for run in results["solo"]]
    figures = []
    for name, dollars in (("verl", verl), ("solo", solo)):
        over = {
            policy: [paid / run.dollars for paid, run in zip(dollars, results[policy], strict=True)]
            for policy in ("weave", "lifetime")
        }
        peers: dict[str, float | None] = {
            "over lifetime": statistics.median(over["lifetime"]),
            "paper": PAPER_OVER_WEAVE[name],
        }
        figures.append(_figure(f"over_weave[{name},{case.name}]", over["weave"], "x", None, peers))
    return figures


def _run(
    name: str, case: _Case, trace: Sequence[Arrival], seed: int, policy: ClusterPolicy | None = None
) -> SimulationResult:
    kind = SloKind.LIFETIME if name.endswith(BANK) else SloKind.ITERATION
    jobs = submissions(trace, case.workload, seed, slo=case.slo, slo_kind=kind)
    pools = Pools(max_residents=case.max_residents)
    policy = policy if policy is not None else POLICIES[name.removesuffix(BANK)](seed)
    progress = ProgressLines(f"{case.name}, seed {seed}, {name}")
    return Simulation(jobs, policy, pools, keeps_ends=case.keeps_ends, progress=progress).run()


def _live(name: str, trace: Sequence[Arrival], seeds: Sequence[int], limit_s: float) -> Figure:
    workload, kind, target = LIVE[name]
    ratios, alone, attained, moves, gaps = [], [], [], [], list[float]()
    for seed in seeds:
        jobs = submissions(trace, workload, seed, slo_kind=kind)
        exact, policy = Exact(limit_s=limit_s), POLICIES[MULTI_RATE](seed)
        plain = submissions(trace, workload, seed)
        progress = ProgressLines(f"{name}, seed {seed}, optimum")
        best = Simulation(plain, exact, keeps_ends=True, progress=progress).run()
        alone.append(Simulation(jobs, policy, keeps_ends=True).run().dollars_per_hour / best.dollars_per_hour)
        progress = ProgressLines(f"{name}, seed {seed}, the scheduler itself")
        run = SchedulerReplay(jobs, MULTI_RATE, keeps_ends=True, progress=progress).run()
        ratios.append(run.dollars_per_hour / best.dollars_per_hour)
        attained.append(run.attainment)
        moves.append(run.num_moves / run.num_jobs)
        gaps += exact.gaps
    peers: dict[str, float | None] = {
        "policy alone": statistics.median(alone),
        "attainment": min(attained),
        "moves a job": statistics.fmean(moves),
        "optimum's gap": statistics.fmean(gaps),
    }
    return _figure(f"cost_over_opt_live[{name}]", ratios, "x", target, peers)


def _drift(kind: str, trace: Sequence[Arrival], seeds: Sequence[int], limit_s: float) -> Figure:
    ratios, static, kept, moves = [], [], [], []
    for seed in seeds:
        jobs = submissions(trace, Workload.MIXED, seed)
        changes = drifts(jobs, kind, seed)
        progress = ProgressLines(f"drift {kind}, seed {seed}, regrouping")
        exact = Exact(charges_moves=True, limit_s=limit_s)
        regrouped = Simulation(jobs, exact, keeps_ends=True, changes=changes, progress=progress).run()
        run = Simulation(jobs, Lifetime(), keeps_ends=True, changes=changes).run()
        weave = Simulation(jobs, Weave(), keeps_ends=True, changes=changes).run()
        static.append(weave.dollars / regrouped.dollars)
        ratios.append(run.dollars / regrouped.dollars)
        kept.append(run.mean_attainment)
        moves.append(run.num_moves / run.num_jobs)
    peers: dict[str, float | None] = {
        "attainment": min(kept),
        "moves a job": statistics.fmean(moves),
        "weave": statistics.median(static),
        "paper": PAPER_DRIFT[kind],
    }
    return _figure(f"drift[{kind}]", ratios, "x regrouping", "<= 1.08", peers)


def _figure(
    name: str, values: Sequence[float], unit: str, target: str | None, peers: dict[str, float | None]
) -> Figure:
    return Figure(
        name=name,
        value=statistics.median(values) if values else None,
        unit=unit,
        target=target,
        kind="simulated",
        peers=peers,
        spread=(min(values), max(values)) if len(values) > 1 else None,
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", type=Path, metavar="CSV", help="arrival_s,duration_s; else a generated one"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="instead of 10, or 1 with --quick")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--workloads", nargs="+", type=Workload, default=list(Workload), metavar="NAME")


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, _add_arguments))
