"""One RL job under one system: its steps, and what they took.

Owns the draw of DAPO's demand. The same seed gives every system the same trajectories, traffic and demand.
"""

import itertools
import math
import random
from dataclasses import dataclass, replace

from rose.scheduler.rollout.turn.dataplane import POLICIES
from sim.e2e.calibration import LEASE_RECOVERY_S, MAX_SAMPLING
from sim.e2e.phase import Demand, RolloutPhase, SimulatedPhase
from sim.e2e.pipeline import Pipeline, StepTimes, iterate, iteration_s
from sim.e2e.supply import Supply
from sim.e2e.systems import System, World, beside, ready, scenario_of

STEADY_BATCHES = (0.5, 2.0)
"""An asynchronous job is watched between these, in batches of ended trajectories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """What to run. None for engines: as the workload has them."""

    system: System
    num_steps: int
    seed: int
    pipeline: Pipeline = Pipeline.ONE_STEP_OFF
    is_dapo: bool = False
    sampling: float | None = None
    """DAPO's trajectories over the batch, the same in every step; None: drawn for each."""
    num_own: int | None = None
    num_lent: int | None = None
    policy: str = "cost"
    has_prefix_cache: bool = True
    is_padded: bool = False
    """Whether training computes on as many tokens for each trajectory as the context's limit has."""
    lease_recovery_s: float = LEASE_RECOVERY_S


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What a job took."""

    iteration_s: float
    steps_s: tuple[float, ...]
    """From each step's end to the next one's."""
    times: tuple[StepTimes, ...]
    phases: tuple[SimulatedPhase, ...]

    @property
    def rollout_s(self) -> float:
        """The mean rollout phase."""
        return sum(phase.seconds for phase in self.phases) / len(self.phases)


def sampling_of(plan: JobPlan, step: int) -> float:
    """Trajectories that a step launches over those that it needs."""
    if not plan.is_dapo:
        return 1.0
    if plan.sampling is not None:
        return plan.sampling
    return math.exp(random.Random(f"sampling-{plan.seed}-{step}").uniform(0.0, math.log(MAX_SAMPLING)))


def engines(world: World, plan: JobPlan) -> list[Supply]:
    """The job's own engines first, then those that its system adds."""
    scenario = world.workload.scenario
    num_own = plan.num_own if plan.num_own is not None else scenario.num_dedicated
    num_lent = plan.num_lent if plan.num_lent is not None else scenario.num_serving
    added = beside(plan.system, world, num_lent, lease_recovery_s=plan.lease_recovery_s, seed=plan.seed)
    return [Supply() for _ in range(num_own)] + added


def run_job(world: World, plan: JobPlan) -> JobResult:
    """Runs the job's steps in the pipeline."""
    scenario, supplies = scenario_of(plan.system, world.workload), engines(world, plan)
    if not plan.has_prefix_cache:
        scenario = replace(scenario, kv_tokens=0, serving_kv_tokens=0)
    num_groups = scenario.num_trajectories // scenario.group_size
    phases: dict[int, SimulatedPhase] = {}

    def rollout_s(step: int, start_s: float, weights_s: float) -> float:
        launched = math.ceil(sampling_of(plan, step) * num_groups)
        phase = RolloutPhase(
            replace(scenario, num_trajectories=launched * scenario.group_size),
            POLICIES[plan.policy](),
            1000 * plan.seed + step,
            ready(supplies, world, start_s, weights_s if step >= plan.pipeline.value else None),
            start_s=start_s,
            demand=Demand(num_groups=num_groups),
        )
        phases[step] = phase.play()
        return phases[step].seconds

    def train_s(step: int) -> float:
        lengths = phases[step].needed_tokens
        padded = (scenario.max_context_tokens,) * len(lengths)
        return world.workload.train_s(padded if plan.is_padded else lengths)

    times = iterate(plan.num_steps, plan.pipeline, rollout_s, train_s)
    steps = [after.train_end_s - before.train_end_s for before, after in itertools.pairwise(times)]
    return JobResult(
        iteration_s=iteration_s(times),
        steps_s=tuple(steps),
        times=tuple(times),
        phases=tuple(phases[step] for step in range(plan.num_steps)),
    )


def asynchronous_step_s(world: World, plan: JobPlan) -> float:
    """The time of a step of a fully asynchronous job in its steady state (AReaL).

    Trajectories go on without a pause, as many at a time as there are places, and at least a batch; training
    takes a batch whenever one has ended. New weights cost generation nothing here, in any system.
    """
    scenario, supplies = scenario_of(plan.system, world.workload), engines(world, plan)
    batch = scenario.num_trajectories
    num_places = len(supplies) * scenario.turns_per_gpu * scenario.gpus_per_engine
    num_live = max(batch, num_places)
    since, until = (round(part * batch) for part in STEADY_BATCHES)
    total = math.ceil((num_live + until) / scenario.group_size) * scenario.group_size
    phase = RolloutPhase(
        replace(scenario, num_trajectories=total),
        POLICIES[plan.policy](),
        1000 * plan.seed,
        ready(supplies, world, 0.0, None),
        demand=Demand(num_live=num_live),
    )
    result = phase.play()
    batch_s = (result.ended_s[until] - result.ended_s[since]) / (until - since) * batch
    return max(batch_s, world.workload.train_s(result.needed_tokens) / total * batch)
