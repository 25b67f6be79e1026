"""The cheapest arrangement of all jobs at once, proven. The other policies are compared with it.

Solves the set partition over all groups with OR-tools (the extra `cluster`): no arrangement under round-robin
that keeps every limit costs less an hour. Jobs are regrouped for free. It minimises the present dollars per
hour, so a policy that looks ahead may spend fewer dollars in all.

Columns are priced in. A linear program over few columns gives every job a price, and columns that are cheaper
than their jobs' prices are added until there are none. Then only columns within the gap between the program's
bound and the best whole solution can matter, and these go to the integer solver.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rose.errors import PoolsFull, install_hint
from rose.scheduler.cluster.candidates import Candidate, LimitOf
from rose.scheduler.cluster.columns import Floats, GroupColumns, Ints, enumerate_columns
from rose.scheduler.cluster.groups import Cluster, Rearrangement
from rose.scheduler.cluster.policies import alone
from rose.scheduler.cluster.pools import Pools
from rose.scheduler.group.cycle import EPSILON
from rose.scheduler.group.model import Group, Job, Member

_CENT = 0.01
"""Dollars an hour: below it, costs are the same. Prices of nodes lie far apart."""
_SETS_PER_S = 50_000
"""Sets of one size that are enumerated, costed and priced in a second, about."""
_FIRST_GAP = 4.0
"""Dollars an hour: the bound is mostly that near, and few columns are."""


class Exact:
    """Regroups everything at every event. `charges_moves`: jobs pause when they leave their group's core."""

    name = "exact"
    max_moves = 1
    """Its plans are one each, however many jobs they move: it is no scheduler."""

    def __init__(self, *, charges_moves: bool = False, limit_s: float | None = None) -> None:
        """limit_s: bounds each decision's search. `gaps` says how far its result may be from the optimum."""
        self._charges_moves = charges_moves
        self._limit_s = limit_s
        self.gaps: list[float] = []
        """For each decision, the share of its cost that a cheaper grouping might save; 0: proven."""
        self._seen: frozenset[Job] = frozenset()
        self._new: set[str] = set()

    def place(self, cluster: Cluster, job: Job, now_s: float) -> Candidate:
        self._new.add(job.name)
        return alone(cluster, job)

    def movable(self, cluster: Cluster) -> list[str]:
        return list(cluster.groups)

    def rearrange(
        self, cluster: Cluster, now_s: float, max_moves: int, leave: Sequence[str] | None = None
    ) -> Rearrangement | None:
        jobs = [resident.job for resident in cluster.residents.values()]
        if frozenset(jobs) == self._seen:
            return None
        self._seen = frozenset(jobs)

        def limit_s(job: Job) -> float:
            # A job whose budget is spent has to run all the same.
            return max(cluster.limit_s(job), job.solo_s)

        found = optimum(jobs, cluster.pools, limit_s, self._limit_s)
        self.gaps.append(found.gap)
        groups, moved = _matched(cluster, found.groups)
        moved = [name for name in moved if name not in self._new]
        self._new.clear()
        names = {group.name for group in groups}
        empty = (
            replace(group, members=(), num_rollout_nodes=0, num_train_nodes=0)
            for group in cluster.groups.values()
            if group.name not in names
        )
        return Rearrangement(groups=(*groups, *empty), moved=tuple(moved) if self._charges_moves else ())


def _matched(cluster: Cluster, groups: Sequence[Group]) -> tuple[list[Group], list[str]]:
    """Every group under the name of the one that most of its jobs come from; the jobs from others."""
    taken: set[str] = set()
    found, moved = [], []
    for group in sorted(groups, key=lambda group: -len(group.members)):
        jobs = [member.job.name for member in group.members]
        origins = [cluster.group_of(job).name for job in jobs]
        free = [origin for origin in origins if origin not in taken]
        name = max(free, key=origins.count) if free else cluster.new_name()
        taken.add(name)
        found.append(replace(group, name=name))
        moved += [job for job, origin in zip(jobs, origins, strict=True) if origin != name]
    return found, moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """Groups of all jobs, and the share of their cost that others might save; 0: none is cheaper."""

    groups: list[Group]
    gap: float


def optimum(jobs: Sequence[Job], pools: Pools, limit_of: LimitOf, limit_s: float | None = None) -> Optimum:
    """Groups that cost least in all; with `limit_s`, the best of a search of about that length.

    Raises PoolsFull where a job can't even run alone, ValueError for jobs on several rollout nodes.
    """
    if not jobs:
        return Optimum(groups=[], gap=0.0)
    limits_s = [limit_of(job) for job in jobs]
    max_sets = round(limit_s * _SETS_PER_S) if limit_s is not None else None
    columns = enumerate_columns(jobs, limits_s, pools, max_sets)
    covered = np.unique(columns.jobs)
    for number, job in enumerate(jobs):
        if number not in covered:
            raise PoolsFull(
                f"job {job.name} keeps its limit of {limit_of(job):.1f} s in no group, not even alone"
            )
    chosen, bound = _cover(columns, len(jobs), limit_s)
    if not columns.is_complete:
        bound = _least_dollars_per_hour(jobs, limits_s, pools)
    cost = float(columns.dollars_per_hour[chosen].sum())
    gap = max(0.0, 1 - (bound + _CENT) / cost)
    return Optimum(groups=_groups(columns, chosen, jobs, pools, limit_of), gap=gap)


def _least_dollars_per_hour(jobs: Sequence[Job], limits_s: Sequence[float], pools: Pools) -> float:
    """No grouping costs less: a node works for each of its jobs once in no more than that job's limit."""
    pairs = list(zip(jobs, limits_s, strict=True))
    num_groups = math.ceil(len(jobs) / pools.max_residents)
    train = sum(job.train_s * job.num_train_nodes / limit for job, limit in pairs)
    rollout = sum(job.rollout_s / limit for job, limit in pairs)
    num_train_nodes = max(math.ceil(train - EPSILON), num_groups * min(job.num_train_nodes for job in jobs))
    return pools.price(max(math.ceil(rollout - EPSILON), num_groups), num_train_nodes)


def _cover(columns: GroupColumns, num_jobs: int, limit_s: float | None) -> tuple[list[int], float]:
    """Columns that hold every job, at the least cost, and what no choice of these columns is below."""
    costs = columns.dollars_per_hour
    active = _start(columns, num_jobs)
    while True:
        _, prices, _ = _solve(columns, active, num_jobs, whole=False)
        reduced = costs - _sum_prices(columns.jobs, prices)
        cheapest = np.argsort(reduced)[: 20 * num_jobs]
        missing = [int(c) for c in cheapest if reduced[c] < -1e-7 and c not in active]
        if not missing:
            break
        active |= set(missing)
    bound = float(prices.sum())
    gap = _FIRST_GAP
    while True:
        close = {int(c) for c in np.flatnonzero(reduced <= gap + 1e-7)} | _start(columns, num_jobs)
        chosen, _, is_best = _solve(columns, close, num_jobs, whole=True, limit_s=limit_s)
        cost = float(costs[chosen].sum())
        if cost - bound <= gap + _CENT or len(close) == len(columns):
            return chosen, cost if is_best else bound
        if not is_best:
            return chosen, bound
        gap = cost - bound


def _start(columns: GroupColumns, num_jobs: int) -> set[int]:
    """Chooses a column for each job, so that there is a solution."""
    found: set[int] = set()
    order = np.argsort(columns.dollars_per_hour, kind="stable")
    for number in range(num_jobs):
        holds = (columns.jobs[order] == number).any(axis=1)
        found.add(int(order[int(np.argmax(holds))]))
    return found


def _sum_prices(jobs: Ints, prices: Floats) -> Floats:
    """-1, which stands for no job, takes the last price: nothing."""
    total: Floats = np.append(prices, 0.0)[jobs].sum(axis=1)
    return total


def _solve(
    columns: GroupColumns, active: set[int], num_jobs: int, *, whole: bool, limit_s: float | None = None
) -> tuple[list[int], Floats, bool]:
    """The chosen columns of the integer program, or every job's price in the linear one.

    Also says whether no choice of these columns is better.
    """
    try:
        from ortools.linear_solver import pywraplp
    except ModuleNotFoundError as error:
        raise PoolsFull(f"the optimum needs OR-tools; {install_hint('cluster')}") from error
    solver: Any = pywraplp.Solver.CreateSolver("SCIP" if whole else "GLOP")
    objective = solver.Objective()
    rows = [solver.Constraint(1.0, solver.infinity()) for _ in range(num_jobs)]
    order = sorted(active)
    variables = []
    for column in order:
        variable = solver.BoolVar("") if whole else solver.NumVar(0.0, solver.infinity(), "")
        objective.SetCoefficient(variable, float(columns.dollars_per_hour[column]))
        for number in columns.jobs[column]:
            if number >= 0:
                rows[number].SetCoefficient(variable, 1.0)
        variables.append(variable)
    objective.SetMinimization()
    if limit_s is not None and whole:
        solver.SetTimeLimit(round(limit_s * 1000))
    status = solver.Solve()
    is_solved = status in (pywraplp.Solver.OPTIMAL, pywraplp.Solver.FEASIBLE)
    if not is_solved and limit_s is not None and whole:
        return sorted(_start(columns, num_jobs)), np.zeros(num_jobs), False  # out of time
    assert is_solved, f"solver status {status} with {len(order)} columns"
    chosen = [c for c, variable in zip(order, variables, strict=True) if variable.solution_value() > 0.5]
    prices = np.zeros(num_jobs) if whole else np.array([row.dual_value() for row in rows])
    return chosen, prices, status == pywraplp.Solver.OPTIMAL


def _groups(
    columns: GroupColumns, chosen: Sequence[int], jobs: Sequence[Job], pools: Pools, limit_of: LimitOf
) -> list[Group]:
    """A job in two columns stays in the first."""
    left = set(range(len(jobs)))
    groups = []
    for number, column in enumerate(chosen):
        mine = [jobs[int(k)] for k in columns.jobs[column] if int(k) in left]
        left -= {int(k) for k in columns.jobs[column]}
        if mine:
            limit_s = min(map(limit_of, mine)) * (1 + EPSILON)
            blocks = _fewest_blocks(mine, limit_s, pools.rollout.host_bytes)
            members = tuple(
                Member(job=job, rollout_nodes=(node,)) for node, block in enumerate(blocks) for job in block
            )
            groups.append(
                Group(
                    name=f"exact{number}",
                    num_train_nodes=int(columns.num_train_nodes[column]),
                    num_rollout_nodes=len(blocks),
                    members=members,
                )
            )
    return groups


def _fewest_blocks(jobs: Sequence[Job], limit_s: float, host_bytes: int) -> list[list[Job]]:
    """The jobs on as few rollout nodes as the limit and the hosts' memory allow."""
    best: list[list[Job]] = [[job] for job in jobs]
    blocks: list[list[Job]] = []

    def put(number: int) -> None:
        nonlocal best
        if len(blocks) >= len(best):
            return
        if number == len(jobs):
            best = [list(block) for block in blocks]
            return
        job = jobs[number]
        for block in blocks:
            load_s = sum(one.rollout_s for one in block) + job.rollout_s
            if (
                load_s <= limit_s
                and sum(one.rollout_bytes for one in block) + job.rollout_bytes <= host_bytes
            ):
                block.append(job)
                put(number + 1)
                block.pop()
        blocks.append([job])
        put(number + 1)
        blocks.pop()

    put(0)
    return best
