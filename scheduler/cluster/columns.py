"""Every group that a set of jobs can form, with its least cost: the columns of the exact optimum.

Enumerates, level by level, the sets that keep every limit under round-robin. No set is missed, except those
that cost as much as a set with one more job. Each job is pinned to one rollout node, where WEAVE's Theorem 1
holds.

A set that breaks a limit stays broken when a job joins, so each level grows from the last one alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rose.scheduler.cluster.pools import Pools
from rose.scheduler.group.cycle import EPSILON
from rose.scheduler.group.model import Job

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
MAX_JOBS = 1000
_KEY_BITS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupColumns:
    """Groups as rows of job numbers (-1: none), what they cost an hour, and on how many training nodes."""

    jobs: Ints
    dollars_per_hour: Floats
    num_train_nodes: Ints

    is_complete: bool = True
    """Whether no group worth having is missing."""

    def __len__(self) -> int:
        return len(self.jobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """The jobs as columns of numbers, their training on a given number of nodes."""

    rollout_s: Floats
    train_s: Floats
    solo_s: Floats
    limit_s: Floats
    rollout_bytes: Floats
    train_bytes: Floats


def enumerate_columns(
    jobs: Sequence[Job], limits_s: Sequence[float], pools: Pools, max_sets: int | None = None
) -> GroupColumns:
    """Returns all groups worth having, but of each size about `max_sets` at most, drawn at random.

    Raises ValueError for jobs on several rollout nodes.
    """
    for job in jobs:
        if job.num_rollout_nodes != 1:
            raise ValueError(
                f"exact: job {job.name} needs {job.num_rollout_nodes} rollout nodes, only 1 is covered"
            )
    if len(jobs) > MAX_JOBS:
        raise ValueError(f"exact: {len(jobs)} jobs, at most {MAX_JOBS}")
    parts = [
        _on_train_nodes(jobs, limits_s, pools, num_train_nodes, max_sets)
        for num_train_nodes in sorted({job.num_train_nodes for job in jobs})
    ]
    width = pools.max_residents
    return GroupColumns(
        jobs=np.concatenate([_padded(part.jobs, width) for part in parts]),
        dollars_per_hour=np.concatenate([part.dollars_per_hour for part in parts]),
        num_train_nodes=np.concatenate([part.num_train_nodes for part in parts]),
        is_complete=all(part.is_complete for part in parts),
    )


def _on_train_nodes(
    jobs: Sequence[Job], limits_s: Sequence[float], pools: Pools, num_train_nodes: int, max_sets: int | None
) -> GroupColumns:
    table = _table(jobs, limits_s, num_train_nodes)
    levels: list[tuple[Ints, Floats]] = []
    is_complete = True
    members = np.flatnonzero(table.solo_s <= table.limit_s)[:, None].astype(np.int64)
    while len(members):
        cost = _dollars_per_hour(members, table, pools, num_train_nodes)
        if levels:
            levels[-1] = _undominated(*levels[-1], members, cost)
        levels.append((members, cost))
        if members.shape[1] == pools.max_residents:
            break
        members, is_whole = _grown(members, table, pools, max_sets)
        is_complete &= is_whole
    width = pools.max_residents
    found = np.concatenate([_padded(level, width) for level, _ in levels] or [np.empty((0, width), np.int64)])
    costs = np.concatenate([cost for _, cost in levels] or [np.empty(0)])
    return GroupColumns(
        jobs=found,
        dollars_per_hour=costs,
        num_train_nodes=np.full(len(found), num_train_nodes, np.int64),
        is_complete=is_complete,
    )


def _table(jobs: Sequence[Job], limits_s: Sequence[float], num_train_nodes: int) -> _Table:
    rollout_s = np.array([job.rollout_s for job in jobs])
    train_s = np.array([job.train_s_on(num_train_nodes) for job in jobs])
    return _Table(
        rollout_s=rollout_s,
        train_s=train_s,
        solo_s=rollout_s + train_s + np.array([job.outside_s for job in jobs]),
        limit_s=np.array(limits_s) * (1 + EPSILON),
        rollout_bytes=np.array([float(job.rollout_bytes) for job in jobs]),
        train_bytes=np.array([float(job.train_bytes) for job in jobs]),
    )


def _grown(members: Ints, table: _Table, pools: Pools, max_sets: int | None) -> tuple[Ints, bool]:
    """Each set with each job of a higher number that keeps all limits; more rollout nodes can be had.

    Also says whether these are all of them, and not only `max_sets`.
    """
    num_jobs = len(table.rollout_s)
    # Per set: what all limits allow, and what is used of it.
    limit_s = table.limit_s[members].min(axis=1)
    train_s = table.train_s[members].sum(axis=1)
    solo_s = table.solo_s[members].max(axis=1)
    held = table.train_bytes[members].sum(axis=1)
    fitting = []
    for newcomer in range(num_jobs):
        limit = np.minimum(limit_s, table.limit_s[newcomer])
        fits = (
            (members[:, -1] < newcomer)
            & (train_s + table.train_s[newcomer] <= limit)
            & (np.maximum(solo_s, table.solo_s[newcomer]) <= limit)
            & (held + table.train_bytes[newcomer] <= pools.train.host_bytes)
        )
        fitting.append(np.flatnonzero(fits))
    num_sets = sum(map(len, fitting))
    is_whole = max_sets is None or num_sets <= max_sets
    if max_sets is not None and not is_whole:
        rng, share = np.random.default_rng(0), max_sets / num_sets
        fitting = [rows[rng.random(len(rows)) < share] for rows in fitting]
    found = [
        np.column_stack([members[rows], np.full(len(rows), newcomer, np.int64)])
        for newcomer, rows in enumerate(fitting)
    ]
    return np.concatenate(found), is_whole


def _dollars_per_hour(members: Ints, table: _Table, pools: Pools, num_train_nodes: int) -> Floats:
    """The cost with the fewest rollout nodes that the limits allow, over all ways to split a set."""
    num_sets, size = members.shape
    limit_s = table.limit_s[members].min(axis=1)
    load_s, held = table.rollout_s[members], table.rollout_bytes[members]
    host_bytes = pools.rollout.host_bytes
    fits = np.zeros((1 << size, num_sets), dtype=bool)
    for mask in range(1, 1 << size):
        chosen = [k for k in range(size) if mask >> k & 1]
        fits[mask] = (load_s[:, chosen].sum(axis=1) <= limit_s) & (held[:, chosen].sum(axis=1) <= host_bytes)
    blocks = np.full((1 << size, num_sets), size, dtype=np.int64)
    blocks[0] = 0
    for mask in range(1, 1 << size):
        lowest, part = mask & -mask, mask
        while part:
            if part & lowest:
                with_part = np.where(fits[part], blocks[mask ^ part] + 1, size)
                np.minimum(blocks[mask], with_part, out=blocks[mask])
            part = (part - 1) & mask
    nodes = blocks[-1].astype(np.float64)
    cost: Floats = nodes * pools.rollout.dollars_per_node_hour + pools.price(0, num_train_nodes)
    return cost


def _undominated(members: Ints, cost: Floats, larger: Ints, larger_cost: Floats) -> tuple[Ints, Floats]:
    """Drops the sets that have a superset of the same cost, which covers at least as much."""
    keys = _keys(members)
    order = np.argsort(keys)
    keep = np.ones(len(members), dtype=bool)
    for left_out in range(larger.shape[1]):
        wanted = _keys(np.delete(larger, left_out, axis=1))
        parents = order[np.minimum(np.searchsorted(keys[order], wanted), len(members) - 1)]
        is_there = keys[parents] == wanted  # else it was not drawn
        keep[parents[is_there & (cost[parents] >= larger_cost - 1e-9)]] = False
    return members[keep], cost[keep]


def _keys(members: Ints) -> Ints:
    keys = np.zeros(len(members), dtype=np.int64)
    for column in members.T:
        keys = (keys << _KEY_BITS) | column
    return keys


def _padded(members: Ints, width: int) -> Ints:
    missing = width - members.shape[1]
    return np.pad(members, ((0, 0), (0, missing)), constant_values=-1) if missing else members
