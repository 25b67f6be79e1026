"""Part of bench_e2e: what a job saves that hands own rollout nodes back while serving GPUs are lent to it.

Owns the job's way from all its nodes to those that it keeps. What decides is what ships: the policy
(scheduler/cluster/right_sizing.py), asked after each simulated job, and the certificate without loans.
"""

from collections.abc import Callable
from dataclasses import replace

from sim.e2e.job import JobPlan, JobResult
from sim.e2e.pipeline import Pipeline
from sim.e2e.systems import System, World

from lib.e2e import reasons
from lib.e2e.rows import Row
from lib.e2e.worlds import Scale, WorldPool
from rose.scheduler.cluster.candidates import isolated, own_limit_s
from rose.scheduler.cluster.pools import H800, Pools
from rose.scheduler.cluster.right_sizing import LastIterations, RightSizing, fewest_certified
from rose.scheduler.group.model import Job

SLOS = (1.2, 1.5, 2.0, 3.0)
HOUR_S = 3600.0


def right_sized(runner: WorldPool, world: World, scale: Scale, seed: int) -> list[Row]:
    """The dollars of a step on all own nodes over those on the nodes that the policy keeps."""
    return [row for slo in SLOS if (row := _row(runner, world, scale, seed, slo)) is not None]


def _row(runner: WorldPool, world: World, scale: Scale, seed: int, slo: float) -> Row | None:
    workload = world.workload
    asked, gpus = workload.scenario.num_dedicated, workload.scenario.gpus_per_engine
    if asked == 1:
        return None
    pools = Pools(
        rollout=replace(H800, name="rollout", gpus_per_node=gpus),
        train=replace(H800, gpus_per_node=workload.train_gpus),
    )

    def run(system: System, num_own: int) -> JobResult:
        plan = JobPlan(
            system=system,
            num_steps=scale.num_steps,
            seed=seed,
            pipeline=Pipeline.SYNCHRONOUS,
            num_own=num_own,
        )
        return runner.jobs(f"{workload.name} right-sizing, {system}, {num_own} own engines", world, [plan])[0]

    alone = run(System.FIXED, asked)
    job = Job(
        name="job",
        rollout_s=max(phase.seconds for phase in alone.phases),
        train_s=alone.iteration_s - alone.rollout_s,
        num_rollout_nodes=asked,
        slo=slo,
        fewest_rollout_nodes=1,
    )
    group = isolated(job, "group", pools).group
    fewest = fewest_certified(group, job, pools, own_limit_s, multi_rate=False)
    policy = RightSizing(pools)
    seen = _settled(
        policy, job, fewest, lambda num: run(System.ROSE, num), workload.scenario.num_serving * gpus
    )
    whole, kept = (pools.price(each.num_nodes, 1) * each.iteration_s / HOUR_S for each in (seen[0], seen[-1]))
    return Row(
        name=f"right_sizing[{workload.name}, SLO {slo:g}]",
        source="-",
        values=[whole / kept],
        unit="x",
        paper=None,
        why=reasons.RIGHT_SIZING,
        beside={
            "own rollout GPUs": float(asked * gpus),
            "certified with": float(fewest * gpus),
            "kept": float(seen[-1].num_nodes * gpus),
            "step, s": seen[-1].iteration_s,
            "on all own nodes": seen[0].iteration_s,
            "the same without loans": alone.iteration_s,
            "a lent GPU's speed": policy.gpu_speed,
        },
    )


def _settled(
    policy: RightSizing, job: Job, fewest: int, run: Callable[[int], JobResult], num_lent: int
) -> list[LastIterations]:
    """Runs the job with as many own engines as the policy wants next, until it wants no others."""
    num, seen = job.num_rollout_nodes, list[LastIterations]()
    while len(seen) < 2 * job.num_rollout_nodes:
        result = run(num)
        seen.append(
            LastIterations(
                num_nodes=num,
                iteration_s=result.iteration_s,
                rollout_s=result.rollout_s,
                lent_gpus=float(num_lent),
            )
        )
        wanted = policy.wanted(seen[-1], range(fewest, job.num_rollout_nodes + 1), 1)
        if not wanted:
            break
        num = wanted[0]
    return seen
