"""Where an arriving job goes: WEAVE's algorithm, and the simple policies beside it.

Owns the interface of all policies, and `weave`, `random`, `greedy` and `solo`. `weave` never returns a
candidate that breaks a limit; `random` and `greedy` look at memory alone, as the paper's do. No policy
changes the cluster.

WEAVE leaves ties open: ours go to the group with the first row. The paper says too little about Random and
Greedy to reproduce their published figures; here they open a group only when none has room.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from rose.errors import PoolsFull
from rose.scheduler.cluster.candidates import (
    Candidate,
    CandidateKind,
    Constraint,
    Rejection,
    candidates,
    check,
    is_saturated,
    isolated,
    memory_shortage,
    rollout_load_s,
)
from rose.scheduler.cluster.groups import Cluster, Rearrangement
from rose.scheduler.group.model import Group, Job


class ClusterPolicy(Protocol):
    """The interface of all policies, in production and in simulation."""

    name: str
    max_moves: int
    """The most moves at one event."""

    def place(self, cluster: Cluster, job: Job, now_s: float) -> Candidate:
        """Returns where the job goes. Raises: PoolsFull if the pools lack the nodes."""
        ...

    def movable(self, cluster: Cluster) -> list[str]:
        """Names the groups that jobs might leave."""
        ...

    def rearrange(
        self, cluster: Cluster, now_s: float, max_moves: int, leave: Sequence[str] | None = None
    ) -> Rearrangement | None:
        """Returns a better arrangement of the running jobs with at most this many moves, or None.

        leave: the groups that jobs may leave, of those that `movable` names; None: all of them.
        """
        ...


class _Static:
    """Leaves every job where it is."""

    max_moves = 0

    def movable(self, cluster: Cluster) -> list[str]:
        return []

    def rearrange(
        self, cluster: Cluster, now_s: float, max_moves: int, leave: Sequence[str] | None = None
    ) -> Rearrangement | None:
        return None


class Weave(_Static):
    """Least marginal dollars an hour. Source: WEAVE Algorithm 1.

    `prune_saturated`: line 4. Theorem 1 does not need it, and without it costs are lower.
    """

    def __init__(self, *, prune_saturated: bool = True) -> None:
        self.name = "weave" if prune_saturated else "weave-unpruned"
        self.prune_saturated = prune_saturated

    def place(self, cluster: Cluster, job: Job, now_s: float) -> Candidate:
        limit_s = cluster.limit_s(job)
        fit = cluster.index.fit(job, limit_s, prune_saturated=self.prune_saturated, multi_rate=False)
        direct = fit.nodes.any(axis=1)
        has_direct = bool(direct.any())
        best: Candidate | None = None
        rows = fit.rows[direct] if has_direct and job.num_rollout_nodes == 1 else fit.rows
        for row in rows:
            group = cluster.groups[cluster.index.name(row)]
            found = first_fitting(cluster, group, job)
            if found is not None and (best is None or found.dollars_per_hour < best.dollars_per_hour):
                best = found
                # No group can cost less than nothing, or than the one new node of a job that fits nowhere.
                if found.dollars_per_hour == 0 or (job.num_rollout_nodes == 1 and not has_direct):
                    break
        return best if best is not None else alone(cluster, job)


class Solo(_Static):
    """Every job on nodes of its own: the usual disaggregation."""

    name = "solo"

    def place(self, cluster: Cluster, job: Job, now_s: float) -> Candidate:
        return alone(cluster, job)


class Random(_Static):
    """A random group that has room in its hosts' memory, on random nodes. Source: WEAVE §6.5."""

    name = "random"

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def place(self, cluster: Cluster, job: Job, now_s: float) -> Candidate:
        groups = [cluster.groups[name] for name in cluster.index.names()]
        self._chance.shuffle(groups)
        for group in groups:
            fitting = list(_with_memory(cluster, group, job))
            if fitting:
                return self._chance.choice(fitting)
        return alone(cluster, job)


class Greedy(_Static):
    """The group that idles most, on the nodes that idle most. Source: WEAVE §6.5."""

    name = "greedy"

    def place(self, cluster: Cluster, job: Job, now_s: float) -> Candidate:
        for group in sorted(map(cluster.groups.__getitem__, cluster.index.names()), key=_busy_share):
            # The first is on the least loaded nodes.
            for candidate in _with_memory(cluster, group, job):
                return candidate
        return alone(cluster, job)


def first_fitting(cluster: Cluster, group: Group, job: Job, *, multi_rate: bool = False) -> Candidate | None:
    """Returns the cheapest candidate in a group that keeps every constraint."""
    return next(fitting(cluster, group, job, multi_rate=multi_rate), None)


def fitting(cluster: Cluster, group: Group, job: Job, *, multi_rate: bool) -> Iterator[Candidate]:
    """Yields the candidates in a group that keep every constraint, cheapest first."""
    for candidate in candidates(group, job, cluster.pools):
        found = check(
            candidate,
            cluster.pools,
            cluster.limit_s,
            multi_rate=multi_rate,
            num_free=cluster.num_free_rollout_nodes,
        )
        if isinstance(found, Candidate):
            yield found


def alone(cluster: Cluster, job: Job) -> Candidate:
    """Returns a new group for the job alone. Raises PoolsFull if a pool lacks the nodes, or no node the
    memory."""
    candidate = isolated(job, cluster.new_name(), cluster.pools)
    if (shortage := memory_shortage(candidate.group, cluster.pools)) is not None:
        raise PoolsFull(f"job {job.name} fits no host: {shortage}; use more nodes or a smaller state")
    for pool, needed, free in (
        (cluster.pools.rollout, job.num_rollout_nodes, cluster.num_free_rollout_nodes),
        (cluster.pools.train, job.num_train_nodes, cluster.num_free_train_nodes),
    ):
        if free is not None and needed > free:
            raise PoolsFull(
                f"job {job.name} fits no group, and a new one needs {needed} nodes of pool {pool.name}, "
                f"{free} of {pool.num_nodes} free; wait for a job to end or give the pool more nodes"
            )
    return candidate


def explain(
    cluster: Cluster, job: Job, *, prune_saturated: bool, multi_rate: bool
) -> list[Candidate | Rejection]:
    """Returns every group's verdict on a job, in the order of the rows, for people."""
    verdicts: list[Candidate | Rejection] = []
    for name in cluster.index.names():
        group = cluster.groups[name]
        if prune_saturated and is_saturated(group):
            text = f"{group.load_s:.1f} s of work in a cycle of {group.cycle_s:.1f} s"
            verdicts.append(
                Rejection(group=name, kind=CandidateKind.DIRECT, constraint=Constraint.SATURATED, text=text)
            )
            continue
        for candidate in candidates(group, job, cluster.pools):
            verdicts.append(
                check(
                    candidate,
                    cluster.pools,
                    cluster.limit_s,
                    multi_rate=multi_rate,
                    num_free=cluster.num_free_rollout_nodes,
                )
            )
    return verdicts


def _with_memory(cluster: Cluster, group: Group, job: Job) -> Iterable[Candidate]:
    if len(group.members) >= cluster.pools.max_residents:
        return
    for candidate in candidates(group, job, cluster.pools):
        if candidate.kind is CandidateKind.DIRECT and memory_shortage(candidate.group, cluster.pools) is None:
            yield candidate


def _busy_share(group: Group) -> float:
    """The busy share of the group's nodes, weighted alike, over one cycle."""
    train_s = sum(member.job.train_s_on(group.num_train_nodes) for member in group.members)
    load_s = [train_s] * group.num_train_nodes + rollout_load_s(group)
    return sum(load_s) / (len(load_s) * group.round_robin_s)
