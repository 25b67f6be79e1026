"""Placement by cost: the worker where the turn finishes soonest, with the cost to the other turns there
added.

Owns: the score and its fallback.
Promises: the policy is pure. Without a fresh share of every worker in question it is the paper's policy,
because a score is only as good as its share.
Never does: estimate speeds, shares or cached tokens (workers/speed.py, workers/worker.py, sessions.py), or
compare all workers one by one (columns.py).
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from rose.scheduler.rollout.placing.columns import MIN_SHARE, rates
from rose.scheduler.rollout.placing.fleet import Fleet
from rose.scheduler.rollout.placing.policy import constraints, prefer_affine
from rose.scheduler.rollout.placing.versions import VersionRule
from rose.scheduler.rollout.placing.views import Speed, TurnView, WorkerView, of_model


def cost_s(turn: TurnView, worker: WorkerView, speed: Speed) -> float:
    """Returns the seconds until the turn's end on this worker, plus those by which its neighbours end later.

    The worker's share must be known. The turn takes (weighted missing prefix + prefill ahead + decoding) /
    share; each neighbour waits for this prefill and decodes in a batch that is larger by one.
    """
    assert worker.share is not None
    share = max(worker.share, MIN_SHARE)
    found = rates(speed, worker.in_flight, worker.pending_prefill_tokens, share)
    missing_tokens = turn.missing_tokens(worker.id)
    return missing_tokens * found.missing_s + turn.expected_tokens * found.expected_s + found.ahead_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPolicy:
    """Picks the worker with the least cost, or as the paper does if speeds are unknown or a share is stale.

    A worker of unknown speed counts as the slowest known one of its model; otherwise it would get no turns to
    show its speed.
    """

    versions: VersionRule = field(default_factory=VersionRule)

    def pick(self, turn: TurnView, fleet: Fleet, now: float) -> str | None:
        cohorts, columns = self.versions.admits(turn, fleet.cohorts), fleet.columns
        numbers = [cohort.number for cohort in cohorts] if len(cohorts) < len(fleet.cohorts) else None
        barred = columns.barred(turn, numbers, now)
        slowest = None
        if not columns.are_scored(barred, now):
            slowest = columns.slowest([cohort.number for cohort in of_model(turn.model, fleet.cohorts)])
            if slowest is None or not columns.are_fresh(barred, now):
                return prefer_affine(turn, cohorts, fleet, now)
        costs_s = columns.costs_s(turn, slowest, barred)
        for worker_id in turn.cached_tokens:
            view, column = fleet.find(worker_id), columns.column(worker_id)
            if view is not None and column is not None and costs_s[column] < math.inf:
                speed = view.speed if view.speed is not None else slowest
                assert speed is not None
                costs_s[column] = cost_s(turn, view, speed)
        return columns.first_of_least(costs_s)

    def likeness(self, turn: TurnView, now: float) -> Hashable:
        return constraints(turn, now)
