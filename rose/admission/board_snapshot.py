"""What an observer sees of the board: who computes, for how long, and what was offered and refused.

The observer only reads the page, so it disturbs no engine. rose.admission.board has the page.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain, repeat
from typing import Self

from rose._shm import Words
from rose.admission.board import REASONS, SLOT_WORDS, BoardWord, check_page, parties, to_s
from rose.admission.claim import guest_of, has_work, state_of
from rose.admission.gate import GateReason
from rose.admission.liveness import NOBODY, is_alive, pid_of
from rose.admission.slack import NEVER


class EngineState(IntEnum):
    """What a process on the board does now, as an observer sees it."""

    DETACHED = 0
    IDLE = 1
    OPEN = 2
    RUNNING = 3


_SEEN = (EngineState.IDLE, EngineState.OPEN, EngineState.OPEN, EngineState.RUNNING)  # by ServingState


@dataclass(frozen=True, slots=True, kw_only=True)
class SideSnapshot:
    """One process that shares the GPU; or all serving engines together, or all guests together."""

    state: EngineState
    pid: int
    """0 if no process is there; of several processes, that of the first."""
    alive: bool
    heartbeat_s: float
    busy_s: float
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardSnapshot:
    """The whole board at about one moment. Counters start when the page is made."""

    taken_s: float
    servings: tuple[SideSnapshot, ...]
    """One for each slot that has ever been used, in the order of slots."""
    guests: tuple[SideSnapshot, ...]
    serving: SideSnapshot
    rollout: SideSnapshot
    latest_start_s: float
    has_pending_prefill: bool
    num_yields: int
    yield_wait_s: float
    begin_wait_s: float
    num_overruns: int
    num_deaths: int
    rollout_tokens: int
    num_stalls: int
    num_pauses: int
    num_evictions: int
    declines: dict[GateReason, int]

    def busy_shares_since(self, earlier: Self) -> tuple[float, float]:
        """Returns serving's and the guests' shares of the wall time between two snapshots."""
        wall_s = self.taken_s - earlier.taken_s
        if wall_s <= 0:
            return 0.0, 0.0
        return (
            busiest_s(self.servings, earlier.servings) / wall_s,
            (self.rollout.busy_s - earlier.rollout.busy_s) / wall_s,
        )


def busiest_s(servings: Sequence[SideSnapshot], earlier: Sequence[SideSnapshot]) -> float:
    """Returns the seconds that serving computed between two snapshots. Of several engines only the busiest
    counts, because they compute side by side."""
    before_s = chain((side.busy_s for side in earlier), repeat(0.0))
    return max((side.busy_s - then_s for side, then_s in zip(servings, before_s, strict=False)), default=0.0)


class ServingTime:
    """Measures how long serving has computed on a GPU since its board was made.

    Of several engines, the busiest one counts between two readings.
    """

    def __init__(self, words: Words) -> None:
        self._words = words
        self._servings: tuple[SideSnapshot, ...] = ()
        self._busy_s = 0.0

    def read_s(self) -> float:
        """Returns the seconds until now."""
        servings = snapshot(self._words).servings
        self._busy_s += busiest_s(servings, self._servings)
        self._servings = servings
        return self._busy_s


def snapshot(words: Words, serving_slot: int | None = None) -> BoardSnapshot:
    """Reads the whole board without disturbing it.

    ``serving_slot``: the only serving engine to read; None reads all of them.
    """
    check_page(words)
    now_ns = time.monotonic_ns()
    load = words.load
    serving_ats, guest_ats = parties(words)
    if serving_slot is not None:
        serving_ats = (SLOT_WORDS * serving_slot,)
    claim = load(BoardWord.CLAIM)
    servings = tuple(_serving(words, now_ns, claim, at) for at in serving_ats)
    guests = tuple(_guest(words, now_ns, claim, at) for at in guest_ats)

    def total(word: int, ats: Iterable[int]) -> int:
        return sum(load(word + at) for at in ats)

    latest_ns = [load(BoardWord.S_LATEST_START + at) for at in serving_ats] if has_work(claim) else []
    return BoardSnapshot(
        taken_s=now_ns / 1e9,
        servings=servings,
        guests=guests,
        serving=_together(servings),
        rollout=_together(guests),
        latest_start_s=to_s(min(latest_ns)) if latest_ns else NEVER,
        has_pending_prefill=any(load(BoardWord.S_HAS_PENDING + at) for at in serving_ats),
        num_yields=total(BoardWord.S_YIELDS, serving_ats),
        yield_wait_s=total(BoardWord.S_YIELD_WAIT, serving_ats) / 1e9,
        begin_wait_s=total(BoardWord.S_BEGIN_WAIT, serving_ats) / 1e9,
        num_overruns=total(BoardWord.S_OVERRUNS, serving_ats),
        num_deaths=total(BoardWord.S_DEATHS, serving_ats),
        rollout_tokens=total(BoardWord.R_TOKENS, guest_ats),
        num_stalls=total(BoardWord.R_STALLS, guest_ats),
        num_pauses=total(BoardWord.R_PAUSES, guest_ats),
        num_evictions=load(BoardWord.EVICTIONS),
        declines={reason: load(BoardWord.R_DECLINES + i) for i, reason in enumerate(REASONS)},
    )


def _serving(words: Words, now_ns: int, claim: int, at: int) -> SideSnapshot:
    state = _SEEN[state_of(claim, at // SLOT_WORDS)]
    return _side(words, now_ns, state, words.load(BoardWord.S_IDENTITY + at), BoardWord.S_BUSY + at)


def _guest(words: Words, now_ns: int, claim: int, at: int) -> SideSnapshot:
    state = EngineState.RUNNING if guest_of(claim) == at // SLOT_WORDS else EngineState.IDLE
    return _side(words, now_ns, state, words.load(BoardWord.R_IDENTITY + at), BoardWord.R_BUSY + at)


def _side(words: Words, now_ns: int, state: EngineState, who: int, busy: int) -> SideSnapshot:
    alive = who != NOBODY and is_alive(who)
    busy_ns, num_steps, started_ns, heartbeat_ns = (words.load(busy + i) for i in range(4))
    if alive and started_ns > 0:
        busy_ns += now_ns - started_ns
    return SideSnapshot(
        state=state if who != NOBODY else EngineState.DETACHED,
        pid=pid_of(who),
        alive=alive,
        heartbeat_s=heartbeat_ns / 1e9,
        busy_s=busy_ns / 1e9,
        num_steps=num_steps,
    )


def _together(sides: Sequence[SideSnapshot]) -> SideSnapshot:
    return SideSnapshot(
        state=max((side.state for side in sides), default=EngineState.DETACHED),
        pid=next((side.pid for side in sides if side.pid), 0),
        alive=any(side.alive for side in sides),
        heartbeat_s=max((side.heartbeat_s for side in sides), default=0.0),
        busy_s=sum(side.busy_s for side in sides),
        num_steps=sum(side.num_steps for side in sides),
    )
