"""Which groups run, and on which nodes: the state that policies read and the scheduler changes.

Owns groups, running jobs, free nodes and the index. A change is applied whole or refused whole. Not
thread-safe: one scheduler owns it.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rose.errors import PoolsFull
from rose.scheduler.cluster.index import GroupIndex
from rose.scheduler.cluster.pools import Pool, Pools
from rose.scheduler.cluster.residents import Resident
from rose.scheduler.group.cycle import promised_s
from rose.scheduler.group.model import Group, Job, Member, SloKind
from rose.scheduler.group.search import ordered

PAUSE_S = 300.0
"""A move: stop, copy, start. Source: WEAVE §6.6, 197 to 419 s for 7B to 32B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rearrangement:
    """Groups as they will be (those without members are given back), and the jobs that pause for that.

    The last group is the one that the moved jobs leave.
    """

    groups: tuple[Group, ...]
    moved: tuple[str, ...] = ()
    gain_dollars: float = 0.0
    """What the moves save until all jobs that they concern have left, pauses included."""


class Cluster:
    """All groups of one scheduler. `keeps_ends`: see `Resident`."""

    def __init__(self, pools: Pools, *, keeps_ends: bool = False, pause_s: float = PAUSE_S) -> None:
        self.pools = pools
        self.pause_s = pause_s
        self.keeps_ends = keeps_ends
        self.groups: dict[str, Group] = {}
        self.residents: dict[str, Resident] = {}
        self.index = GroupIndex(pools)
        self._group_of: dict[str, str] = {}
        self._names = itertools.count(1)
        self._num_rollout_nodes = 0
        self._num_train_nodes = 0

    # Questions ------------------------------------------------------------------------------------------

    def group_of(self, name: str) -> Group:
        """Returns the group that runs a job."""
        return self.groups[self._group_of[name]]

    def limit_s(self, job: Job) -> float:
        """Returns the longest iteration that a job, running or new, may be promised."""
        resident = self.residents.get(job.name)
        return resident.limit_s if resident is not None else job.slo * job.solo_s

    @property
    def dollars_per_hour(self) -> float:
        return self.pools.price(self._num_rollout_nodes, self._num_train_nodes)

    @property
    def num_used(self) -> tuple[int, int]:
        """The rollout and the training nodes of all groups."""
        return self._num_rollout_nodes, self._num_train_nodes

    @property
    def num_free_rollout_nodes(self) -> int | None:
        """None: unlimited."""
        return _free(self.pools.rollout, self._num_rollout_nodes)

    @property
    def num_free_train_nodes(self) -> int | None:
        return _free(self.pools.train, self._num_train_nodes)

    def has_nodes_for(self, change: Rearrangement) -> bool:
        """Returns whether the pools are large enough for the change."""
        rollout, train = self._more_nodes(change)
        free, free_train = self.num_free_rollout_nodes, self.num_free_train_nodes
        return (free is None or rollout <= free) and (free_train is None or train <= free_train)

    def _more_nodes(self, change: Rearrangement) -> tuple[int, int]:
        old = [self.groups[group.name] for group in change.groups if group.name in self.groups]
        return _sum_rollout(change.groups) - _sum_rollout(old), _sum_train(change.groups) - _sum_train(old)

    def without(self, name: str) -> Group:
        """Returns a job's group without it. Those who stay may go faster; else their timetable has a gap."""
        return self._reordered(without(self.group_of(name), name))

    def _reordered(self, group: Group) -> Group:
        """The group in its best order, if it is a multi-rate one; as it is where none is found."""
        if not group.iterations:
            return group
        limits_s = {member.job.name: self.limit_s(member.job) for member in group.members}
        return ordered(group, limits_s, multi_rate=True) or group

    def new_name(self) -> str:
        """Returns a name that no group had."""
        return f"g{next(self._names)}"

    # Changes --------------------------------------------------------------------------------------------

    def submit(self, job: Job, now_s: float, work_s: float | None = None) -> None:
        """Registers a job that is about to be placed: the next change has to bring it, or withdraw() takes it
        back.

        `work_s`: solo seconds that are left.
        Raises ValueError for a name that runs already.
        """
        if job.name in self.residents:
            raise ValueError(f"a job named {job.name} runs in group {self._group_of.get(job.name)}")
        self.residents[job.name] = Resident(
            job=job,
            since_s=now_s,
            work_s=work_s if work_s is not None else job.solo_s * job.num_iterations,
            keeps_end=self.keeps_ends,
        )

    def withdraw(self, name: str) -> None:
        """Forgets a submitted job that found no place. Raises ValueError for a running job, which remove()
        takes."""
        if name in self._group_of:
            raise ValueError(f"job {name} runs in group {self._group_of[name]}; remove it instead")
        del self.residents[name]

    def apply(self, change: Rearrangement, now_s: float) -> None:
        """Raises PoolsFull, and changes nothing, if a pool has too few nodes."""
        rollout, train = self._more_nodes(change)
        _refuse_shortage(self.pools.rollout, self._num_rollout_nodes + rollout)
        _refuse_shortage(self.pools.train, self._num_train_nodes + train)
        self._num_rollout_nodes += rollout
        self._num_train_nodes += train
        for name in change.moved:
            self.residents[name] = self.residents[name].at(now_s).paused(self.pause_s)
        for group in change.groups:
            self._put(group, now_s)

    def adopt(self, group: Group, residents: Iterable[Resident], now_s: float) -> None:
        """Sets a group as it runs elsewhere, whatever the pools say. Without members it is forgotten."""
        old = self.groups.get(group.name)
        for member in old.members if old is not None else ():
            if self._group_of[member.job.name] == group.name:  # else it has come to another group since
                del self.residents[member.job.name], self._group_of[member.job.name]
        rollout, train = self._more_nodes(Rearrangement(groups=(group,)))
        self._num_rollout_nodes += rollout
        self._num_train_nodes += train
        self.residents.update((resident.job.name, resident) for resident in residents)
        self._put(group, now_s)

    def remove(self, name: str, now_s: float) -> Group | None:
        """Removes a job that has ended. Returns its group without it and without unused rollout nodes; None:
        the group was given back."""
        group = self.without(name)
        self.apply(Rearrangement(groups=(group,)), now_s)
        del self.residents[name], self._group_of[name]
        return group if group.members else None

    def change(self, job: Job, now_s: float) -> Group:
        """Gives a running job other times, with the same iterations left. Returns its group."""
        group, resident = self.group_of(job.name), self.residents[job.name].at(now_s)
        factor = job.solo_s / resident.job.solo_s
        work_s = resident.work_s if self.keeps_ends else resident.work_s * factor
        self.residents[job.name] = replace(resident, job=job, work_s=work_s)
        members = tuple(
            replace(member, job=job) if member.job.name == job.name else member for member in group.members
        )
        changed = replace(group, members=members)
        if changed.iterations:  # the length of a pass was for the old times
            found = self._reordered(changed)
            changed = replace(found, iterations=()) if found is changed else found
        self._put(changed, now_s)
        return changed

    def refresh(self, now_s: float) -> None:
        """Updates the limits of jobs with a bank, which are otherwise tighter than they need to be."""
        for group in self.groups.values():
            if any(member.job.slo_kind is SloKind.LIFETIME for member in group.members):
                self._put(group, now_s)

    def _put(self, group: Group, now_s: float) -> None:
        if not group.members:
            self.groups.pop(group.name, None)
            self.index.remove(group.name)
            return
        residents = []
        for member, promise_s in zip(group.members, promised_s(group), strict=True):
            name = member.job.name
            resident = self.residents[name].at(now_s).slowed(promise_s / member.job.solo_s)
            self.residents[name] = resident
            self._group_of[name] = group.name
            residents.append(resident)
        self.groups[group.name] = group
        self.index.put(group, residents)

    def check_integrity(self) -> None:
        """Checks that every job is in one group, and every count is the sum of its parts."""
        placed = [member.job.name for group in self.groups.values() for member in group.members]
        assert sorted(placed) == sorted(self._group_of) == sorted(self.residents)
        assert self._num_rollout_nodes == _sum_rollout(self.groups.values())
        assert self._num_train_nodes == _sum_train(self.groups.values())
        for group in self.groups.values():
            used = {node for member in group.members for node in member.rollout_nodes}
            assert used == set(range(group.num_rollout_nodes)), (group.name, used)
        self.index.check_integrity(self.groups)


def without(group: Group, name: str) -> Group:
    """Returns a group without one member and without the rollout nodes that only it used."""
    return compact(group.without(name))


def compact(group: Group) -> Group:
    """Returns the group without unused rollout nodes; without members it has no nodes at all."""
    used = sorted({node for member in group.members for node in member.rollout_nodes})
    if len(used) == group.num_rollout_nodes and group.members:
        return group
    number = {node: index for index, node in enumerate(used)}
    return replace(
        group,
        members=tuple(
            Member(job=member.job, rollout_nodes=tuple(number[node] for node in member.rollout_nodes))
            for member in group.members
        ),
        num_rollout_nodes=len(used),
        num_train_nodes=group.num_train_nodes if group.members else 0,
    )


def residents_of(cluster: Cluster, group: Group, now_s: float) -> Iterator[Resident]:
    """The members as they are now, in order."""
    return (cluster.residents[member.job.name].at(now_s) for member in group.members)


def _sum_rollout(groups: Iterable[Group]) -> int:
    return sum(group.num_rollout_nodes for group in groups)


def _sum_train(groups: Iterable[Group]) -> int:
    return sum(group.num_train_nodes for group in groups)


def _free(pool: Pool, num_used: int) -> int | None:
    return None if pool.num_nodes is None else pool.num_nodes - num_used


def _refuse_shortage(pool: Pool, num_needed: int) -> None:
    if pool.num_nodes is not None and num_needed > pool.num_nodes:
        raise PoolsFull(
            f"pool {pool.name}: {num_needed} nodes needed, {pool.num_nodes} there; "
            f"wait for a job to end or give the pool more nodes"
        )
