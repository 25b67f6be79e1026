"""An RL job's iterations: rollout and training phases, one after the other or overlapped.

Owns the job's clock. The order of phases is the shipped one: a permit book of a group of one job
(synchronous) or of two, which are the even and the odd steps of one job (one-step-off policy). Two members of
a group share rollout and training nodes in turns, and no step of a member begins before that member's last
training has ended. So the rollout of step k + 2 runs with the weights of step k, while step k + 1 trains.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from rose.scheduler.group.model import Group, Job, Member, Phase
from rose.scheduler.group.order import round_robin
from rose.scheduler.group.permits import PermitBook

LEASE_S = 1e9
"""Permits of a simulated job do not expire."""


class Pipeline(Enum):
    """How many steps of a job are under way at a time."""

    SYNCHRONOUS = 1
    ONE_STEP_OFF = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """When the phases of one step ran."""

    rollout_start_s: float
    rollout_end_s: float
    train_start_s: float
    train_end_s: float


RolloutPhaseS = Callable[[int, float, float], float]
"""(step, start, end of the training of its weights) -> seconds."""


def iterate(
    num_steps: int, pipeline: Pipeline, rollout_s: RolloutPhaseS, train_s: Callable[[int], float]
) -> list[StepTimes]:
    """Runs a job from its start to the end of its last step's training."""
    names = [f"steps {index} of {pipeline.value}" for index in range(pipeline.value)]
    members = tuple(
        Member(job=Job(name=name, rollout_s=1.0, train_s=1.0), rollout_nodes=(0,)) for name in names
    )
    book = PermitBook(
        round_robin(Group(name="job", num_train_nodes=1, num_rollout_nodes=1, members=members)),
        lease_s=LEASE_S,
    )
    step_of = {name: index for index, name in enumerate(names)}
    weights_s = dict.fromkeys(names, 0.0)
    times: dict[int, dict[Phase, tuple[float, float]]] = {step: {} for step in range(num_steps)}
    for name in names[:num_steps]:
        book.request(name, Phase.ROLLOUT, 0.0)
    ends: list[tuple[float, int, str, Phase]] = []
    now = 0.0
    while True:
        for permit in book.advance(now):
            step = step_of[permit.job]
            lasts = permit.kind is Phase.ROLLOUT
            seconds = rollout_s(step, now, weights_s[permit.job]) if lasts else train_s(step)
            times[step][permit.kind] = (now, now + seconds)
            heapq.heappush(ends, (now + seconds, permit.epoch, permit.job, permit.kind))
        if not ends:
            return [_step_times(times[step]) for step in range(num_steps)]
        now, epoch, name, kind = heapq.heappop(ends)
        book.release(name, epoch, now)
        if kind is Phase.ROLLOUT:
            book.request(name, Phase.TRAIN, now)
            continue
        weights_s[name] = now
        step_of[name] += pipeline.value
        if step_of[name] < num_steps:
            book.request(name, Phase.ROLLOUT, now)
        else:
            book.leave(name, now)


def iteration_s(times: list[StepTimes]) -> float:
    """The mean time from one step's end to the next, without the first step, which fills the pipeline."""
    return (times[-1].train_end_s - times[0].train_end_s) / (len(times) - 1)


def _step_times(phases: dict[Phase, tuple[float, float]]) -> StepTimes:
    (rollout_start_s, rollout_end_s), (train_start_s, train_end_s) = (
        phases[Phase.ROLLOUT],
        phases[Phase.TRAIN],
    )
    return StepTimes(
        rollout_start_s=rollout_start_s,
        rollout_end_s=rollout_end_s,
        train_start_s=train_start_s,
        train_end_s=train_end_s,
    )
