"""Parts of bench_e2e: the workloads as ROSE characterizes them, and a transfer's time (Figures 1, 3, 15).

Owns the checks that the simulated jobs and traffic resemble the paper's.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from sim.e2e.calibration import DECODE_BYTES_PER_S, LINK_GBPS, TRANSFER_GPUS, PaperWorkload
from sim.e2e.job import JobPlan, JobResult, sampling_of
from sim.e2e.pipeline import Pipeline
from sim.e2e.systems import System, World

from lib.e2e import paper, reasons
from lib.e2e.elastic import plans
from lib.e2e.rows import Row, ratios
from lib.e2e.worlds import Scale, WorldPool
from rose.scheduler.sim.requests import TraceRow

OWN_GPUS = (8, 16)
PROFILED_STEPS = 5
"""ROSE §2.2: five consecutive steps."""
NUM_DRAWS = 50
"""Steps of a DAPO training (ROSE §6)."""
ZOOM_S = 300
"""Figure 3a zooms into five minutes."""


def profiled(world: World) -> World:
    """Returns the world of the job that ROSE §2.2 describes."""
    return replace(world, workload=world.workload.profiled())


def profiled_plans(scale: Scale, seed: int, **more: object) -> list[JobPlan]:
    """Returns the synchronous job of ROSE §2.2, for each seed."""
    found = plans(System.FIXED, scale, seed, pipeline=Pipeline.SYNCHRONOUS, **more)
    return [replace(plan, num_steps=PROFILED_STEPS) for plan in found]


def characterize(runner: WorldPool, world: World, scale: Scale, seed: int) -> list[Row]:
    """Figures 1a and 1b: where a synchronous job's time goes, and its tails."""
    name, there = world.workload.name, profiled(world)
    jobs = runner.jobs(f"{name} synchronous", there, profiled_plans(scale, seed))
    padded = runner.jobs(f"{name} synchronous, padded", there, profiled_plans(scale, seed, is_padded=True))
    p75_s = [_mean([float(np.percentile(phase.lasted_s, 75)) for phase in job.phases]) for job in jobs]
    last_s = [_mean([max(phase.lasted_s) for phase in job.phases]) for job in jobs]
    return [
        Row(
            name=f"rollout_share[{name}]",
            source="Fig. 1a",
            values=[_rollout_share(job) for job in jobs],
            unit="of the step",
            paper=paper.FIGURE_1A_ROLLOUT_SHARE,
            target=f">= {paper.FIGURE_1A_ROLLOUT_SHARE}",
            why=reasons.SHARE,
            beside={"padded to 32k": min(_rollout_share(job) for job in padded)},
        ),
        Row(
            name=f"p75_over_rollout[{name}]",
            source="Fig. 1b",
            values=[p75 / job.rollout_s for p75, job in zip(p75_s, jobs, strict=True)],
            unit="of the phase",
            paper=paper.FIGURE_1B_P75,
            why=reasons.TAIL,
            beside={"P75, s": p75_s[0], "longest, s": last_s[0]},
        ),
        Row(
            name=f"prompt_share[{name}]",
            source="§2.2",
            values=[_mean([phase.prompt_share for phase in job.phases]) for job in jobs],
            unit="of all tokens",
            paper=paper.SECTION_2_2_PREFILL[name],
            why=reasons.PROMPTS,
        ),
    ]


def _rollout_share(job: JobResult) -> float:
    return sum(phase.seconds for phase in job.phases) / job.times[-1].train_end_s


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def prefix_cache(runner: WorldPool, world: World, scale: Scale, seed: int) -> list[Row]:
    """Figure 1c: what prefix caching saves on few GPUs, and what more GPUs do."""
    there = profiled(world)
    few, more = (
        runner.jobs(f"8B on {num} own GPUs", there, profiled_plans(scale, seed, num_own=num))
        for num in OWN_GPUS
    )
    without = runner.jobs(
        "8B without prefix cache",
        there,
        profiled_plans(scale, seed, num_own=OWN_GPUS[0], has_prefix_cache=False),
    )
    few_s, more_s, without_s = ([job.rollout_s for job in jobs] for jobs in (few, more, without))
    return [
        Row(
            name="prefix_cache[8B, 8 GPUs]",
            source="Fig. 1c",
            values=ratios(without_s, few_s),
            unit="x",
            paper=paper.FIGURE_1C_CACHE,
            why=reasons.CACHE,
        ),
        Row(
            name="rollout_s[8B, 8 own GPUs]",
            source="Fig. 1c",
            values=few_s,
            unit="s",
            paper=paper.FIGURE_1C_FEW_S,
            why=reasons.OWN,
        ),
        Row(
            name="own_gpus[8B, 16 over 8]",
            source="Fig. 1c",
            values=ratios(few_s, more_s),
            unit="x",
            paper=paper.FIGURE_1C_SCALING,
            why=reasons.OWN,
        ),
    ]


def demand_and_traffic(
    workload: PaperWorkload, world: World, trace: Sequence[TraceRow], seed: int
) -> list[Row]:
    """Figures 1d, 3a and 3b: DAPO's demand, the trace's bursts, and how busy serving is."""
    plan = JobPlan(system=System.FIXED, num_steps=NUM_DRAWS, seed=seed, is_dapo=True)
    most = max(sampling_of(plan, step) for step in range(NUM_DRAWS))
    counts = Counter(int(row.arrival_s) for row in trace)
    seconds = [counts[second] for second in range(int(trace[-1].arrival_s))]
    busy = [tape.serving_share for tape in world.alone]
    return [
        Row(
            name="dapo_demand_max",
            source="Fig. 1d",
            values=[most],
            unit="x the batch",
            paper=5.7,
            why=reasons.DRAWN,
        ),
        Row(
            name="trace_peak[minute]",
            source="Fig. 3a",
            values=[_peak(_sums(seconds, 60))],
            unit="x the mean",
            paper=paper.FIGURE_3A_MINUTE,
            why=reasons.HOUR,
        ),
        Row(
            name="trace_peak[second]",
            source="Fig. 3a",
            values=[_peak(seconds[at : at + ZOOM_S]) for at in range(0, len(seconds) - ZOOM_S, ZOOM_S)],
            unit="x the mean",
            paper=paper.FIGURE_3A_SECOND,
            why=reasons.WINDOWS,
        ),
        Row(
            name=f"serving_busy[{workload.name}]",
            source="Fig. 3b",
            values=busy,
            unit="of the time",
            paper=paper.FIGURE_3B_BUSY,
            why=reasons.BUSY,
        ),
    ]


def _sums(values: Sequence[int], width: int) -> list[int]:
    return [sum(values[at : at + width]) for at in range(0, len(values) - width + 1, width)]


def _peak(values: Sequence[int]) -> float:
    return max(values) * len(values) / max(1, sum(values))


def transfers(world: World) -> list[Row]:
    """§6.3 and Figure 15: seconds from the trainer's step to weights in the serving cluster."""
    workload = world.workload
    rows = [
        Row(
            name=f"transfer_s[{workload.name}, {gbps:g} Gbps]",
            source="Fig. 15" if (workload.name, gbps) == ("32B", LINK_GBPS) else "§6.3",
            values=[world.transfer_s(gbps, TRANSFER_GPUS)],
            unit="s",
            paper=paper.SECTION_6_3_S[workload.name, gbps],
            why=reasons.TRANSFER,
        )
        for gbps in (LINK_GBPS, 1.0)
    ]
    if workload.name == "32B":
        num_bytes = workload.weight_bytes
        sent_s = num_bytes / (LINK_GBPS * 1e9 / 8)
        decoded_s = num_bytes / workload.scenario.gpus_per_engine / DECODE_BYTES_PER_S
        rows.append(
            Row(
                name="transfer_s[32B, 200 Gbps, dense]",
                source="Fig. 15",
                values=[math.fsum((sent_s, decoded_s))],
                unit="s",
                paper=paper.FIGURE_15_DENSE_S,
                why=reasons.DENSE,
            )
        )
    return rows
