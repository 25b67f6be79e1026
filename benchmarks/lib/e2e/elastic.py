"""Parts of bench_e2e: whole jobs against resource-fixed and elastic systems (ROSE Figures 7, 8, 14).

Owns the comparisons. Both sides of a ratio have the same seeds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sim.e2e.calibration import COLD_START_S
from sim.e2e.job import JobPlan, JobResult
from sim.e2e.pipeline import Pipeline
from sim.e2e.systems import ELASTIC, System, World

from lib.e2e import paper, reasons
from lib.e2e.rows import Row, ratios
from lib.e2e.worlds import Scale, WorldPool

WHY_FIXED = {"GRPO": reasons.GATE, "DAPO": reasons.DEMAND, "asynchronous": reasons.ASYNCHRONOUS}
BEST = "over the better, with SLO slack spent"
FAST = "over the better, with functions that start in 30 s"


def plans(system: System, scale: Scale, seed: int, **more: object) -> list[JobPlan]:
    """One job for each seed."""
    plan = JobPlan(system=system, num_steps=scale.num_steps, seed=seed)
    return [replace(plan, seed=seed + number, **more) for number in range(scale.num_seeds)]  # type: ignore[arg-type]


def against_fixed(runner: WorldPool, world: World, scale: Scale, seed: int) -> list[Row]:
    """Figure 7a to 7c: one-step-off GRPO and DAPO against ROLL, asynchronous against AReaL."""
    rows = []
    name = world.workload.name
    for recipe in ("GRPO", "DAPO"):
        rows += _fixed_rows(name, recipe, _jobs(runner, world, scale, seed, recipe))
    found_s = {
        system: runner.asynchronous(f"{name} asynchronous, {system}", world, plans(system, scale, seed))
        for system in (System.FIXED, System.ROSE)
    }
    gains = ratios(found_s[System.FIXED], found_s[System.ROSE])
    return [*rows, _fixed_row(name, "asynchronous", gains, {"step, s": found_s[System.ROSE][0]})]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Jobs:
    """One recipe's jobs, each for every seed."""

    fixed: list[JobResult]
    rose: list[JobResult]
    dual: list[JobResult]
    synchronous: list[JobResult]
    fixed_padded: list[JobResult]
    rose_padded: list[JobResult]


def _jobs(runner: WorldPool, world: World, scale: Scale, seed: int, recipe: str) -> _Jobs:
    def run(what: str, system: System, **more: object) -> list[JobResult]:
        each = plans(system, scale, seed, is_dapo=recipe == "DAPO", **more)
        return runner.jobs(f"{world.workload.name} {recipe}, {what}", world, each)

    return _Jobs(
        fixed=run("resource-fixed", System.FIXED),
        rose=run("ROSE", System.ROSE),
        dual=run("ROSE, slack spent", System.ROSE_DUAL),
        synchronous=run("synchronous", System.FIXED, pipeline=Pipeline.SYNCHRONOUS),
        fixed_padded=run("resource-fixed, padded", System.FIXED, is_padded=True),
        rose_padded=run("ROSE, padded", System.ROSE, is_padded=True),
    )


def _gains(slower: Sequence[JobResult], faster: Sequence[JobResult]) -> list[float]:
    return ratios([job.iteration_s for job in slower], [job.iteration_s for job in faster])


def _fixed_rows(name: str, recipe: str, jobs: _Jobs) -> list[Row]:
    first = jobs.rose[0]
    beside: dict[str, float | None] = {
        "with SLO slack spent": min(_gains(jobs.fixed, jobs.dual)),
        "over synchronous": min(_gains(jobs.synchronous, jobs.rose)),
        "training padded to 32k": min(_gains(jobs.fixed_padded, jobs.rose_padded)),
        "rollouts alone": jobs.fixed[0].rollout_s / first.rollout_s,
        "step, s": first.iteration_s,
    }
    most = [max(ratios(each.steps_s, ours.steps_s)) for each, ours in zip(jobs.fixed, jobs.rose, strict=True)]
    largest = Row(
        name=f"e2e_vs_fixed_max[{name} {recipe}]",
        source=paper.FIGURE_7_PART[recipe],
        values=most,
        unit="x",
        paper=paper.FIGURE_7_MAX[name, recipe],
        why=reasons.LARGEST,
    )
    return [_fixed_row(name, recipe, _gains(jobs.fixed, jobs.rose), beside), largest]


def _fixed_row(name: str, recipe: str, gains: Sequence[float], beside: dict[str, float | None]) -> Row:
    published = paper.FIGURE_7_MEAN[name, recipe]
    return Row(
        name=f"e2e_vs_fixed[{name} {recipe}]",
        source=paper.FIGURE_7_PART[recipe],
        values=gains,
        unit="x",
        paper=published,
        target=f">= {published}",
        why=WHY_FIXED[recipe],
        beside=beside,
    )


def against_elastic(runner: WorldPool, world: World, scale: Scale, seed: int) -> list[Row]:
    """Figure 8: rollout time and allocation overhead against spot and serverless GPUs, GRPO, one-step-off."""
    name = world.workload.name

    def run(what: str, system: System, **more: object) -> list[JobResult]:
        return runner.jobs(f"{name} rollouts, {what}", world, plans(system, scale, seed, **more))

    found = {system: run(system, system) for system in (System.FIXED, *ELASTIC, System.ROSE)}
    fast = run("functions that start fast", System.SERVERLESS, lease_recovery_s=COLD_START_S)
    best_rose = run("ROSE at its best", System.ROSE_DUAL)
    gains = {
        System.SERVERLESS: (paper.FIGURE_8A_SERVERLESS[name], reasons.FUNCTIONS),
        System.SPOT: (paper.FIGURE_8A_SPOT[name], reasons.SPOT),
    }
    rows = [
        Row(
            name=f"over_fixed[{name}, {system}]",
            source="Fig. 8a",
            values=ratios(_rollouts_s(found[System.FIXED]), _rollouts_s(found[system])),
            unit="x",
            paper=published,
            why=why,
        )
        for system, (published, why) in gains.items()
    ]
    return [*rows, _elastic_row(name, found, fast, best_rose), *_overheads(name, found, fast)]


def _rollouts_s(jobs: Sequence[JobResult]) -> list[float]:
    return [job.rollout_s for job in jobs]


def _elastic_row(
    name: str, found: dict[System, list[JobResult]], fast: list[JobResult], best_rose: list[JobResult]
) -> Row:
    spot_s, serverless_s, rose_s = (
        _rollouts_s(found[system]) for system in (System.SPOT, System.SERVERLESS, System.ROSE)
    )
    best_s = [min(each) for each in zip(spot_s, serverless_s, strict=True)]
    easy_s = [min(each) for each in zip(spot_s, _rollouts_s(fast), strict=True)]
    return Row(
        name=f"e2e_vs_elastic[{name}]",
        source="Fig. 8a",
        values=ratios(best_s, rose_s),
        unit="x",
        paper=paper.FIGURE_8A_ROSE_OVER_SPOT[name],
        target=">= 1.20",
        why=reasons.ELASTIC,
        beside={
            "over spot": min(ratios(spot_s, rose_s)),
            "over serverless": min(ratios(serverless_s, rose_s)),
            BEST: min(ratios(best_s, _rollouts_s(best_rose))),
            FAST: min(ratios(easy_s, rose_s)),
        },
    )


def _overheads(name: str, found: dict[System, list[JobResult]], fast: list[JobResult]) -> list[Row]:
    shares = {
        system: [_mean([phase.starting_share for phase in job.phases]) for job in jobs]
        for system, jobs in found.items()
    }
    published = {
        System.SERVERLESS: (
            paper.FIGURE_8B_SERVERLESS,
            reasons.RECOVERY,
        ),
        System.SPOT: (
            paper.FIGURE_8B_SPOT,
            reasons.SPOT_OVERHEAD,
        ),
        System.ROSE: (
            paper.FIGURE_8B_ROSE,
            reasons.ACTIVATION,
        ),
    }
    fast_share = _mean([phase.starting_share for job in fast for phase in job.phases])
    return [
        Row(
            name=f"allocation_overhead[{name}, {system}]",
            source="Fig. 8b",
            values=shares[system],
            unit="of GPU time",
            paper=value,
            why=why,
            beside={"functions that start in 30 s": fast_share} if system is System.SERVERLESS else {},
        )
        for system, (value, why) in published.items()
    ]


def lent_gpus(runner: WorldPool, world: World, scale: Scale, seed: int) -> list[Row]:
    """Figure 14: rollout time with more serving GPUs, 8B."""
    workload = world.workload
    alone = runner.jobs("8B without serving GPUs", world, plans(System.FIXED, scale, seed))
    rows = []
    for num_gpus, published in paper.FIGURE_14.items():
        # Halved workloads have half of the GPUs of both kinds.
        num_lent = num_gpus * workload.scenario.num_serving // 16
        jobs = runner.jobs(
            f"8B with {num_gpus} serving GPUs", world, plans(System.ROSE, scale, seed, num_lent=num_lent)
        )
        rows.append(
            Row(
                name=f"lent[8B, {num_gpus} GPUs]",
                source="Fig. 14",
                values=ratios([job.rollout_s for job in alone], [job.rollout_s for job in jobs]),
                unit="x",
                paper=published,
                why=reasons.LENT,
            )
        )
    return rows


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
