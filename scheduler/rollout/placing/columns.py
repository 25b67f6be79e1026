"""The figures of all workers by which a turn's cost is compared, one array for each.

Owns: WorkerColumns.
Promises: a worker's cost has the same bits as cost.cost_s gives for it.
Never does: decide when the cost counts (cost.py).
"""

import math
from collections.abc import Collection
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from rose.scheduler.rollout.placing.views import Speed, TurnView, WorkerKind, WorkerView

Mask = NDArray[np.bool_]
_Floats = NDArray[np.float64]
_ANYBODY = 0.0
"""The owner's number of a worker that every job may use."""
_UNKNOWN = Speed(prefill_s_per_token=0.0, step_s=0.0, step_s_per_turn=0.0)

MIN_SHARE = 0.02
"""A share of zero would make every score infinite, so that none would be the least."""
PREFIX_WEIGHT = 4.0
"""The cost of a missing prefix is certain, while everything else is a forecast, and the lowest of many
forecasts is mostly too low. Simulated with weight 1, turns left their KV for gains that did not come: two to
four times as many tokens were prefilled again, for phases no shorter. From weight 8 on phases get longer."""


class _Row(IntEnum):
    OPEN_FROM = 0
    """When it takes turns again; inf where it is full, lost, or its SLO gate is closed."""
    COHORT = 1
    OWNER = 2
    SCORED_UNTIL = 3
    """Until when share and speed are known; -inf where either is not."""
    SHARE_UNTIL = 4
    SHARE = 5
    """The rollouts' share of the GPU, at least MIN_SHARE."""
    NEIGHBOURS = 6
    PENDING_TOKENS = 7
    HAS_SPEED = 8
    PREFILL_S = 9
    STEP_S = 10
    TURN_S = 11
    OWN_S = 12
    """The weighted time per missing token."""
    AHEAD_S = 13
    DECODE_S = 14
    """Seconds per token with one turn more."""


class WorkerColumns:
    """One column of figures for each worker."""

    def __init__(self) -> None:
        self._table: _Floats = np.zeros((len(_Row), 16))
        self._scratch: _Floats = np.empty((3, 16))
        """The results of `costs_s`: to allocate them for each turn takes longer than to compute them."""
        self._ids: list[str] = []
        self._column: dict[str, int] = {}
        self._owners: dict[str, float] = {}
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
        share, speed = view.share, view.speed if view.speed is not None else _UNKNOWN
        share_until = view.share_until if share is not None else -math.inf
        self._table[:, column] = (
            view.not_before if is_open else math.inf,
            cohort,
            self._owner(view.owner) if view.kind is WorkerKind.SERVING else _ANYBODY,
            share_until if view.speed is not None else -math.inf,
            share_until,
            max(share, MIN_SHARE) if share is not None else 1.0,
            view.in_flight,
            view.pending_prefill_tokens,
            view.speed is not None,
            speed.prefill_s_per_token,
            speed.step_s,
            speed.step_s_per_turn,
            PREFIX_WEIGHT * speed.prefill_s_per_token,
            speed.prefill_s_per_token * view.pending_prefill_tokens,
            speed.decode_s(view.in_flight + 1),
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

    def usable(self, turn: TurnView, cohorts: Collection[int] | None, now: float) -> Mask:
        """Returns which workers of these cohorts may take the turn now; None: of all cohorts."""
        usable: Mask = self._row(_Row.OPEN_FROM) <= now
        if cohorts is not None:
            usable &= self._of(cohorts)
        if self._owners:
            owner = self._row(_Row.OWNER)
            usable &= (owner == _ANYBODY) | (owner == self._owners.get(turn.job, _ANYBODY))
        for worker_id, until in turn.avoid_until.items():
            if until > now and (column := self._column.get(worker_id)) is not None:
                usable[column] = False
        return usable

    def _of(self, cohorts: Collection[int]) -> Mask:
        numbers = self._row(_Row.COHORT)
        first, *others = cohorts or (0,)
        found: Mask = numbers == first
        for cohort in others:
            found |= numbers == cohort
        return found

    def are_scored(self, workers: Mask, now: float) -> bool:
        """Whether the shares and speeds of these workers are known and not stale."""
        until = self._row(_Row.SCORED_UNTIL)
        return bool(until.min() > now) or not ((until <= now) & workers).any()

    def are_fresh(self, workers: Mask, now: float) -> bool:
        """Whether the shares of these workers are known and not stale."""
        return not ((self._row(_Row.SHARE_UNTIL) <= now) & workers).any()

    def slowest(self, cohorts: Collection[int]) -> Speed | None:
        """Returns the slowest known speed in these cohorts, the one that decodes slowest alone."""
        known = np.flatnonzero(self._of(cohorts) & (self._row(_Row.HAS_SPEED) != 0))
        if not len(known):
            return None
        prefill_s, step_s, turn_s = self._table[_Row.PREFILL_S : _Row.OWN_S, known]
        one = np.lexsort((prefill_s, step_s + turn_s))[-1]
        figures = (float(prefill_s[one]), float(step_s[one]), float(turn_s[one]))
        return Speed(prefill_s_per_token=figures[0], step_s=figures[1], step_s_per_turn=figures[2])

    def costs_s(self, turn: TurnView, slowest: Speed | None) -> _Floats:
        """Returns each worker's cost of a turn of which it has nothing cached (cost.cost_s).

        A worker of unknown speed counts as `slowest`; without it there must be none that may be chosen. The
        next call overwrites the result.
        """
        table = self._table[:, : len(self._ids)]
        turn_s, own_s, ahead_s, decode_s = table[_Row.TURN_S :]
        neighbours = table[_Row.NEIGHBOURS]
        if slowest is not None:
            is_known, prefill_s = table[_Row.HAS_SPEED] != 0, slowest.prefill_s_per_token
            own_s = np.where(is_known, own_s, PREFIX_WEIGHT * prefill_s)
            ahead_s = np.where(is_known, ahead_s, prefill_s * table[_Row.PENDING_TOKENS])
            unknown_s = slowest.step_s + slowest.step_s_per_turn * (neighbours + 1)
            decode_s = np.where(is_known, decode_s, unknown_s)
            turn_s = np.where(is_known, turn_s, slowest.step_s_per_turn)
        costs_s: _Floats
        costs_s, imposed_s, part_s = self._scratch[:, : len(self._ids)]
        np.multiply(own_s, max(0.0, turn.prompt_tokens), out=imposed_s)
        np.add(imposed_s, ahead_s, out=costs_s)
        costs_s += np.multiply(decode_s, turn.expected_tokens, out=part_s)
        imposed_s += np.multiply(turn_s, turn.expected_tokens, out=part_s)
        imposed_s *= neighbours
        costs_s += imposed_s
        costs_s /= table[_Row.SHARE]
        return costs_s

    def column(self, worker_id: str) -> int | None:
        """Returns the worker's place in these arrays."""
        return self._column.get(worker_id)

    def first_of_least(self, costs_s: _Floats, workers: Mask) -> str:
        """Returns the worker with the least cost among these, the first by name of equals. Overwrites the
        costs of the others."""
        np.putmask(costs_s, ~workers, math.inf)
        least = (costs_s == costs_s.min()).nonzero()[0]
        if len(least) == 1:
            return self._ids[int(least[0])]
        if self._ranks is None:
            self._ranks = np.empty(len(self._ids), dtype=np.int64)
            self._ranks[sorted(range(len(self._ids)), key=self._ids.__getitem__)] = np.arange(len(self._ids))
        return self._ids[int(least[np.argmin(self._ranks[least])])]
