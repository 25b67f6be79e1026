"""Placing a job among thousands takes well under a millisecond; the proven optimum of 100 jobs takes seconds.

decision_ms[POLICY,JOBS]: median time of one decision (WEAVE §6.5, Table 5 beside it; another machine, and its
search is in C++) while JOBS jobs run in the groups that `weave` made of them. P99 and the number of groups
beside it. The decision alone: no job is added. index_ms[JOBS]: the filter over all groups.

submit_ms[POLICY,JOBS], tick_ms[POLICY,JOBS]: CPU time of a submission and of a tick in the scheduler itself,
with certificate, permits and queue, beside 2,000 other jobs and 20,000 ended ones. Heartbeats come between
the ticks. To fill the cluster takes a minute under `lifetime-multirate`.

exact_s[JOBS]: the optimum of JOBS jobs of Table 6's mix, from jobs to groups, solver's start included
(WEAVE: over 5 h at 13 jobs; intractable at 100). Not measured without OR-tools (the extra `cluster`).

    python benchmarks/bench_placement.py --json placement.json
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from lib.harness import median_figure, run_benchmark

from rose.measure.figures import Figure, percentile
from rose.scheduler.cluster.candidates import own_limit_s
from rose.scheduler.cluster.exact import optimum
from rose.scheduler.cluster.groups import Cluster, Rearrangement
from rose.scheduler.cluster.lifetime import Lifetime
from rose.scheduler.cluster.policies import ClusterPolicy, Weave
from rose.scheduler.cluster.pools import Pools
from rose.scheduler.group.model import Job, Phase
from rose.scheduler.runtime.channel.messages import (
    Granted,
    Heartbeat,
    Hello,
    Request,
    Submit,
    decode_scheduler_message,
)
from rose.scheduler.runtime.decide.cluster_scheduler import ClusterScheduler
from rose.scheduler.runtime.decide.records import JobRecord, JobState
from rose.scheduler.runtime.job.spec import ServeSpec
from rose.scheduler.sim.workloads import Workload, generate_trace, submissions

TABLE_5_MS = {100: 41.9, 500: 198.0, 1000: 318.0, 2000: 591.0}
SIZES = {True: (100, 2000, 20_000), False: (100, 500, 1000, 2000, 20_000)}
TARGETS = {("weave", 2000): "<= 0.1", ("lifetime", 2000): "<= 1"}
IN_THE_SCHEDULER = ("lifetime-static", "lifetime", "lifetime-multirate", "weave", "solo")
PARTS = ("decisions", "scheduler", "exact")
LEASE_S, TICK_S = 10.0, 0.25
EXACT = {13: "<= 1", 100: "<= 30"}


def measure(args: argparse.Namespace) -> list[Figure]:
    figures = []
    num_repeats = 200 if args.quick else 1000
    for size in SIZES[args.quick] if "decisions" in args.parts else ():
        figures += _decisions(size, num_repeats, args.seed)
    for policy in IN_THE_SCHEDULER if "scheduler" in args.parts else ():
        figures += _in_the_scheduler(policy, 2000, 20_000, args.seed, 40 if args.quick else 200)
    for size, target in EXACT.items() if "exact" in args.parts else ():
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


def _in_the_scheduler(policy: str, size: int, num_ended: int, seed: int, num: int) -> list[Figure]:
    specs = [_spec_of(job) for job in _jobs(size + num, seed)]
    rows = {
        f"job:old-{k}": JobRecord(
            spec={**specs[k % size], "name": f"old-{k}"},
            submitted_by="bench",
            number=k,
            state=JobState.DONE,
        ).to_row()
        for k in range(num_ended)
    }
    now, rng = 0.0, random.Random(seed)
    cluster = ServeSpec.model_validate({"policy": policy, "lease_s": LEASE_S})
    scheduler = ClusterScheduler(cluster, rows, now, 1, "bench")
    scheduler.handle("runner", Hello(seq=0, running={}, log_folder="/logs"), now)
    held: dict[str, Granted] = {}
    times_ms: dict[str, list[float]] = {"submit": [], "tick": []}
    for count, spec in enumerate(specs):
        name, now = spec["name"], now + TICK_S
        start_s = time.process_time()
        scheduler.handle("cli", Submit(seq=count, spec=spec), now)
        times_ms["submit"].append((time.process_time() - start_s) * 1e3)
        request = Request(seq=count, job=name, attempt=1, phase=Phase.ROLLOUT, iteration=0)
        scheduler.handle(name, request, now)
        for job in rng.sample(sorted(held), len(held) // int(LEASE_S / 2 / TICK_S)):
            hold = held[job]
            beat = Heartbeat(seq=0, job=job, attempt=1, phase=hold.phase, epoch=hold.epoch)
            scheduler.handle(job, beat, now)
        start_s = time.process_time()
        scheduler.tick(now)
        scheduler.next_wake_s(now)
        times_ms["tick"].append((time.process_time() - start_s) * 1e3)
        for outgoing in scheduler.take_batch().outgoing:
            message = decode_scheduler_message(outgoing.body)
            if isinstance(message, Granted):
                held[message.job] = message
    return [
        Figure(
            name=f"{what}_ms[{policy},{size}]",
            value=statistics.median(found[-num:]),
            unit="ms of CPU, P50",
            target="<= 5",
            peers={"P99": percentile(found[-num:], 99)},
            spread=(min(found[-num:]), max(found[-num:])),
        )
        for what, found in times_ms.items()
    ]


def _spec_of(job: Job) -> dict[str, Any]:
    phases = {"rollout": {"seconds": job.rollout_s}, "train": {"seconds": job.train_s}}
    limits = {"slo": max(1.02, job.slo), "iterations": job.num_iterations, "max_tokens": 8192}
    return {"name": job.name, "command": ["true"], "phases": phases, **limits}


def _decisions(size: int, num_repeats: int, seed: int) -> list[Figure]:
    cluster = _filled(size, seed)
    newcomers = _jobs(num_repeats, seed + 1, prefix="new")
    policies: tuple[ClusterPolicy, ...] = (
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


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, _add_arguments))
