"""Jobs that share nodes phase by phase get almost all of what nodes of their own would give them.

Real processes under `rose sched serve`; phases sleep for the paper's lengths / 400 (a device's work costs the
host's CPU nothing), their working sets are copied to and from host memory under the permit.

  mux[temporal], [train], [spatial]  what solo disaggregation pays for the same progress over what the group
                 pays, at WEAVE's prices: sum over jobs of (iterations/s in the group / alone) x dollars/h
                 alone, over the group's dollars/h. Beside it: what a schedule without any overhead would give
  mux[compute]   temporal, with phases that compute on a CPU of their own each, as nodes do
  mux_overhead[*] longest job's iteration in the group over its iteration alone, less one
  mux_over[gavel+,*], [verl,*]  SIMULATED: the same gain without overhead, over that of whole jobs that share
                 the group's nodes over time in the best fractions, and of whole jobs on H800 nodes alone.
                 Beside it the paper's (Figure 10). Not measured without OR-tools (the extra `cluster`)
  naive_slowdown[longer job], [shorter job]  SIMULATED: two rollout-heavy jobs of Table 6 on one node pair,
                 first come, first served; beside it the paper's pair (Figure 3)
  permit_ms[unix], [redis], [redis,everysec]  a free permit, asked for and granted, to a job's process;
                 a Redis that syncs each write to its disk, and one that does so every second

    python benchmarks/bench_mux.py --json mux.json
"""

import argparse
import os
import random
import statistics
import time
from dataclasses import replace
from importlib.util import find_spec

from lib.cluster.phase_job import compute
from lib.cluster.redis_server import redis_server
from lib.cluster.rig import ClusterRig, RigJob
from lib.harness import median_figure, run_benchmark
from sim.group.fifo import naive_slowdowns
from sim.group.micro import micro_groups
from sim.group.whole_jobs import gavel, interleaved, verl, worth

from rose.measure.figures import Figure, percentile
from rose.scheduler.group.model import Group

ONLY = ("temporal", "train", "spatial", "compute", "peers", "permits")
SCALE = 1 / 400
"""The fraction of the paper's phase times. Longer phases would only make overheads look smaller."""
SET_MB = 16
SLO = 4.0
"""Placement is given here: nothing is to be refused."""
NUM_PAIRS = 1000
PAPER_OVER = {
    ("gavel+", "temporal"): 1.73,
    ("gavel+", "train"): 1.43,
    ("gavel+", "spatial"): 1.78,
    ("verl", "temporal"): 1.47,
    ("verl", "train"): 1.35,
    ("verl", "spatial"): 1.43,
}
"""Source: WEAVE §6.2."""


class Mux:
    """Jobs, and the nodes that they share."""

    def __init__(self, group: Group, jobs: list[RigJob]) -> None:
        self.group = group
        self.name = group.name
        self.jobs = jobs

    def gain(self, rates: dict[str, float]) -> float:
        """``rates``: each job's iterations/s in the group over alone."""
        return worth(self.group, rates)


def measure(args: argparse.Namespace) -> list[Figure]:
    num_iterations, num_repeats = (6, 1) if args.quick else (8, 3)
    figures: list[Figure] = []
    for mux in _muxes(num_iterations, args.compute_s):
        if args.only not in (None, mux.name):
            continue
        gains, overheads = [], []
        for _ in range(num_repeats):
            gain, overhead = _run(mux)
            gains.append(gain)
            overheads.append(overhead)
        target = ">= 1.9" if mux.name != "compute" else None
        figures.append(
            median_figure(
                f"mux[{mux.name}]", gains, "x", target=target, peers={"no overhead": interleaved(mux.group)}
            )
        )
        figures.append(median_figure(f"mux_overhead[{mux.name}]", overheads, "", target="<= 0.05"))
    if args.only in (None, "peers"):
        figures += _peers(args.seed)
    if args.only not in (None, "permits"):
        return figures
    num_permits = 300 if args.quick else 2_000
    figures.append(_permits("unix", None, num_permits))
    for name, fsync in (("redis", "always"), ("redis,everysec", "everysec")):
        with redis_server(args.redis_server, fsync) as server:
            if server is None:
                figures.append(Figure(name=f"permit_ms[{name}]", value=None, unit="ms", target="<= 1"))
            else:
                figures.append(_permits(name, server.url, num_permits))
    return figures


def _muxes(num_iterations: int, compute_s: float) -> list[Mux]:
    muxes = [Mux(group, _scaled(group, num_iterations)) for group in micro_groups()]
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) >= 2:
        units = _units(compute_s, cpus[0])
        both = [
            RigJob(
                name=name,
                rollout=units,
                train=units,
                num_iterations=num_iterations,
                set_mb=SET_MB,
                cpus=(cpus[0], cpus[1]),
            )
            for name in ("a1", "a2")
        ]
        muxes.append(Mux(replace(muxes[0].group, name="compute"), both))
    return muxes


def _scaled(group: Group, num_iterations: int) -> list[RigJob]:
    return [
        RigJob(
            name=each.job.name,
            rollout=each.job.rollout_s * SCALE,
            train=each.job.train_s * SCALE,
            num_iterations=num_iterations,
            rollout_nodes=each.rollout_nodes,
            num_train_nodes=each.job.num_train_nodes,
            set_mb=SET_MB,
        )
        for each in group.members
    ]


def _peers(seed: int) -> list[Figure]:
    figures = []
    for group in micro_groups() if find_spec("ortools") is not None else ():
        gain = interleaved(group)
        gavel_peers = {"no training on H20": gain / gavel(group, trains_on_rollout_nodes=False)}
        for name, worth_of, peers in (
            ("gavel+", gavel(group), gavel_peers),
            ("verl", verl(group), {"rollouts as fast as on H20": gain / verl(group, slowdown=1.0)}),
        ):
            figures.append(
                Figure(
                    name=f"mux_over[{name},{group.name}]",
                    value=gain / worth_of,
                    unit="x",
                    kind="simulated",
                    peers={**peers, "paper": PAPER_OVER[name, group.name]},
                )
            )
    slowdowns = [naive_slowdowns(random.Random(f"{seed} {number}")) for number in range(NUM_PAIRS)]
    for number, (name, paper) in enumerate((("longer job", 1.40), ("shorter job", 1.64))):
        values = [each[number] for each in slowdowns]
        figures.append(
            Figure(
                name=f"naive_slowdown[{name}]",
                value=statistics.median(values),
                unit="x alone",
                kind="simulated",
                peers={"paper": paper},
                spread=(min(values), max(values)),
            )
        )
    return figures


def _units(seconds: float, cpu: int) -> int:
    """Work that takes about ``seconds`` on one CPU."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        compute(100)
        begin_s = time.perf_counter()
        compute(200)
        return max(1, int(200 * seconds / (time.perf_counter() - begin_s)))
    finally:
        os.sched_setaffinity(0, before)


def _run(mux: Mux) -> tuple[float, float]:
    """Gain, and overhead of the longest job. Each job alone first, in the same run."""
    alone = {job.name: _iteration_s([job], mux)[job.name] for job in _distinct(mux.jobs)}
    alone = {job.name: alone[_twin(job, mux.jobs)] for job in mux.jobs}
    shared = _iteration_s(mux.jobs, mux)
    longest = max(mux.jobs, key=lambda job: alone[job.name]).name
    gain = mux.gain({name: alone[name] / shared[name] for name in shared})
    return gain, shared[longest] / alone[longest] - 1.0


def _twin(job: RigJob, jobs: list[RigJob]) -> str:
    """The first job of the same shape: alone, both take the same time."""

    def shape(each: RigJob) -> tuple[float, float, int]:
        return (each.rollout, each.train, len(each.rollout_nodes))

    return next(each.name for each in jobs if shape(each) == shape(job))


def _distinct(jobs: list[RigJob]) -> list[RigJob]:
    return [job for job in jobs if _twin(job, jobs) == job.name]


def _iteration_s(jobs: list[RigJob], mux: Mux) -> dict[str, float]:
    """Mean time between iterations, while all of the jobs are running. The first is warm-up."""
    names = {job.name for job in jobs}
    with ClusterRig(mux.group.num_rollout_nodes, mux.group.num_train_nodes) as rig:
        for job in jobs:
            rig.submit(job, slo=SLO)
        rig.wait_done(names, 120.0)
        ends = {
            name: [each.end_s for each in rig.phases() if (each.job, each.phase) == (name, "train")]
            for name in names
        }
    begin_s = max(times[0] for times in ends.values())
    end_s = min(times[-1] for times in ends.values())
    shared = {name: [at_s for at_s in times if begin_s <= at_s <= end_s] for name, times in ends.items()}
    return {name: (times[-1] - times[0]) / (len(times) - 1) for name, times in shared.items()}


def _permits(kind: str, url: str | None, num_permits: int) -> Figure:
    """Round trips of a job that has its nodes to itself."""
    with ClusterRig(1, 1, url) as rig:
        job = RigJob(name="permits", rollout=1.0, train=1.0, num_iterations=1, num_permits=num_permits)
        rig.submit(job, slo=SLO)
        rig.wait_done({"permits"}, 120.0)
        waits_ms = sorted(1e3 * each["wait_s"] for each in rig.notes())
    return Figure(
        name=f"permit_ms[{kind}]",
        value=percentile(waits_ms, 50),
        unit="ms P50",
        target="<= 1",
        peers={"P99": percentile(waits_ms, 99)},
    )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=ONLY)
    parser.add_argument("--redis-server", default="redis-server", help="its program (%(default)s)")
    parser.add_argument("--compute-s", type=float, default=0.5, help="length of a computed phase")


if __name__ == "__main__":
    raise SystemExit(run_benchmark(__doc__, measure, _add_arguments))
