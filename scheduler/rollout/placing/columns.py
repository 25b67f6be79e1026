"""The figures of all workers by which a turn's cost is compared, one array for each.

Owns: WorkerColumns, Rates and rates.
Promises: a worker's cost has the same bits as cost.cost_s gives for it. What doesn't depend on the turn is
computed when the worker changes, so that a decision multiplies and adds.
Never does: decide when the cost counts (cost.py).
"""

import math
from collections.abc import Collection
from enum import IntEnum
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rose.scheduler.rollout.placing.views import Speed, TurnView, WorkerKind, WorkerView

Mask = NDArray[np.bool_]
_Floats = NDArray[np.float64]
_Number = TypeVar("_Number", float, _Floats)
_ANYBODY = 0.0
"""The owner's number of a worker that every job may use."""
_UNKNOWN = Speed(prefill_s_per_token=0.0, step_s=0.0, step_s_per_turn=0.0)

MIN_SHARE = 0.02
"""A share of zero would make every score infinite, so that none would be the least."""
PREFIX_WEIGHT = 4.0
"""The cost of a missing prefix is certain, while everything else is a forecast, and the lowest of many
forecasts is mostly too low. Simulated with weight 1, turns left their KV for gains that did not come: two to
four times as many tokens were prefilled again, for phases no shorter. From weight 8 on phases get longer."""


class Rates(NamedTuple, Generic[_Number]):
    """What a turn costs on a worker, or on each of several, in seconds."""

    missing_s: _Number
    """Per token of its prompt that the worker has to prefill."""
    expected_s: _Number
    """Per token that it generates."""
    ahead_s: _Number
    """For the prefill ahead of it."""


def rates(speed: Speed, neighbours: _Number, pending_tokens: _Number, share: _Number) -> Rates[_Number]:
    """Returns what a turn costs beside `neighbours` others, the delay that it brings them included.

    Each neighbour waits for the turn's prefill, and decodes in a batch that is larger by one. `share`: at
    least MIN_SHARE.
    """
    prefill_s, turn_s = speed.prefill_s_per_token, speed.step_s_per_turn
    decode_s = speed.step_s + turn_s * (neighbours + 1)
    return Rates(
        PREFIX_WEIGHT * prefill_s * (neighbours + 1) / share,
        (decode_s + neighbours * turn_s) / share,
        prefill_s * pending_tokens / share,
    )


class _Row(IntEnum):
    MISSING_S = 0
    """These three are Rates. The last is inf where the worker is full, lost, or its SLO gate is closed."""
    EXPECTED_S = 1
    AHEAD_S = 2
    SCORED_UNTIL = 3
    """Until when share and speed are known; -inf where either is not, inf where no turn may run."""
    SHARE_UNTIL = 4
    """The same for the share alone."""
    OPEN_FROM = 5
    COHORT = 6
    OWNER = 7
    HAS_SPEED = 8
    PREFILL_S = 9
    STEP_S = 10
    TURN_S = 11
    NEIGHBOURS = 12
    PENDING_TOKENS = 13
    SHARE = 14
    """The rollouts' share of the GPU, at least MIN_SHARE."""


class WorkerColumns:
    """One column of figures for each worker."""

    def __init__(self) -> None:
        self._table: _Floats = np.zeros((len(_Row), 16))
        self._scratch: _Floats = np.empty((2, 16))
        """The results of `costs_s`: to allocate them for each turn takes longer than to compute them."""
        self._ids: list[str] = []
        self._column: dict[str, int] = {}
        self._owners: dict[str, float] = {}
        self._all_open_at = -math.inf
        """From when on no worker has to wait after a failure."""
        self._ranks: NDArray[np.int64] | None = None
        """The columns' places in the order of ids; None after a worker came or left."""

    def put(self, view: WorkerView, cohort: int, *, is_open: bool) -> None:
        """Takes in a worker's figures."""
        if (column := self._column.get(view.id)) is None:
            column = self._column[view.id] = len(self._ids)
            self._ids.append(view.id)
            self._ranks = None
            if column == self._table.shape[1]:
                self._table = np.concatenate([self._table, np.zeros_like(self._table)], axis=1)
                self._scratch = np.empty((len(self._scratch), self._table.shape[1]))
        speed = view.speed if view.speed is not None else _UNKNOWN
        share = max(view.share, MIN_SHARE) if view.share is not None else 1.0
        until = view.share_until if view.share is not None else -math.inf
        missing_s, expected_s, ahead_s = rates(speed, view.in_flight, view.pending_prefill_tokens, share)
        self._all_open_at = max(self._all_open_at, view.not_before)
        self._table[:, column] = (
            missing_s,
            expected_s,
            ahead_s if is_open else math.inf,
            math.inf if not is_open else until if view.speed is not None else -math.inf,
            until if is_open else math.inf,
            view.not_before,
            cohort,
            self._owner(view.owner) if view.kind is WorkerKind.SERVING else _ANYBODY,
            view.speed is not None,
            speed.prefill_s_per_token,
            speed.step_s,
            speed.step_s_per_turn,
            view.in_flight,
            view.pending_prefill_tokens,
            share,
        )

    def drop(self, worker_id: str) -> None:
        """Forgets a worker; the last column takes its place. Raises: KeyError."""
        column, last, self._ranks = self._column.pop(worker_id), self._ids.pop(), None
        if last != worker_id:
            self._table[:, column] = self._table[:, len(self._ids)]
            self._ids[column], self._column[last] = last, column

    def _owner(self, owner: str | None) -> float:
        if owner is None:
            return _ANYBODY
        return self._owners.setdefault(owner, len(self._owners) + 1.0)

    def _row(self, row: _Row) -> _Floats:
        return self._table[row, : len(self._ids)]

    def barred(self, turn: TurnView, cohorts: Collection[int] | None, now: float) -> Mask | None:
        """Returns which workers may not take this turn now, although they may take others; None: there are
        none. `cohorts`: those whose workers may; None: all."""
        barred: Mask | None = None
        if self._all_open_at > now:
            barred = self._row(_Row.OPEN_FROM) > now
        if cohorts is not None:
            barred = _either(barred, ~self._of(cohorts))
        if self._owners:
            owner = self._row(_Row.OWNER)
            is_others = (owner != _ANYBODY) & (owner != self._owners.get(turn.job, _ANYBODY))
            barred = _either(barred, is_others)
        for worker_id, until in turn.avoid_until.items():
            if until > now and (column := self._column.get(worker_id)) is not None:
                if barred is None:
                    barred = np.zeros(len(self._ids), dtype=np.bool_)
                barred[column] = True
        return barred

    def _of(self, cohorts: Collection[int]) -> Mask:
        numbers = self._row(_Row.COHORT)
        first, *others = cohorts or (0,)
        found: Mask = numbers == first
        for cohort in others:
            found |= numbers == cohort
        return found

    def are_scored(self, barred: Mask | None, now: float) -> bool:
        """Returns whether the shares and speeds of all other workers are known and not stale."""
        return self._is_later(_Row.SCORED_UNTIL, barred, now)

    def are_fresh(self, barred: Mask | None, now: float) -> bool:
        """Returns whether the shares of all other workers are known and not stale."""
        return self._is_later(_Row.SHARE_UNTIL, barred, now)

    def _is_later(self, row: _Row, barred: Mask | None, now: float) -> bool:
        until = self._row(row)
        if bool(until.min(initial=math.inf) > now):
            return True
        return barred is not None and not ((until <= now) & ~barred).any()

    def slowest(self, cohorts: Collection[int]) -> Speed | None:
        """Returns the slowest known speed in these cohorts, the one that decodes slowest alone."""
        known = np.flatnonzero(self._of(cohorts) & (self._row(_Row.HAS_SPEED) != 0))
        if not len(known):
            return None
        prefill_s, step_s, turn_s = self._table[_Row.PREFILL_S : _Row.NEIGHBOURS, known]
        one = np.lexsort((prefill_s, step_s + turn_s))[-1]
        figures = (float(prefill_s[one]), float(step_s[one]), float(turn_s[one]))
        return Speed(prefill_s_per_token=figures[0], step_s=figures[1], step_s_per_turn=figures[2])

    def costs_s(self, turn: TurnView, slowest: Speed | None, barred: Mask | None) -> _Floats:
        """Returns each worker's cost of a turn of which it has nothing cached (cost.cost_s); inf where the
        turn may not run.

        A worker of unknown speed counts as `slowest`; without it there must be none that may be chosen. The
        next call overwrites the result.
        """
        costs_s: _Floats
        costs_s, part_s = self._scratch[:, : len(self._ids)]
        prompt_tokens = max(0.0, turn.prompt_tokens)
        np.multiply(self._row(_Row.MISSING_S), prompt_tokens, out=costs_s)
        costs_s += np.multiply(self._row(_Row.EXPECTED_S), turn.expected_tokens, out=part_s)
        costs_s += self._row(_Row.AHEAD_S)
        if slowest is not None:
            unknown = np.flatnonzero(self._row(_Row.HAS_SPEED) == 0)
            found = rates(slowest, *self._table[_Row.NEIGHBOURS :, unknown])
            costs_s[unknown] += (
                prompt_tokens * found.missing_s + turn.expected_tokens * found.expected_s + found.ahead_s
            )
        if barred is not None:
            np.putmask(costs_s, barred, math.inf)
        return costs_s

    def column(self, worker_id: str) -> int | None:
        """Returns the worker's place in these arrays."""
        return self._column.get(worker_id)

    def first_of_least(self, costs_s: _Floats) -> str | None:
        """Returns the worker with the least finite cost, the first by name of equals; None if there is
        none."""
        if not len(costs_s) or (least_s := costs_s[first := int(costs_s.argmin())]) == math.inf:
            return None
        is_least = costs_s == least_s
        if np.count_nonzero(is_least) == 1:
            return self._ids[first]
        if self._ranks is None:
            self._ranks = np.empty(len(self._ids), dtype=np.int64)
            self._ranks[sorted(range(len(self._ids)), key=self._ids.__getitem__)] = np.arange(len(self._ids))
        least = is_least.nonzero()[0]
        return self._ids[int(least[np.argmin(self._ranks[least])])]


def _either(one: Mask | None, other: Mask) -> Mask:
    return other if one is None else one | other
