"""The places that a job could have in a group, and the constraints that refuse them.

Owns the three kinds of candidate. A candidate that passes keeps every member's limit under its certified
iteration time, every node's host memory, the number of residents, and the pools' sizes. Policies choose
between candidates.

Source: WEAVE §4.2, Algorithm 1 lines 6 to 12. Where we differ: line 8 refuses memory that fits exactly (>=);
ours lets it in, and holds rollout and training nodes to their own footprints.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from rose.scheduler.cluster.pools import Pools
from rose.scheduler.group.cycle import round_robin_s
from rose.scheduler.group.model import Group, Job, Member
from rose.scheduler.group.search import ordered

LimitOf = Callable[[Job], float]
"""The longest iteration that a job may be promised, in seconds."""


class CandidateKind(StrEnum):
    """How a candidate gets its nodes. Source: WEAVE §4.2, Figure 5."""

    DIRECT = "direct packing"
    SCALED = "rollout scaling"
    ISOLATED = "isolated provisioning"


class Constraint(StrEnum):
    """The constraint that a refused candidate breaks."""

    SATURATED = "saturated"
    RESIDENCY = "residency"
    MEMORY = "host memory"
    SLO = "slo"
    POOL = "pool"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """One candidate that was refused; `text` has the numbers."""

    group: str
    kind: CandidateKind
    constraint: Constraint
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A group as it would be with the job in it."""

    job: Job
    kind: CandidateKind
    group: Group
    num_new_nodes: int
    """Additional rollout nodes."""
    dollars_per_hour: float
    """Additional cost."""


def own_limit_s(job: Job) -> float:
    """Returns the longest iteration that a job's SLO allows before any of it is used."""
    return job.slo * job.solo_s


def isolated(job: Job, name: str, pools: Pools) -> Candidate:
    """Returns a group of the job's own, on the nodes it asked for."""
    member = Member(job=job, rollout_nodes=tuple(range(job.num_rollout_nodes)))
    group = Group(
        name=name,
        num_train_nodes=job.num_train_nodes,
        num_rollout_nodes=job.num_rollout_nodes,
        members=(member,),
    )
    return Candidate(
        job=job,
        kind=CandidateKind.ISOLATED,
        group=group,
        num_new_nodes=job.num_rollout_nodes,
        dollars_per_hour=pools.dollars_per_hour(group),
    )


def candidates(group: Group, job: Job, pools: Pools) -> Iterator[Candidate]:
    """Yields every candidate that is tried, cheapest first: on nodes that are there, then with 1, 2, ...
    more.

    A job on one node tries each; one on several takes neighbours in the order of load, as all subsets would
    be too many.
    """
    load_s = rollout_load_s(group)
    by_load = sorted(range(group.num_rollout_nodes), key=lambda node: (load_s[node], node))
    want = job.num_rollout_nodes
    for num_new in range(max(0, want - len(by_load)), want + 1):
        new = tuple(range(group.num_rollout_nodes, group.num_rollout_nodes + num_new))
        num_old = want - num_new
        for first in range(len(by_load) - num_old + 1 if num_old else 1):
            nodes = tuple(sorted(by_load[first : first + num_old])) + new
            grown = replace(
                group,
                num_rollout_nodes=group.num_rollout_nodes + num_new,
                members=(*group.members, Member(job=job, rollout_nodes=nodes)),
            )
            yield Candidate(
                job=job,
                kind=CandidateKind.SCALED if num_new else CandidateKind.DIRECT,
                group=grown,
                num_new_nodes=num_new,
                dollars_per_hour=pools.price(num_new, 0),
            )


def rollout_load_s(group: Group) -> list[float]:
    """Rollouts of one cycle on each rollout node."""
    load_s = [0.0] * group.num_rollout_nodes
    for member in group.members:
        for node in member.rollout_nodes:
            load_s[node] += member.job.rollout_s
    return load_s


def is_saturated(group: Group) -> bool:
    """Returns whether the group has no slack for new work. Source: WEAVE §4.2, strategy 3, Algorithm 1 line
    4."""
    return group.load_s >= group.cycle_s


def memory_shortage(group: Group, pools: Pools) -> str | None:
    """Returns which node's host can't hold its residents, with the bytes; None if all fit."""
    train_bytes = sum(member.job.train_bytes for member in group.members)
    if train_bytes > pools.train.host_bytes:
        return f"training nodes: {train_bytes / 1e9:.1f} of {pools.train.host_bytes / 1e9:.1f} GB"
    for node in range(group.num_rollout_nodes):
        held = sum(member.job.rollout_bytes for member in group.members if node in member.rollout_nodes)
        if held > pools.rollout.host_bytes:
            return f"rollout node {node}: {held / 1e9:.1f} of {pools.rollout.host_bytes / 1e9:.1f} GB"
    return None


def check(
    candidate: Candidate, pools: Pools, limit_of: LimitOf, *, multi_rate: bool, num_free: int | None = None
) -> Candidate | Rejection:
    """Returns the candidate in a certified order, or why not. `num_free`: rollout nodes that the pool still
    has."""
    group = candidate.group

    def refuse(constraint: Constraint, text: str) -> Rejection:
        return Rejection(group=group.name, kind=candidate.kind, constraint=constraint, text=text)

    if len(group.members) > pools.max_residents:
        return refuse(Constraint.RESIDENCY, f"{len(group.members)} jobs, at most {pools.max_residents}")
    if num_free is not None and candidate.num_new_nodes > num_free:
        text = f"{candidate.num_new_nodes} more nodes of {pools.rollout.name} needed, {num_free} free"
        return refuse(Constraint.POOL, text)
    if (shortage := memory_shortage(group, pools)) is not None:
        return refuse(Constraint.MEMORY, shortage)
    limits_s = {member.job.name: limit_of(member.job) for member in group.members}
    found = ordered(group, limits_s, multi_rate=multi_rate)
    if found is None:
        return refuse(Constraint.SLO, _worst(group, limit_of))
    return replace(candidate, group=found)


def _worst(group: Group, limit_of: LimitOf) -> str:
    promise_s = round_robin_s(group)
    limit_s, name = min((limit_of(member.job), member.job.name) for member in group.members)
    return f"a cycle of {promise_s:.1f} s, {name} allows {limit_s:.1f} s ({promise_s - limit_s:.1f} s over)"
