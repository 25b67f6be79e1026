"""The board: one shared page on which a serving and a rollout engine share the time of their GPU.

This module has the layout, and the protocol between exactly two processes, a `ServingSide` and a
`RolloutSide`. Steps exclude each other with priority for serving, waits are bounded, and the death of either
process never takes the other's right to run. How much slack there is, and who may use it, is for the gate to
decide.

All words are int64 with sequentially consistent access; times are CLOCK_MONOTONIC nanoseconds. One process
writes each cache line (8 words). The exceptions are the magic word, and bells and arrivals, which only grow
by atomic adds.

States
------
Serving:  DETACHED --attach--> IDLE <--end_step--> RUNNING (has claimed the GPU, or steps)
                               OPEN <--end_step-/
    IDLE: serving has no work, and rollout steps freely.   OPEN: serving has work and is between two steps;
    rollout may take one step per grant.   RUNNING: rollout must not start.   DETACHED: nobody serves, as
    IDLE.
Rollout:  DETACHED --attach--> IDLE <--> RUNNING (steps, or tries to).

Taking the GPU (two-party Dekker: each side stores its intent, then loads the other's)
    serving.begin_step:  state := RUNNING; then, while rollout's state is RUNNING, sleep on the serving bell.
    rollout.try_begin:   state := RUNNING; then load serving's. If that is RUNNING, or OPEN without an unused
                         grant, or if serving has published since the decision: state := IDLE, ring, give way.
With sequential consistency at least one side sees the other. Rollout gives way and serving never does, so
they can't both run, and serving waits for at most the one rollout step that has begun.

Giving the GPU back in the middle of a rollout step
    rollout.pause:       R_PAUSED := now, state := IDLE, ring; between two layers, when serving has work or a
                         request is announced.
    rollout.try_resume:  as try_begin, for the rest of the step; then R_PAUSED := 0.
    A paused rollout engine can do nothing else, not even give memory back. So serving offers it a grant for
    the rest if it needs that memory, or if the pause has lasted for as long as a request may stall.

One rollout step between two serving steps
    serving.offer_grant: grant := grant + 1 (in state OPEN), ring; wait for rollout's grant_used = grant.
    rollout:             try_begin sets grant_used := grant (one step per grant). decline() does so without a
                         step: a gate that refuses then costs a wake-up and not the whole hand-over.
    serving.offer_grants repeats this while rollout steps and slack is left.
    The wait ends when the step ends, when the hand-over time passes before a step has begun, on an arrival
    that is announced before a step has begun, and at the latest start. The begin_step that follows claims the
    GPU.

Bounds and deaths
    Serving waits for a running rollout step until est_end + grace, whatever happens. It looks at the process
    every LIVENESS_SLICE_S meanwhile, and goes on at once if it is dead. It does not wait again for a dead
    rollout process, which its attach epoch names. A rollout process that leaves a grant unanswered (it died,
    was stopped, or hangs between two steps) is offered no other until its heartbeat is newer than that offer.
    Rollout never sleeps longer than MAX_GRANT_WAIT_S per call. Once a serving process has died, in any state,
    view().alive is False and no rollout step starts until a serving process attaches again. A serving process
    that detached has left the GPU free.
"""

import math
import time
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Self

from rose._shm import Words
from rose.admission.gate import GateReason
from rose.admission.liveness import NOBODY, is_alive, own_identity, pid_of
from rose.admission.slack import NEVER
from rose.admission.slices import ClosedSlices
from rose.errors import BoardError

LAYOUT_VERSION = 5
MAGIC = 0x524F5345_0000 | LAYOUT_VERSION
NUM_WORDS = 128

NEVER_NS = 2**62

# How long past a step's predicted (99th percentile) end serving waits: a busy host schedules late.
GRACE_S = 0.1
LIVENESS_SLICE_S = 0.01
# However wrong a prediction is, serving waits no longer than this.
MAX_STEP_WAIT_S = 5.0
# The longest sleep in a rollout engine's schedule(), so that aborts and new requests are still handled.
MAX_GRANT_WAIT_S = 0.02
# How long an arrival that the front end announced keeps the GPU for serving. It covers tokenizing and
# queueing; a request that is rejected on the way must not hold rollouts off for longer.
ARRIVAL_HOLD_S = 0.05


class EngineState(IntEnum):
    """What an engine does now."""

    DETACHED = 0
    IDLE = 1
    OPEN = 2
    RUNNING = 3


class Word:
    """The index of each word, in cache lines of 8; comments name the writer.

    These are plain integers: an IntEnum's members cost three times the atomic load that they index.
    """

    MAGIC: Final = 0
    # serving
    S_STATE: Final = 8
    S_HAS_PENDING: Final = 9
    S_LATEST_START: Final = 10
    S_SEQ: Final = 11
    S_GRANT: Final = 12
    S_ABSORBED: Final = 13
    # serving, at attach
    S_IDENTITY: Final = 16
    S_EPOCH: Final = 17
    # serving, when its settings change
    S_MAX_STEP: Final = 18  # 0: nobody has served yet
    # rollout
    R_STATE: Final = 24
    R_WANT: Final = 25
    R_EST_END: Final = 26
    R_GRANT_USED: Final = 27
    R_MIN_STEP: Final = 28
    # rollout, at attach
    R_IDENTITY: Final = 32
    R_EPOCH: Final = 33
    # anyone, atomic adds: futex words
    SERVING_BELL: Final = 40
    ROLLOUT_BELL: Final = 48
    # serving's front ends, atomic adds
    ARRIVALS: Final = 56
    ARRIVED: Final = 57
    # serving: counters since the page was made; the first four as in R_BUSY's line
    S_BUSY: Final = 64
    S_STEPS: Final = 65
    S_STARTED: Final = 66  # 0 between steps
    S_HEARTBEAT: Final = 67
    S_YIELDS: Final = 68
    S_YIELD_WAIT: Final = 69
    S_BEGIN_WAIT: Final = 70
    S_OVERRUNS: Final = 71
    # rollout: counters
    R_BUSY: Final = 72
    R_STEPS: Final = 73
    R_STARTED: Final = 74
    R_HEARTBEAT: Final = 75
    R_TOKENS: Final = 76
    R_STALLS: Final = 77
    R_PAUSED: Final = 78  # since when a step is paused; 0 if none is
    R_PAUSES: Final = 79
    R_DECLINES: Final = 80  # one word per GateReason, two lines
    # serving: more counters
    S_DEATHS: Final = 96
    # serving's API server: which slices of time are closed to rollouts
    CLOSED_SHARE: Final = 104  # in parts of CLOSED_UNIT


CLOSED_UNIT = 1_000_000

REASONS = tuple(GateReason)
assert Word.R_DECLINES + len(REASONS) <= 96


def to_ns(time_s: float) -> int:
    """Converts seconds to the page's nanoseconds; NEVER has a value of its own."""
    return NEVER_NS if math.isinf(time_s) and time_s > 0 else max(-NEVER_NS, int(time_s * 1e9))


def to_s(time_ns: int) -> float:
    """Inverse of to_ns."""
    return NEVER if time_ns >= NEVER_NS else time_ns / 1e9


def ring(words: Words, bell: int) -> None:
    """Wakes the process that sleeps on a bell, or that has looked at it and is about to sleep."""
    words.add(bell, 1)
    words.wake(bell)


def set_closed_share(words: Words, share: float) -> None:
    """Shuts rollouts out for a share of the time, 0 to 1, in slices that every process knows."""
    words.store(Word.CLOSED_SHARE, round(share * CLOSED_UNIT))


def closed_slices(words: Words) -> ClosedSlices:
    """Returns the slices of time in which no rollout step may start; none where nobody serves."""
    if words.load(Word.S_IDENTITY) == NOBODY:
        return ClosedSlices(share=0.0)
    return ClosedSlices(share=words.load(Word.CLOSED_SHARE) / CLOSED_UNIT)


def announce_arrival(words: Words) -> None:
    """Says that a serving request has reached a front end.

    This holds the next rollout step back and ends the wait of a hand-over, until ServingSide.absorb_arrival
    is called for the request. Any process of the serving side may call it.
    """
    words.store(Word.ARRIVED, time.monotonic_ns())
    words.add(Word.ARRIVALS, 1)
    ring(words, Word.SERVING_BELL)


def is_arrival_pending(words: Words, now_ns: int) -> bool:
    """Whether an announced request has yet to reach serving's scheduler; False after ARRIVAL_HOLD_S."""
    arrived_ns = words.load(Word.ARRIVED)
    return words.load(Word.S_ABSORBED) < arrived_ns and now_ns - arrived_ns < to_ns(ARRIVAL_HOLD_S)


def check_page(words: Words) -> None:
    """Formats a page of zeros. Raises: BoardError for a page of another layout."""
    if len(words) < NUM_WORDS:
        raise BoardError(f"the board needs {NUM_WORDS} words, the page has {len(words)}")
    words.cas(Word.MAGIC, 0, MAGIC)
    found = words.load(Word.MAGIC)
    if found != MAGIC:
        raise BoardError(
            f"the board page starts with {found:#x}, this version needs {MAGIC:#x}: "
            "both engines and the pool daemon must run the same ROSE version"
        )


def claim_side(words: Words, identity: int, epoch: int, side: str) -> int:
    """Takes a side of the board for this process, from a dead one if need be; returns the new epoch.

    The epoch grows before the caller leaves the state that it found, so that an observer who saw the old
    epoch's process dead can't mistake this one for it. Raises: BoardError while another live process holds
    the side.
    """
    me = own_identity()
    while True:
        holder = words.load(identity)
        if holder not in (NOBODY, me) and is_alive(holder):
            raise BoardError(f"the {side} side of this board is held by pid {pid_of(holder)}")
        if words.cas(identity, holder, me):
            return words.add(epoch, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideSnapshot:
    """One side of the board as an observer sees it."""

    state: EngineState
    pid: int
    alive: bool
    heartbeat_s: float
    busy_s: float
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardSnapshot:
    """The whole board at about one moment; counters run since the page was made."""

    taken_s: float
    serving: SideSnapshot
    rollout: SideSnapshot
    latest_start_s: float
    has_pending_prefill: bool
    rollout_wants: bool
    num_arrivals: int
    num_yields: int
    yield_wait_s: float
    begin_wait_s: float
    num_overruns: int
    num_deaths: int
    rollout_tokens: int
    num_stalls: int
    num_pauses: int
    declines: dict[GateReason, int]

    def busy_shares_since(self, earlier: Self) -> tuple[float, float]:
        """Serving's and rollout's share of the wall time between two snapshots."""
        wall_s = self.taken_s - earlier.taken_s
        if wall_s <= 0:
            return 0.0, 0.0
        return (
            (self.serving.busy_s - earlier.serving.busy_s) / wall_s,
            (self.rollout.busy_s - earlier.rollout.busy_s) / wall_s,
        )


def snapshot(words: Words) -> BoardSnapshot:
    """Reads the whole board without disturbing it."""
    check_page(words)
    now_ns = time.monotonic_ns()
    load = words.load
    return BoardSnapshot(
        taken_s=now_ns / 1e9,
        serving=_side(words, now_ns, Word.S_STATE, Word.S_IDENTITY, Word.S_BUSY),
        rollout=_side(words, now_ns, Word.R_STATE, Word.R_IDENTITY, Word.R_BUSY),
        latest_start_s=to_s(load(Word.S_LATEST_START)),
        has_pending_prefill=bool(load(Word.S_HAS_PENDING)),
        rollout_wants=bool(load(Word.R_WANT)),
        num_arrivals=load(Word.ARRIVALS),
        num_yields=load(Word.S_YIELDS),
        yield_wait_s=load(Word.S_YIELD_WAIT) / 1e9,
        begin_wait_s=load(Word.S_BEGIN_WAIT) / 1e9,
        num_overruns=load(Word.S_OVERRUNS),
        num_deaths=load(Word.S_DEATHS),
        rollout_tokens=load(Word.R_TOKENS),
        num_stalls=load(Word.R_STALLS),
        num_pauses=load(Word.R_PAUSES),
        declines={reason: load(Word.R_DECLINES + i) for i, reason in enumerate(REASONS)},
    )


def _side(words: Words, now_ns: int, state: int, identity: int, busy: int) -> SideSnapshot:
    who = words.load(identity)
    alive = is_alive(who)
    busy_ns, num_steps, started_ns, heartbeat_ns = (words.load(busy + i) for i in range(4))
    if alive and started_ns > 0:
        busy_ns += now_ns - started_ns
    return SideSnapshot(
        state=EngineState(words.load(state)),
        pid=pid_of(who),
        alive=alive,
        heartbeat_s=heartbeat_ns / 1e9,
        busy_s=busy_ns / 1e9,
        num_steps=num_steps,
    )
