"""Places submitted jobs in the running groups, and finds running jobs that would be cheaper elsewhere.

Owns the groups' nodes and members, including members that are about to leave, and asks the policies of
rose.scheduler.cluster. No policy puts a job into a group with a drained node, and members keep their nodes'
numbers. When a job moves is decided elsewhere (move_calls.py). Pure.

Policies see the groups as they will be: without the jobs that are about to leave, and without the nodes that
no job is pinned to. Those nodes count as returned to the pool; the group's next job gets them first.
"""

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from rose.errors import JobRefused
from rose.scheduler.cluster.candidates import Kind, memory_shortage
from rose.scheduler.cluster.choice import POLICIES
from rose.scheduler.cluster.groups import Cluster, Rearrangement, compact
from rose.scheduler.cluster.model import Group, Job, Member
from rose.scheduler.cluster.policies import alone
from rose.scheduler.cluster.pools import Pools
from rose.scheduler.cluster.residents import Resident
from rose.scheduler.runtime.job.spec import RunSpec, ServeSpec

Residents = Mapping[str, Resident]
"""The jobs that run, by name."""
Drained = Mapping[str, Collection[str]]
"""Nodes by group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A job's group, with the job in it."""

    group: Group
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The group that a running job moves to, with the job in it."""

    job: str
    group: Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Moves that together save so many dollars."""

    targets: tuple[Target, ...]
    gain_dollars: float


@dataclass(slots=True)
class Groups:
    """All groups: those of the cluster's file, which stay when empty, and those formed for jobs."""

    spec: ServeSpec
    by_name: dict[str, Group] = field(default_factory=dict)
    leaving: dict[str, str] = field(default_factory=dict)
    """For each job that is being moved, the group that it is still in."""
    offered: Mapping[str, int | None] = field(default_factory=dict)
    """The number of nodes that hosts offer, by pool; None: unlimited."""

    def __post_init__(self) -> None:
        for name, nodes in self.spec.groups.items():
            self.by_name.setdefault(
                name,
                Group(
                    name=name,
                    num_rollout_nodes=nodes.num_rollout_nodes,
                    num_train_nodes=nodes.num_train_nodes,
                ),
            )

    def place(self, spec: RunSpec, drained: Drained, residents: Residents, now: float) -> Placed:
        """Finds a group for the job. Raises: JobRefused, PoolsFull; ConfigError if no node could run it."""
        job = spec.to_job(self.spec.pools.to_pools())
        if spec.group is not None:
            return Placed(group=self._pinned(spec, job, drained.get(spec.group, ())), why="named by the job")
        names = [name for name in self.by_name if not drained.get(name)]
        while True:
            cluster = self._cluster(names, residents, now)
            cluster.submit(job, now)
            candidate = POLICIES[self.spec.policy](0).place(cluster, job, now)
            why = f"{candidate.kind} by {self.spec.policy}, ${candidate.dollars_per_hour:.2f}/h more"
            if candidate.kind is Kind.ISOLATED:
                return Placed(group=replace(candidate.group, name=self._new_name()), why=why)
            group = self._joined(candidate.group, job.name)
            if not self._is_too_large(group):
                return Placed(group=group, why=why)
            names.remove(group.name)

    def place_alone(self, spec: RunSpec, residents: Residents, now: float) -> Placed:
        """Gives the job nodes of its own if no shared order can be certified. Raises: PoolsFull."""
        job = spec.to_job(self.spec.pools.to_pools())
        group = alone(self._cluster(list(self.by_name), residents, now), job).group
        return Placed(group=replace(group, name=self._new_name()), why="alone: no shared order is certified")

    def rearranged(self, drained: Drained, residents: Residents, now: float, max_moves: int) -> Moves | None:
        """Returns the moves that the policy wants, among groups formed for jobs; None if no move pays."""
        names = [name for name in self.by_name if name not in self.spec.groups and not drained.get(name)]
        cluster = self._cluster(names, residents, now)
        change = POLICIES[self.spec.policy](0).rearrange(cluster, now, max_moves)
        if change is None:
            return None
        targets = []
        for job in change.moved:
            [group] = [
                each for each in change.groups if job in _names(each) and each.name != self.of(job).name
            ]
            targets.append(Target(job=job, group=self._joined(group, job)))
        return Moves(targets=tuple(targets), gain_dollars=change.gain_dollars)

    def put(self, group: Group) -> None:
        """Replaces the group of this name."""
        self.by_name[group.name] = group

    def remove(self, job: str, name: str) -> Group:
        """Removes a job from a group, and the group if it was formed for its jobs and has none left."""
        if self.leaving.get(job) == name:
            del self.leaving[job]
        group = self.by_name[name]
        rest = replace(group, members=tuple(each for each in group.members if each.job.name != job))
        if rest.members or group.name in self.spec.groups:
            self.by_name[group.name] = rest
        else:
            del self.by_name[group.name]
        return rest

    def of(self, job: str) -> Group:
        """Returns the group that a running job is in, or moves to."""
        return next(
            group
            for name, group in self.by_name.items()
            if self.leaving.get(job) != name and job in _names(group)
        )

    def _new_name(self) -> str:
        number = 1
        while f"group-{number}" in self.by_name:
            number += 1
        return f"group-{number}"

    def _cluster(self, names: Collection[str], residents: Residents, now: float) -> Cluster:
        """Builds what the policies see: the named groups, and the pools without the others' nodes."""
        seen = [self._stay(self.by_name[name]) for name in names]
        others = [group for name, group in self.by_name.items() if name not in names and group.members]
        cluster = Cluster(_without(self._pools(), others), pause_s=self.spec.move_pause_s)
        for group in seen:
            for member in group.members:
                cluster.submit(member.job, now)
                cluster.residents[member.job.name] = residents[member.job.name]
            if group.members:
                cluster.apply(Rearrangement(groups=(compact(group),)), now)
        return cluster

    def _pools(self) -> Pools:
        """Returns the pools, limited by the file and by living hosts, but at least what is in use."""
        pools, groups = self.spec.pools.to_pools(), list(self.by_name.values())
        used = {
            "rollout": sum(group.num_rollout_nodes for group in groups if group.members),
            "train": sum(group.num_train_nodes for group in groups if group.members),
        }
        sizes = {}
        for kind, pool in (("rollout", pools.rollout), ("train", pools.train)):
            known = [each for each in (pool.num_nodes, self.offered.get(kind)) if each is not None]
            sizes[kind] = replace(pool, num_nodes=max(min(known), used[kind]) if known else None)
        return replace(pools, rollout=sizes["rollout"], train=sizes["train"])

    def _stay(self, group: Group) -> Group:
        stay = (each for each in group.members if self.leaving.get(each.job.name) != group.name)
        return replace(group, members=tuple(stay))

    def _joined(self, placed: Group, job: str) -> Group:
        """Adds the job to the real group, and maps back the nodes that the policy's view numbers anew."""
        group = self.by_name[placed.name]
        stay = self._stay(group)
        known = sorted({node for each in stay.members for node in each.rollout_nodes})
        used = {node for each in group.members for node in each.rollout_nodes}
        spare = (node for node in itertools.count() if node not in used)
        numbers = known + list(itertools.islice(spare, placed.num_rollout_nodes - len(known)))
        [member] = [each for each in placed.members if each.job.name == job]
        member = replace(member, rollout_nodes=tuple(numbers[node] for node in member.rollout_nodes))
        return replace(
            group,
            num_rollout_nodes=max(group.num_rollout_nodes, *(node + 1 for node in member.rollout_nodes)),
            members=(*group.members, member),
            periods_s=(),
        )

    def _is_too_large(self, group: Group) -> bool:
        """Whether a group of the cluster's file would have more nodes than the file gives it."""
        fixed = self.spec.groups.get(group.name)
        return fixed is not None and group.num_rollout_nodes > fixed.num_rollout_nodes

    def _pinned(self, spec: RunSpec, job: Job, drained: Collection[str]) -> Group:
        pools = self.spec.pools.to_pools()
        if spec.group not in self.by_name:
            known = ", ".join(self.by_name) or "none; leave `group` out, and the policy makes one"
            raise JobRefused(f"{spec.name}: no group {spec.group!r}; the groups are {known}")
        group = self.by_name[spec.group]
        missing = [node for node in spec.pins if node >= group.num_rollout_nodes]
        if missing:
            raise JobRefused(
                f"{spec.name}: rollout nodes {missing}: group {group.name} has rollout nodes "
                f"{_range(group.num_rollout_nodes)}; choose among these"
            )
        closed = [node for node in (*(f"rollout-{pin}" for pin in spec.pins), "train") if node in drained]
        if closed:
            raise JobRefused(
                f"{spec.name}: {', '.join(closed)} of group {group.name} is drained; "
                "run `rose sched drain --undo`, or choose others"
            )
        if len(group.members) >= pools.max_residents:
            raise JobRefused(
                f"{spec.name}: group {group.name} has {len(group.members)} jobs, at most "
                f"{pools.max_residents} may share one"
            )
        member = Member(job=job, rollout_nodes=spec.pins)
        group = replace(group, members=(*group.members, member), periods_s=())
        if (shortage := memory_shortage(group, pools)) is not None:
            raise JobRefused(
                f"{spec.name}: in group {group.name} {shortage}; use more nodes or a smaller state"
            )
        return group


def _range(num_nodes: int) -> str:
    return f"0-{num_nodes - 1}" if num_nodes > 1 else "0"


def _names(group: Group) -> list[str]:
    return [member.job.name for member in group.members]


def _without(pools: Pools, groups: Collection[Group]) -> Pools:
    """Returns the pools without these groups' nodes."""
    rollout, train = pools.rollout, pools.train
    if rollout.num_nodes is not None:
        used = sum(group.num_rollout_nodes for group in groups)
        rollout = replace(rollout, num_nodes=max(0, rollout.num_nodes - used))
    if train.num_nodes is not None:
        used = sum(group.num_train_nodes for group in groups)
        train = replace(train, num_nodes=max(0, train.num_nodes - used))
    return replace(pools, rollout=rollout, train=train)
