"""How many rollout nodes of its own a job keeps while it borrows serving GPUs.

Owns the choice between numbers of own nodes, from what the job's last iterations took, and the job as it is
on another number. The certificate counts own nodes alone, at worst-case times, so a job may keep fewer of
them only as far as its SLO allows it to be slower than on those that it asked for. Within this limit the
number with the fewest dollars an iteration is chosen. Pure. In the paper ROSE, jobs keep all their rollout
GPUs.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from rose.scheduler.cluster.candidates import memory_shortage
from rose.scheduler.cluster.pools import Pools
from rose.scheduler.group.model import Group, Job, Member
from rose.scheduler.group.search import ordered

LEAST_GAIN = 0.05
"""A change saves at least this share of an iteration's dollars: less is noise, or not worth a new start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastIterations:
    """What a job's last iterations took on this many rollout nodes of its own, on average."""

    num_nodes: int
    iteration_s: float
    rollout_s: float
    lent_gpus: float
    """The serving GPUs that its turns used during a rollout."""


class RightSizing:
    """The choice for one job. It learns from its own changes what a lent GPU is worth."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._before: LastIterations | None = None
        self.gpu_speed = 1.0
        """A lent GPU's rollouts over those of an own one. Until a change has shown it, both are equal."""

    def wanted(self, seen: LastIterations, nums: range, num_train_nodes: int) -> list[int]:
        """Returns the numbers of own nodes that cost less than the present one, the cheapest first."""
        if self._before is not None and self._before.num_nodes != seen.num_nodes:
            self.gpu_speed = self._speed(self._before, seen)
        self._before = seen
        most = (1 - LEAST_GAIN) * self.dollars(seen, seen.num_nodes, num_train_nodes)
        cost = {num: self.dollars(seen, num, num_train_nodes) for num in nums}
        return sorted((num for num in nums if cost[num] <= most), key=cost.__getitem__)

    def dollars(self, seen: LastIterations, num_nodes: int, num_train_nodes: int) -> float:
        """Returns what an iteration costs on this many own nodes with the same loans."""
        lent = self.gpu_speed * seen.lent_gpus
        gpus = self._pools.rollout.gpus_per_node
        rollout_s = seen.rollout_s * (seen.num_nodes * gpus + lent) / (num_nodes * gpus + lent)
        own = self._pools.price(num_nodes, num_train_nodes) * (seen.iteration_s - seen.rollout_s + rollout_s)
        return (own + self._pools.serving_dollars_per_gpu_hour * seen.lent_gpus * rollout_s) / 3600

    def _speed(self, before: LastIterations, after: LastIterations) -> float:
        """The speed with which both rollouts are the same work: time x (own GPUs + speed x lent GPUs)."""
        few, many = sorted((before, after), key=lambda seen: seen.num_nodes)
        own_s = many.num_nodes * many.rollout_s - few.num_nodes * few.rollout_s
        lent_s = few.lent_gpus * few.rollout_s - many.lent_gpus * many.rollout_s
        if own_s <= 0:  # with fewer own nodes it was slower even than without any loans
            return 0.0
        return min(1.0, own_s * self._pools.rollout.gpus_per_node / lent_s) if lent_s > 0 else 1.0


def sized(job: Job, num_nodes: int) -> Job:
    """Returns the job on another number of rollout nodes, with the same limit of an iteration.

    A rollout takes longer in proportion, and each node keeps more, as training does on fewer nodes.
    Source: WEAVE §4.2, footnote 3.
    """
    factor = job.num_rollout_nodes / num_nodes
    other = replace(
        job,
        num_rollout_nodes=num_nodes,
        rollout_s=job.rollout_s * factor,
        rollout_bytes=round(job.rollout_bytes * factor),
    )
    return replace(other, slo=job.slo * job.solo_s / other.solo_s)


def others_nodes(group: Group, name: str) -> set[int]:
    """Returns the rollout nodes that members beside this one are pinned to."""
    return {node for each in group.members if each.job.name != name for node in each.rollout_nodes}


def with_sized(group: Group, job: Job, nodes: tuple[int, ...]) -> Group:
    """Returns the group with its member of this name as this job, on these nodes, and without an order."""
    members = (
        Member(job=job, rollout_nodes=nodes) if each.job.name == job.name else each for each in group.members
    )
    num_nodes = max(group.num_rollout_nodes, *(node + 1 for node in nodes))
    return replace(group, num_rollout_nodes=num_nodes, members=tuple(members), iterations=(), pass_s=0.0)


def kept_nodes(group: Group, name: str, num_nodes: int) -> tuple[int, ...]:
    """Returns the nodes that a member keeps of its own: those that others use as well come first."""
    [own] = [each.rollout_nodes for each in group.members if each.job.name == name]
    others = others_nodes(group, name)
    return tuple(sorted(sorted(own, key=lambda node: (node not in others, node))[:num_nodes]))


def fewest_certified(
    group: Group, job: Job, pools: Pools, limit_s: Callable[[Job], float], *, multi_rate: bool
) -> int:
    """Returns the fewest own nodes with which, without loans, all members keep their SLOs."""
    fewest = job.fewest_rollout_nodes if job.fewest_rollout_nodes is not None else job.num_rollout_nodes
    limits_s = {each.job.name: limit_s(each.job) for each in group.members}
    for num_nodes in range(fewest, job.num_rollout_nodes):
        smaller = with_sized(group, sized(job, num_nodes), kept_nodes(group, job.name, num_nodes))
        has_order = ordered(smaller, limits_s, multi_rate=multi_rate) is not None
        if has_order and memory_shortage(smaller, pools) is None:
            return num_nodes
    return job.num_rollout_nodes
