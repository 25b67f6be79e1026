"""Where a submitted job goes among the groups that run: the policies of rose.scheduler.cluster, asked live.

Owns: the groups' nodes and members. Promises: a job that can't be placed raises JobRefused or PlacementError
with the numbers; the policy puts none into a group with a drained node. Pure. Never: moves a job.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from rose.errors import JobRefused
from rose.scheduler.cluster.choice import POLICIES
from rose.scheduler.cluster.cluster import Cluster, Plan
from rose.scheduler.cluster.model import Group, Job, Member
from rose.scheduler.cluster.placements import Kind, memory_shortage
from rose.scheduler.cluster.policies import alone
from rose.scheduler.runtime.spec import RunSpec, ServeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A job's group, with the job in it."""

    group: Group
    why: str


@dataclass(slots=True)
class Groups:
    """All groups: those of the cluster's file, which stay when empty, and those that jobs brought about."""

    spec: ServeSpec
    by_name: dict[str, Group] = field(default_factory=dict)

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

    def place(self, spec: RunSpec, drained: Mapping[str, Collection[str]], now: float) -> Placed:
        """Where the job would go. Raises: JobRefused, PlacementError; ConfigError for what fits no node."""
        job = spec.to_job(self.spec.pools.to_pools())
        if spec.group is not None:
            return Placed(group=self._pinned(spec, job, drained.get(spec.group, ())), why="named by the job")
        cluster = self._cluster([name for name in self.by_name if not drained.get(name)], now)
        cluster.submit(job, now)
        placement = POLICIES[self.spec.policy](0).place(cluster, job, now)
        group = placement.group
        if placement.kind is Kind.ISOLATED:
            group = replace(group, name=self._new_name())
        more = f"${placement.dollars_per_hour:.2f}/h more"
        return Placed(group=group, why=f"{placement.kind} by {self.spec.policy}, {more}")

    def place_alone(self, spec: RunSpec, now: float) -> Placed:
        """Nodes of its own, for a job whose shared order can't be certified. Raises: PlacementError."""
        job = spec.to_job(self.spec.pools.to_pools())
        group = alone(self._cluster(list(self.by_name), now), job).group
        return Placed(group=replace(group, name=self._new_name()), why="alone: no shared order is certified")

    def put(self, group: Group) -> None:
        """The group as it is from now on."""
        self.by_name[group.name] = group

    def remove(self, job: str) -> Group:
        """The job's group without it, gone if it was made for its jobs and has none left."""
        group = self.of(job)
        rest = replace(group, members=tuple(each for each in group.members if each.job.name != job))
        if rest.members or group.name in self.spec.groups:
            self.by_name[group.name] = rest
        else:
            del self.by_name[group.name]
        return rest

    def of(self, job: str) -> Group:
        """The group that a running job is in."""
        return next(
            group for group in self.by_name.values() if any(each.job.name == job for each in group.members)
        )

    def _new_name(self) -> str:
        number = 1
        while f"group-{number}" in self.by_name:
            number += 1
        return f"group-{number}"

    def _cluster(self, names: Collection[str], now: float) -> Cluster:
        """What the policies look at."""
        cluster = Cluster(self.spec.pools.to_pools())
        for name in names:
            group = self.by_name[name]
            for member in group.members:
                cluster.submit(member.job, now)
            if group.members:
                cluster.apply(Plan(groups=(group,)), now)
        return cluster

    def _pinned(self, spec: RunSpec, job: Job, drained: Collection[str]) -> Group:
        pools = self.spec.pools.to_pools()
        if spec.group not in self.by_name:
            known = ", ".join(self.by_name) or "none; leave `group` out, and the policy makes one"
            raise JobRefused(f"{spec.name}: no group {spec.group!r}; there are {known}")
        group = self.by_name[spec.group]
        missing = [node for node in spec.pins if node >= group.num_rollout_nodes]
        if missing:
            raise JobRefused(
                f"{spec.name}: rollout nodes {missing}: group {group.name} has 0 to "
                f"{group.num_rollout_nodes - 1}"
            )
        closed = [node for node in (*(f"rollout-{pin}" for pin in spec.pins), "train") if node in drained]
        if closed:
            raise JobRefused(
                f"{spec.name}: {', '.join(closed)} of group {group.name} is drained; undo it or wait"
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
