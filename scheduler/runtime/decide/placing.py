"""Places submitted jobs in the running groups, and finds running jobs that would be cheaper elsewhere.

Owns the groups' nodes and members, including members that are about to leave, and asks the policies of
rose.scheduler.cluster. No policy puts a job into a group with a drained node, and members keep their nodes'
numbers. When a job moves is decided elsewhere (move_calls.py). Pure.

Policies see the groups as they will be: without the jobs that are about to leave, and without the nodes that
no job is pinned to. Those nodes count as returned to the pool; the group's next job gets them first.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rose.errors import JobRefused
from rose.scheduler.cluster.candidates import CandidateKind, memory_shortage
from rose.scheduler.cluster.choice import POLICIES
from rose.scheduler.cluster.groups import Cluster, compact
from rose.scheduler.cluster.pools import Pool, Pools
from rose.scheduler.cluster.residents import Resident
from rose.scheduler.cluster.right_sizing import kept_nodes, others_nodes, with_sized
from rose.scheduler.group.model import Group, Job, Member, Phase
from rose.scheduler.runtime.job.spec import RunSpec, ServeSpec

ResidentOf = Callable[[str, float], Resident]
"""Returns a running job as of a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedGroup:
    """A job's group, with the job in it."""

    group: Group
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveTarget:
    """The group that a running job moves to, with the job in it."""

    job: str
    group: Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Moves that together save this many dollars."""

    targets: tuple[MoveTarget, ...]
    leave: str
    """The group that the jobs leave."""
    gain_dollars: float


class Groups:
    """All groups: those of the cluster's file, which stay when empty, and those formed for jobs.

    The policies' view of the groups is kept, and only what has changed is brought up to date: a decision
    among thousands of jobs costs as much as the policy itself.
    """

    def __init__(self, spec: ServeSpec, resident_of: ResidentOf) -> None:
        self.by_name: dict[str, Group] = {
            name: Group(
                name=name, num_rollout_nodes=nodes.num_rollout_nodes, num_train_nodes=nodes.num_train_nodes
            )
            for name, nodes in spec.groups.items()
        }
        self.leaving: dict[str, str] = {}
        """For each job that is being moved, the group that it is still in. Only `leave` adds to it."""
        self.offered: Mapping[Phase, int | None] = {}
        """The number of nodes that the runner has, by pool; none: unlimited."""
        self.drained: dict[str, list[str]] = {}
        """Nodes by group. Changed by `drain`."""
        self._spec = spec
        self._resident_of = resident_of
        self._pools = spec.to_pools()
        self._policy = POLICIES[spec.policy](0)
        self._view = Cluster(self._pools, pause_s=spec.move_pause_s)
        self._stale: set[str] = set()
        """Groups that the view shows as they were."""

    def place(
        self, spec: RunSpec, now: float, aside: Collection[str] = (), resident: Resident | None = None
    ) -> JoinedGroup:
        """Finds a group for the job, but none of the groups `aside`.

        resident: what is left of a job that has run before; None: all of it.
        Raises: JobRefused, PoolsFull; ConfigError if no node could run it.
        """
        job = spec.to_job(self._pools)
        if spec.group is not None:
            return JoinedGroup(group=self._pinned(spec, job), why="named by the job")
        aside = list(aside)
        while True:
            with self._seen(now, aside) as view:
                view.submit(job, now)
                if resident is not None:
                    view.residents[job.name] = resident
                try:
                    candidate = self._policy.place(view, job, now)
                finally:
                    view.withdraw(job.name)
            why = f"{candidate.kind} by {self._spec.policy}, ${candidate.dollars_per_hour:.2f}/h more"
            if candidate.kind is CandidateKind.ISOLATED:
                return JoinedGroup(group=replace(candidate.group, name=self._new_name()), why=why)
            group = self._joined(candidate.group, job.name)
            if not self._is_too_large(group):
                return JoinedGroup(group=group, why=why)
            aside.append(group.name)

    def resized(self, name: str, job: Job, now: float) -> Group | None:
        """Returns the group with a member on as many rollout nodes as this job has; None: too few free."""
        group = self.by_name[name]
        kept = kept_nodes(group, job.name, job.num_rollout_nodes)
        taken = {*kept, *others_nodes(group, job.name)}
        spare = (node for node in itertools.count() if node not in taken)
        more = tuple(itertools.islice(spare, job.num_rollout_nodes - len(kept)))
        with self._seen(now, ()) as view:
            num_free = view.num_free_rollout_nodes
        found = with_sized(group, job, (*kept, *more))
        is_short = num_free is not None and more and len(more) > num_free
        if is_short or self._is_too_large(found) or memory_shortage(found, self._pools) is not None:
            return None
        return found

    @property
    def max_moves(self) -> int:
        """The most moves that the policy makes at one event."""
        return self._policy.max_moves

    def movable(self, now: float) -> list[str]:
        """Names the groups formed for jobs that the policy would have jobs leave, the likeliest first."""
        with self._seen(now, self._spec.groups) as view:
            return self._policy.movable(view)

    def rearranged(self, now: float, max_moves: int, leave: Sequence[str]) -> Moves | None:
        """Returns the moves from these groups to others that the policy wants; None if no move pays."""
        with self._seen(now, self._spec.groups) as view:
            change = self._policy.rearrange(view, now, max_moves, leave)
            if change is None:
                return None
            targets = []
            for job in change.moved:
                old = view.group_of(job).name
                [group] = [each for each in change.groups if job in _names(each) and each.name != old]
                targets.append(MoveTarget(job=job, group=self._joined(group, job)))
            left = change.groups[-1].name
        return Moves(targets=tuple(targets), leave=left, gain_dollars=change.gain_dollars)

    def without_jobs(self, offered: Mapping[Phase, int | None], pinned: str | None) -> "Groups":
        """Returns what a job pinned to this group would find if no job ran, on this many nodes.

        Groups with drained nodes keep their nodes as long as they have jobs.
        """
        empty = Groups(self._spec, self._resident_of)
        empty.offered = offered
        names = {*self.drained, pinned} if pinned is not None else {*self.drained}
        for name in names & self.by_name.keys():
            nodes = self.drained.get(name, [])
            stays = nodes and name != pinned
            empty.put(self.by_name[name] if stays else replace(self.by_name[name], members=()))
            empty.drain(name, nodes)
        return empty

    @contextmanager
    def with_newcomer(self, group: Group, newcomer: Resident) -> Iterator[None]:
        """Inside the context, this group, with a job that runs nowhere yet, replaces that of its name."""
        old, known = self.by_name.get(group.name), self._resident_of
        self._resident_of = lambda name, now: newcomer if name == newcomer.job.name else known(name, now)
        self.put(group)
        try:
            yield
        finally:
            self._resident_of = known
            self.put(old if old is not None else replace(group, members=()))
            if old is None:
                del self.by_name[group.name]

    def without_some(self, jobs: Collection[str]) -> "Groups":
        """Returns the groups as they would be if these jobs had ended."""
        found = Groups(self._spec, self._resident_of)
        found.offered = self.offered
        for name, group in self.by_name.items():
            found.put(
                functools.reduce(Group.without, [each for each in _names(group) if each in jobs], group)
            )
            found.drain(name, self.drained.get(name, []))
        found.leaving.update({job: name for job, name in self.leaving.items() if job not in jobs})
        return found

    def put(self, group: Group) -> None:
        """Replaces the group of this name."""
        self.by_name[group.name] = group
        self._stale.add(group.name)

    def remove(self, job: str, name: str) -> Group:
        """Removes a job from a group, and removes a group that was formed for its jobs when it has none left.
        Its drained nodes are forgotten with it."""
        if self.leaving.get(job) == name:
            del self.leaving[job]
        rest = self.by_name[name].without(job)
        self.put(rest)
        if not rest.members and name not in self._spec.groups:
            del self.by_name[name]
            self.drained.pop(name, None)
        return rest

    def leave(self, job: str, name: str) -> None:
        """Notes that the job is a member of another group from now on, and goes there after its iteration."""
        self.leaving[job] = name
        self._stale.add(name)

    def drain(self, name: str, nodes: list[str]) -> None:
        """Sets a group's drained nodes. No policy puts a job into a group that has some."""
        self.drained[name] = nodes
        self._stale.add(name)

    def touch(self, name: str) -> None:
        """Notes that a job of the group has gone on, so that the policies' view is renewed."""
        self._stale.add(name)

    def refresh(self, now: float) -> None:
        """Brings the policies' view up to date."""
        for name in self._stale:
            group = self._stay(self.by_name[name]) if name in self.by_name else None
            if group is None or self.drained.get(name) or not group.members:
                self._forget(name, now)
            else:
                residents = [self._resident_of(member.job.name, now) for member in group.members]
                self._view.adopt(compact(group), residents, now)
        self._stale.clear()

    def check_integrity(self, now: float) -> None:
        """Checks that the policies' view equals a newly made one."""
        self.refresh(now)
        open_groups = {
            name: compact(stay)
            for name, group in self.by_name.items()
            if (stay := self._stay(group)).members and not self.drained.get(name)
        }
        assert self._view.groups == open_groups, (self._view.groups, open_groups)
        self._view.check_integrity()

    def _forget(self, name: str, now: float) -> None:
        self._view.adopt(Group(name=name, num_rollout_nodes=0, num_train_nodes=0), (), now)

    @contextmanager
    def _seen(self, now: float, aside: Collection[str]) -> Iterator[Cluster]:
        """Yields what the policies see: the pools, and the groups that are neither drained nor `aside`."""
        self.refresh(now)
        for name in aside:
            self._forget(name, now)
            self._stale.add(name)
        self._view.pools = self._pools_beside(
            {*aside, *(name for name, nodes in self.drained.items() if nodes)}
        )
        yield self._view

    def _pools_beside(self, hidden: Collection[str]) -> Pools:
        """Returns the pools, limited by the file and by the runner's nodes, without these groups' nodes.

        They are never smaller than what the view uses: a job may still join a group without more nodes.
        """
        groups = [self.by_name[name] for name in hidden if name in self.by_name]
        groups = [each if self.drained.get(each.name) else compact(self._stay(each)) for each in groups]
        groups = [each for each in groups if each.members]
        num_rollout, num_train = self._view.num_used
        return replace(
            self._pools,
            rollout=self._sized(Phase.ROLLOUT, sum(each.num_rollout_nodes for each in groups), num_rollout),
            train=self._sized(Phase.TRAIN, sum(each.num_train_nodes for each in groups), num_train),
        )

    def _sized(self, kind: Phase, num_hidden: int, num_used: int) -> Pool:
        pool = self._pools.rollout if kind is Phase.ROLLOUT else self._pools.train
        known = [each for each in (pool.num_nodes, self.offered.get(kind)) if each is not None]
        return replace(pool, num_nodes=max(min(known) - num_hidden, num_used) if known else None)

    def _new_name(self) -> str:
        number = 1
        while f"group-{number}" in self.by_name:
            number += 1
        return f"group-{number}"

    def _stay(self, group: Group) -> Group:
        gone = (name for name in _names(group) if self.leaving.get(name) == group.name)
        return functools.reduce(Group.without, gone, group)

    def _joined(self, placed: Group, job: str) -> Group:
        """Adds the job to the real group, and maps back the nodes that the policy's view renumbers."""
        group = self.by_name[placed.name]
        stay = self._stay(group)
        known = sorted({node for each in stay.members for node in each.rollout_nodes})
        used = {node for each in group.members for node in each.rollout_nodes}
        spare = (node for node in itertools.count() if node not in used)
        numbers = known + list(itertools.islice(spare, placed.num_rollout_nodes - len(known)))
        members = [
            replace(each, rollout_nodes=tuple(numbers[node] for node in each.rollout_nodes))
            for each in placed.members
        ]
        leaving = [each for each in group.members if each.job.name not in _names(placed)]
        iterations = (*placed.iterations, *(each.job.name for each in leaving)) if placed.iterations else ()
        return replace(
            group,
            num_rollout_nodes=max(
                group.num_rollout_nodes, *(max(each.rollout_nodes) + 1 for each in members)
            ),
            members=(*members, *leaving),
            iterations=iterations,
            pass_s=placed.pass_s,
        )

    def _is_too_large(self, group: Group) -> bool:
        """Whether a group of the cluster's file would have more nodes than the file gives it."""
        fixed = self._spec.groups.get(group.name)
        return fixed is not None and group.num_rollout_nodes > fixed.num_rollout_nodes

    def _pinned(self, spec: RunSpec, job: Job) -> Group:
        pools = self._pools
        if spec.group not in self.by_name:
            known = ", ".join(self.by_name) or "none; leave `group` out, and the policy makes one"
            raise JobRefused(f"{spec.name}: no group {spec.group!r}; the groups are {known}")
        group, drained = self.by_name[spec.group], self.drained.get(spec.group, ())
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
        group = replace(group, members=(*group.members, member), iterations=())
        if (shortage := memory_shortage(group, pools)) is not None:
            raise JobRefused(
                f"{spec.name}: in group {group.name} {shortage}; use more nodes or a smaller state"
            )
        return group


def _range(num_nodes: int) -> str:
    return f"0-{num_nodes - 1}" if num_nodes > 1 else "0"


def _names(group: Group) -> list[str]:
    return [member.job.name for member in group.members]
