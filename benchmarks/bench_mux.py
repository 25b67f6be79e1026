"""Jobs that share nodes phase by phase get almost all of what nodes of their own would give them.

Real processes under `rose sched serve`; phases sleep for the paper's lengths / 400 (a device's work costs the
host's CPU nothing), their working sets are copied to and from host memory under the permit.

  mux[temporal], [train], [spatial]  what solo disaggregation pays for the same progress over what the group
                 pays, at WEAVE's prices: sum over jobs of (iterations/s in the group / alone) x dollars/h
                 alone, over the group's dollars/h. Beside it: what a schedule without any overhead would give
  mux[compute]   temporal, with phases that compute on a CPU of their own each, as nodes do
  mux_overhead[*] longest job's iteration in the group over its iteration alone, less one
  permit_ms[unix], [redis], [redis,everysec]  a free permit, asked for and granted, to a job's process;
                 a Redis that syncs each write to its disk, and one that does so every second

    python benchmarks/bench_mux.py --json mux.json
"""

import argparse
import os
import time

from lib.cluster.phase_job import compute
from lib.cluster.redis_server import redis_server
from lib.cluster.rig import ClusterRig, RigJob
from lib.harness import median_figure, run_benchmark

from rose.measure.figures import Figure, percentile
from rose.scheduler.group.model import Group, Job, Member

ROLLOUT_DOLLARS, TRAIN_DOLLARS = 1.85 * 8, 5.28 * 8
"""A node's price per hour. Source: WEAVE Table 1 (H20, H800)."""
SCALE = 1 / 400
"""The fraction of the paper's phase times. Longer phases would only make overheads look smaller."""
SET_MB = 16
SLO = 4.0
"""Placement is given here: nothing is to be refused."""


class Mux:
    """One of WEAVE's micro-benchmarks (§6.2): jobs, and the nodes that they share."""

    def __init__(self, name: str, num_rollout_nodes: int, num_train_nodes: int, jobs: list[RigJob]) -> None:
        self.name = name
        self.num_rollout_nodes = num_rollout_nodes
        self.num_train_nodes = num_train_nodes
        self.jobs = jobs

    def ideal(self) -> float:
        """Without overhead: a round-robin cycle of the model's length."""
        cycle_s = self.group().round_robin_s
        return self.gain({job.name: (job.rollout + job.train) / cycle_s for job in self.jobs})

    def gain(self, rates: dict[str, float]) -> float:
        """``rates``: each job's iterations/s in the group over alone."""
        alone = sum(
            rates[job.name] * _dollars(len(job.rollout_nodes), job.num_train_nodes) for job in self.jobs
        )
        return alone / _dollars(self.num_rollout_nodes, self.num_train_nodes)

    def group(self) -> Group:
        """Returns the group as the placement policies see it."""
        members = tuple(
            Member(
                job=Job(
                    name=job.name,
                    rollout_s=job.rollout,
                    train_s=job.train,
                    num_rollout_nodes=len(job.rollout_nodes),
                    num_train_nodes=job.num_train_nodes,
                ),
                rollout_nodes=job.rollout_nodes,
            )
            for job in self.jobs
        )
        return Group(
            name=self.name,
            num_train_nodes=self.num_train_nodes,
            num_rollout_nodes=self.num_rollout_nodes,
            members=members,
        )


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
            median_figure(f"mux[{mux.name}]", gains, "x", target=target, peers={"no overhead": mux.ideal()})
        )
        figures.append(median_figure(f"mux_overhead[{mux.name}]", overheads, "", target="<= 0.05"))
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
    """Lengths of one iteration from Table 4 (a: 257.7 s, b: 525.4 s, c: 574.6 s), split as §6.2 says: A in
    halves, D 2.5:1, E 6:1. The paper gives no split of C: 200 s of rollout leave its nodes to both D."""

    def job(
        name: str, rollout_s: float, train_s: float, nodes: tuple[int, ...], num_train: int = 1
    ) -> RigJob:
        return RigJob(
            name=name,
            rollout=rollout_s * SCALE,
            train=train_s * SCALE,
            num_iterations=num_iterations,
            rollout_nodes=nodes,
            num_train_nodes=num_train,
            set_mb=SET_MB,
        )

    temporal = [job("a1", 128.8, 128.8, (0,)), job("a2", 128.8, 128.8, (0,))]
    train = [job("d1", 375.3, 150.1, (0,)), job("d2", 375.3, 150.1, (1,)), job("e", 450.3, 75.1, (2,))]
    spatial = [
        job("c", 200.0, 374.6, (0, 1), 2),
        job("d1", 375.3, 75.1, (0,), 2),
        job("d2", 375.3, 75.1, (1,), 2),
    ]
    muxes = [Mux("temporal", 1, 1, temporal), Mux("train", 3, 1, train), Mux("spatial", 2, 2, spatial)]
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
        muxes.append(Mux("compute", 1, 1, both))
    return muxes


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
    with ClusterRig(mux.num_rollout_nodes, mux.num_train_nodes) as rig:
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


def _dollars(num_rollout_nodes: int, num_train_nodes: int) -> float:
    return num_rollout_nodes * ROLLOUT_DOLLARS + num_train_nodes * TRAIN_DOLLARS


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=("temporal", "train", "spatial", "compute", "permits"))
    parser.add_argument("--redis-server", default="redis-server", help="its program (%(default)s)")
    parser.add_argument("--compute-s", type=float, default=0.5, help="length of a computed phase")


if __name__ == "__main__":
    raise SystemExit(run_benchmark(__doc__, measure, _add_arguments))
