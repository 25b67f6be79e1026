"""Placement by cost: the worker where the turn finishes soonest, counting what it costs the turns there.

Owns: the score and its fallback.
Promises: the policy is pure. Without a fresh share of every worker in question it is the paper's policy,
because a score is only as good as its share.
Never does: estimate speeds, shares or cached tokens (workers/speed.py, workers/worker.py, sessions.py).
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from rose.scheduler.rollout.placing.policy import constraints, prefer_affine, usable
from rose.scheduler.rollout.placing.versions import VersionRule
from rose.scheduler.rollout.placing.views import Speed, TurnView, WorkerView, of_model

MIN_SHARE = 0.02
"""A share of zero would make every score infinite, so that none would be the least."""
_PREFIX_WEIGHT = 4.0
"""The cost of a missing prefix is certain, while everything else is a forecast, and the lowest of many
forecasts is mostly too low. Simulated with weight 1, turns left their KV for gains that did not come: two to
four times as many tokens were prefilled again, for phases no shorter. From weight 8 on phases get longer."""


def cost_s(turn: TurnView, worker: WorkerView, speed: Speed) -> float:
    """Returns the seconds until the turn's end on this worker, plus those by which its neighbours end later.

    The worker's share must be known. The turn takes (weighted missing prefix + prefill ahead + decoding) /
    share; each neighbour waits for this prefill and decodes in a batch that is larger by one.
    """
    assert worker.share is not None
    neighbours = worker.in_flight
    prefill_s = _PREFIX_WEIGHT * speed.prefill_s_per_token * turn.missing_tokens(worker.id)
    ahead_s = speed.prefill_s_per_token * worker.pending_prefill_tokens
    decode_s = turn.expected_tokens * speed.decode_s(neighbours + 1)
    imposed_s = neighbours * (prefill_s + turn.expected_tokens * speed.step_s_per_turn)
    return (prefill_s + ahead_s + decode_s + imposed_s) / max(worker.share, MIN_SHARE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostPolicy:
    """Picks the worker with the least cost, or as the paper does if speeds are unknown or a share is stale.

    A worker of unknown speed counts as the slowest known one of its model; otherwise it would get no turns to
    show its speed.
    """

    versions: VersionRule = field(default_factory=VersionRule)

    def pick(self, turn: TurnView, workers: Sequence[WorkerView], now: float) -> str | None:
        found = usable(turn, workers, self.versions, now)
        if not found:
            return None
        slowest = _slowest(of_model(turn.model, workers))
        if slowest is None or not all(w.share is not None and now < w.share_until for w in found):
            return prefer_affine(turn, found)
        costs = [(cost_s(turn, w, w.speed if w.speed is not None else slowest), w.id) for w in found]
        return min(costs)[1]

    def likeness(self, turn: TurnView, now: float) -> Hashable:
        return constraints(turn, now)


def _slowest(workers: Iterable[WorkerView]) -> Speed | None:
    known = [worker.speed for worker in workers if worker.speed is not None]
    return max(known, key=lambda speed: (speed.decode_s(1), speed.prefill_s_per_token), default=None)
