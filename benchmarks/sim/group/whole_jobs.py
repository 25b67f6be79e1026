"""What the jobs of a group get from schedulers that never separate a job's phases: WEAVE's baselines.

Owns: solo disaggregation, veRL and Gavel+ for one group, and what their results are worth. Promises: no
baseline pays for restarts, copies or synchronization, so each gets at least what a real one would. Never: is
shipped.

Source: WEAVE §6.1 and §6.2. Prices, compute and bandwidth are those of its Table 1. Training is slower on H20
in proportion to compute, and a rollout is slower on H800 in proportion to memory bandwidth. The paper only
says that Gavel+ chooses optimal fractions of GPUs for whole jobs. Ours solves Gavel's linear program (OSDI
'20, max-min fairness over shares of time): in each share of its time a job has both kinds of nodes, or runs
both phases on nodes of one kind. The slowest job gets as much as it can have, and among such shares those are
taken that are worth most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rose.scheduler.cluster.pools import H20, H800
from rose.scheduler.group.cycle import promised_s
from rose.scheduler.group.model import Group, Job

H20_TRAIN = 989.5 / 148
"""A training phase on H20 nodes over the same on as many H800 nodes."""
H800_ROLLOUT = 4.0 / 3.35
"""A rollout on H800 nodes over the same on as many H20 nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placing:
    """Nodes on which a whole job runs while it has them, and its iterations there over those alone."""

    num_rollout_nodes: int
    num_train_nodes: int
    rate: float


def both_kinds(job: Job) -> Placing:
    """The nodes that the job asks for."""
    return Placing(num_rollout_nodes=job.num_rollout_nodes, num_train_nodes=job.num_train_nodes, rate=1.0)


def training_nodes(job: Job, slowdown: float = H800_ROLLOUT) -> Placing:
    """Both phases on the job's training nodes, one after the other, as veRL does."""
    rollout_s = job.rollout_s * slowdown * job.num_rollout_nodes / job.num_train_nodes
    rate = job.solo_s / (rollout_s + job.train_s)
    return Placing(num_rollout_nodes=0, num_train_nodes=job.num_train_nodes, rate=rate)


def rollout_nodes(job: Job) -> Placing:
    """Both phases on the job's rollout nodes."""
    train_s = job.train_s * H20_TRAIN * job.num_train_nodes / job.num_rollout_nodes
    rate = job.solo_s / (job.rollout_s + train_s)
    return Placing(num_rollout_nodes=job.num_rollout_nodes, num_train_nodes=0, rate=rate)


def worth(group: Group, rates: Mapping[str, float], dollars_per_hour: float | None = None) -> float:
    """What solo disaggregation pays for these rates over what is paid here; None: for the group's nodes."""
    paid = dollars_per_hour
    if paid is None:
        paid = _dollars(group.num_rollout_nodes, group.num_train_nodes)
    alone = sum(
        rates[each.job.name] * _dollars(each.job.num_rollout_nodes, each.job.num_train_nodes)
        for each in group.members
    )
    return alone / paid


def interleaved(group: Group) -> float:
    """Phase by phase, without any overhead."""
    promises = promised_s(group)
    rates = {
        each.job.name: each.job.solo_s / promise
        for each, promise in zip(group.members, promises, strict=True)
    }
    return worth(group, rates)


def verl(group: Group, slowdown: float = H800_ROLLOUT) -> float:
    """Each job on training nodes of its own, of which as many are paid for as are used."""
    placings = {each.job.name: training_nodes(each.job, slowdown) for each in group.members}
    paid = sum(_dollars(0, each.num_train_nodes) for each in placings.values())
    return worth(group, {name: each.rate for name, each in placings.items()}, paid)


def gavel(group: Group, *, trains_on_rollout_nodes: bool = True) -> float:
    """Whole jobs share the group's nodes over time, in the best fractions."""
    choices = {
        each.job.name: [
            both_kinds(each.job),
            training_nodes(each.job),
            *([rollout_nodes(each.job)] if trains_on_rollout_nodes else []),
        ]
        for each in group.members
    }
    least = _least(group, choices)
    solver = _Program(group, choices)
    objective = solver.lp.Objective()
    for each in group.members:
        solver.lp.Add(solver.rates[each.job.name] >= least * (1 - 1e-6))
        price = _dollars(each.job.num_rollout_nodes, each.job.num_train_nodes)
        for share, placing in zip(solver.shares[each.job.name], choices[each.job.name], strict=True):
            objective.SetCoefficient(share, placing.rate * price)
    objective.SetMaximization()
    solver.solve()
    return worth(group, {name: rate.solution_value() for name, rate in solver.rates.items()})


def _least(group: Group, choices: Mapping[str, Sequence[Placing]]) -> float:
    """The most that the slowest job can have."""
    solver = _Program(group, choices)
    least = solver.lp.NumVar(0, solver.lp.infinity(), "least")
    for rate in solver.rates.values():
        solver.lp.Add(rate >= least)
    solver.lp.Maximize(least)
    solver.solve()
    return float(least.solution_value())


class _Program:
    """The shares of time of each job's choices, within its time and the group's nodes."""

    def __init__(self, group: Group, choices: Mapping[str, Sequence[Placing]]) -> None:
        from ortools.linear_solver import pywraplp  # of the extra `cluster`

        self.lp = pywraplp.Solver.CreateSolver("GLOP")
        self._optimal = pywraplp.Solver.OPTIMAL
        self.shares: dict[str, list[Any]] = {
            name: [self.lp.NumVar(0, 1, f"{name}:{number}") for number in range(len(found))]
            for name, found in choices.items()
        }
        self.rates: dict[str, Any] = {
            name: sum(share * each.rate for share, each in zip(self.shares[name], found, strict=True))
            for name, found in choices.items()
        }
        for shares in self.shares.values():
            self.lp.Add(sum(shares) <= 1)
        every = [
            (share, each)
            for name, found in choices.items()
            for share, each in zip(self.shares[name], found, strict=True)
        ]
        self.lp.Add(sum(share * each.num_rollout_nodes for share, each in every) <= group.num_rollout_nodes)
        self.lp.Add(sum(share * each.num_train_nodes for share, each in every) <= group.num_train_nodes)

    def solve(self) -> None:
        status = self.lp.Solve()
        assert status == self._optimal, status


def _dollars(num_rollout_nodes: int, num_train_nodes: int) -> float:
    return num_rollout_nodes * H20.dollars_per_node_hour + num_train_nodes * H800.dollars_per_node_hour
