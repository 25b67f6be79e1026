"""Placing a job among thousands takes well under a millisecond; the proven optimum of 100 jobs takes seconds.

decision_ms[POLICY,JOBS]: median time of one decision (WEAVE §6.5, Table 5 beside it; another machine, and its
search is in C++) while JOBS jobs run in the groups that `weave` made of them. P99 and the number of groups
beside it. The decision alone: no job is added. index_ms[JOBS]: the filter over all groups.

exact_s[JOBS]: the optimum of JOBS jobs of Table 6's mix, from jobs to groups, solver's start included
(WEAVE: over 5 h at 13 jobs; intractable at 100). Not measured without OR-tools (the extra `cluster`).

    python benchmarks/bench_placement.py --json placement.json
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec

from lib.harness import median_figure, run_benchmark

from rose.measure.figures import Figure, percentile
from rose.scheduler.cluster.candidates import own_limit_s
from rose.scheduler.cluster.exact import optimum
from rose.scheduler.cluster.groups import Cluster, Rearrangement
from rose.scheduler.cluster.lifetime import Lifetime
from rose.scheduler.cluster.model import Job
from rose.scheduler.cluster.policies import Policy, Weave
from rose.scheduler.cluster.pools import Pools
from rose.scheduler.sim.workloads import Workload, generate_trace, submissions

TABLE_5_MS = {100: 41.9, 500: 198.0, 1000: 318.0, 2000: 591.0}
SIZES = {True: (100, 2000, 20_000), False: (100, 500, 1000, 2000, 20_000)}
TARGETS = {("weave", 2000): "<= 0.1", ("lifetime", 2000): "<= 1"}
EXACT = {13: "<= 1", 100: "<= 30"}


def measure(args: argparse.Namespace) -> list[Figure]:
    figures = []
    num_repeats = 200 if args.quick else 1000
    for size in SIZES[args.quick]:
        figures += _decisions(size, num_repeats, args.seed)
    for size, target in EXACT.items():
        if find_spec("ortools") is None:
            figures.append(Figure(name=f"exact_s[{size}]", value=None, unit="s", target=target))
            continue
        values = []
        for repeat in range(2 if args.quick else 5):
            jobs = _jobs(size, args.seed + repeat)
            start_s = time.perf_counter()
            optimum(jobs, Pools(), own_limit_s)
            values.append(time.perf_counter() - start_s)
        figures.append(median_figure(f"exact_s[{size}]", values, "s", target=target))
    return figures


def _decisions(size: int, num_repeats: int, seed: int) -> list[Figure]:
    cluster = _filled(size, seed)
    newcomers = _jobs(num_repeats, seed + 1, prefix="new")
    policies: tuple[Policy, ...] = (
        Weave(),
        Weave(prune_saturated=False),
        Lifetime(),
        Lifetime(multi_rate=True),
    )
    figures = []
    groups = {"groups": float(len(cluster.groups))}
    for policy in policies:
        times_ms = _times_ms(newcomers, lambda job, policy=policy: policy.place(cluster, job, 0.0))  # type: ignore[misc]
        figures.append(
            Figure(
                name=f"decision_ms[{policy.name},{size}]",
                value=statistics.median(times_ms),
                unit="ms, P50",
                target=TARGETS.get((policy.name, size)),
                peers={"P99": percentile(times_ms, 99), "WEAVE": TABLE_5_MS.get(size), **groups},
                spread=(min(times_ms), max(times_ms)),
            )
        )
    times_ms = _times_ms(
        newcomers,
        lambda job: cluster.index.fit(job, own_limit_s(job), prune_saturated=True, multi_rate=False),
    )
    figures.append(
        Figure(
            name=f"index_ms[{size}]",
            value=statistics.median(times_ms),
            unit="ms, P50",
            target="<= 0.5" if size == 20_000 else None,
            peers={"P99": percentile(times_ms, 99)},
            spread=(min(times_ms), max(times_ms)),
        )
    )
    return figures


def _times_ms(jobs: Sequence[Job], decide: Callable[[Job], object]) -> list[float]:
    times_ms = []
    for job in jobs:
        start_s = time.perf_counter()
        decide(job)
        times_ms.append((time.perf_counter() - start_s) * 1e3)
    return times_ms


def _filled(size: int, seed: int) -> Cluster:
    """So many jobs running, each of another length."""
    cluster, policy = Cluster(Pools()), Weave()
    durations = [arrival.duration_s for arrival in generate_trace(seed, size)]
    for job, duration_s in zip(_jobs(size, seed), durations, strict=True):
        cluster.submit(job, 0.0, duration_s)
        cluster.apply(Rearrangement(groups=(policy.place(cluster, job, 0.0).group,)), 0.0)
    return cluster


def _jobs(size: int, seed: int, prefix: str = "j") -> list[Job]:
    """Table 6's mix; a day's work each."""
    found = [one.job for one in submissions(generate_trace(seed, size), Workload.MIXED, seed)]
    return [
        replace(job, name=f"{prefix}{job.name}", num_iterations=round(86_400 / job.solo_s)) for job in found
    ]


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure))
