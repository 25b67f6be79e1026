"""The cyclic order of a group: which phase follows which on every node, repeated for ever.

The values never change, and know no times. An order that could not run (a job without training, two rollouts
in a row) is refused.

One *hyper-cycle* is one pass through the order. In a round-robin order every job has one iteration in it; in
a multi-rate order a short job may have several. WEAVE §4.3 says that this is worse, which is wrong when jobs
are pinned to different rollout nodes.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from rose.scheduler.group.model import Group, Phase

K = TypeVar("K", str, int)

TRAIN_POOL = -1
"""All of a group's training nodes are this one resource: they work for one job at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One phase of one job within the hyper-cycle.

    `resources` are what it holds: rollout nodes by their index in the group, or `TRAIN_POOL`.
    """

    job: str
    kind: Phase
    resources: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class CyclicOrder:
    """The steps of one hyper-cycle; steps on the same resource run in this order, others may overlap.

    Raises: ValueError for an order whose jobs don't alternate between rollout and training.
    """

    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        for job, indices in self.steps_of_job.items():
            kinds = [self.steps[index].kind for index in indices]
            if len(kinds) % 2 or any(kind is following for kind, following in itertools.pairwise(kinds)):
                raise ValueError(
                    f"job {job}: rollout and training must alternate in an order, got {', '.join(kinds)}"
                )

    @cached_property
    def steps_of_job(self) -> dict[str, tuple[int, ...]]:
        """Every job's steps, by their index."""
        return _indices([(step.job,) for step in self.steps])

    @cached_property
    def steps_on(self) -> dict[int, tuple[int, ...]]:
        """Every resource's steps, by their index."""
        return _indices([step.resources for step in self.steps])

    @cached_property
    def iterations(self) -> tuple[str, ...]:
        """The job of each iteration in a pass."""
        return tuple(step.job for step in self.steps if step.kind is Phase.ROLLOUT)

    def num_iterations(self, job: str) -> int:
        """Iterations of a job in one hyper-cycle."""
        return len(self.steps_of_job[job]) // 2


def order_of(group: Group, iterations: Sequence[int]) -> CyclicOrder:
    """Returns the order in which the group's members, given by index, run their iterations.

    A member may have several iterations. Raises: ValueError for a member without one.
    """
    missing = [m.job.name for index, m in enumerate(group.members) if index not in iterations]
    if missing:
        raise ValueError(f"group {group.name}: the order has no iteration of {', '.join(missing)}")
    steps = []
    for index in iterations:
        member = group.members[index]
        name = member.job.name
        steps.append(Step(job=name, kind=Phase.ROLLOUT, resources=member.rollout_nodes))
        steps.append(Step(job=name, kind=Phase.TRAIN, resources=(TRAIN_POOL,)))
    return CyclicOrder(steps=tuple(steps))


def order_by_name(group: Group, iterations: Sequence[str]) -> CyclicOrder:
    """Returns the order in which these members, given by name, run their iterations."""
    index = {member.job.name: k for k, member in enumerate(group.members)}
    return order_of(group, [index[name] for name in iterations])


def own_order(group: Group) -> CyclicOrder:
    """Returns the order that the group itself says: its iterations, or every member once."""
    return order_by_name(group, group.iterations) if group.iterations else round_robin(group)


def in_order_of(group: Group, certified: Group) -> Group:
    """Returns the group in the order of an earlier state of it, which may have had more members."""
    places = [member.job.name for member in certified.members]
    members = sorted(group.members, key=lambda member: places.index(member.job.name))
    gone = set(places) - {member.job.name for member in members}
    iterations = functools.reduce(Group.without, gone, certified).iterations
    return replace(group, members=tuple(members), iterations=iterations, pass_s=certified.pass_s)


def round_robin(group: Group) -> CyclicOrder:
    """Returns the order with every member once, in the group's own order."""
    return order_of(group, range(len(group.members)))


def _indices(keys_of_step: Sequence[Sequence[K]]) -> dict[K, tuple[int, ...]]:
    found: dict[K, list[int]] = {}
    for index, keys in enumerate(keys_of_step):
        for key in keys:
            found.setdefault(key, []).append(index)
    return {key: tuple(indices) for key, indices in found.items()}
