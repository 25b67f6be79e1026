"""The board: one shared page on which the engines of one GPU, and its training guests, share its time.

This module has the layout and the protocol between up to MAX_SERVING `ServingSide`s and MAX_GUESTS
`RolloutSide`s (rollout engines, and trainers that compute as guests), each in a process of its own. Guests
exclude each other and give way to serving. Every wait is bounded, and the death of a process never keeps
serving from running. The gate decides how much slack there is, and who may use it.

All words are int64 with sequentially consistent access. Times are CLOCK_MONOTONIC nanoseconds. Each cache
line (8 words) has one process that writes it. The exceptions are the shared lines, and arrivals, which grow
by atomic adds.

Taking the GPU: the claim decides, and claim.py has it and its changes
    serving.begin_step:  state := RUNNING; then, while a guest has the word, sleep on the serving bell.
    guest.try_begin:     take the word if it has not changed since view(): the change fails if any engine has
                         published, or another guest has stepped, since then.
A guest that took the word has begun its step, so each serving engine waits for one step at most.

Giving the GPU back in the middle of a guest's step
    guest.pause:         R_PAUSED := now, give the word back, ring; between two layers, when serving has work
                         or a request is announced.
    guest.try_resume:    as try_begin, for the rest of the step; then R_PAUSED := 0.
    A paused rollout engine can do nothing else, not even give memory back. So serving offers it a grant for
    the rest of the step if serving needs that memory, or if the pause has lasted for as long as a request may
    stall. While several serving engines have work, none of them offers a grant, and after MAX_PAUSE_S the
    rest runs beside them.

One guest's step between two serving steps
    serving.offer_grant: OPEN := GRANTED, number the offer, ring; wait until a guest has taken it and ended
                         its step, or each guest that could use it has answered. Nothing is offered while
                         another serving engine has work.
    guest:               try_begin uses the grant up. decline() answers without a step, so that serving does
                         not wait for the whole hand-over.
    serving.offer_grants repeats this while guests step and slack is left.
    The wait also ends when the hand-over time passes before a step has begun, on an arrival that is announced
    before a step has begun, and at the latest start. The begin_step that follows takes an unused grant back.

Turns among guests
    Among the guests that wait for the GPU, the one whose last step ended longest ago goes first, so each
    other guest overtakes it once at most. WAITS shows that a guest waits. A guest leaves the GPU to an
    earlier one for GIVE_WAY_S at most. A dead or stopped guest costs the others that time until its WAITS is
    old. A guest that has declined a grant does not wait for it, and rings for the next.

Bounds and deaths
    Serving waits for a guest's step until est_end + grace, and never longer. Meanwhile it looks at the
    process every LIVENESS_SLICE_S, and goes on at once if the process is dead. A guest that leaves a grant
    unanswered (it died, was stopped, or hangs between two steps) gets no other offer until its heartbeat is
    newer than the grant, and its paused step does not count. Guests never sleep longer than MAX_GRANT_WAIT_S
    per call. They take the word from a guest that has died, and from one that has kept it for MAX_STEP_WAIT_S
    after its est_end. Once a serving process has died, in any state, view().alive is False, and no guest
    starts until a process takes its place. Meanwhile guests answer the other engines' grants at once. A
    serving process that has detached leaves the GPU free.
"""

import time
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import Final

from rose._shm import Words
from rose.admission.claim import MAX_GUESTS, MAX_SERVING, change
from rose.admission.gate import GateReason
from rose.admission.liveness import NOBODY, is_alive, own_identity, pid_of
from rose.admission.slack import NEVER
from rose.admission.slices import ClosedSlices
from rose.errors import BoardError
from rose.types import MAX_ENGINES, Role

LAYOUT_VERSION = 6
MAGIC = 0x524F5345_0000 | LAYOUT_VERSION

NEVER_NS = 2**62

# How long past a step's predicted (99th percentile) end serving waits: a busy host schedules late.
GRACE_S = 0.1
LIVENESS_SLICE_S = 0.01
# Serving waits no longer than this, however wrong a prediction is.
MAX_STEP_WAIT_S = 5.0
# The longest sleep in a rollout engine's schedule(), which must handle aborts and new requests.
MAX_GRANT_WAIT_S = 0.02
# How long an arrival that the front end announced keeps the GPU for serving. It covers tokenizing and
# queueing; a request that is rejected on the way must not hold rollouts off for longer.
ARRIVAL_HOLD_NS = 50_000_000
# How long a guest leaves a free GPU to a guest that has waited longer, and how old that guest's WAITS may be.
# A guest that sleeps for its turn looks every MAX_GRANT_WAIT_S.
GIVE_WAY_S = 0.002
WAITS_FOR_S = 0.05


class BoardWord:
    """The index of each word, in cache lines of 8; comments name the writer.

    S_ and R_ words are those of serving slot 0 and guest slot 0; a later slot's are SLOT_WORDS further each.
    These are plain integers: an IntEnum's members cost three times the atomic load that they index.
    """

    MAGIC: Final = 0
    # anyone: see claim.py
    CLAIM: Final = 8
    # anyone, atomic adds: futex words
    SERVING_BELL: Final = 16
    GUEST_BELL: Final = 24
    # anyone, atomic adds
    GRANTS: Final = 32
    EVICTIONS: Final = 33
    SLOTS: Final = 34  # how many slots were ever used: serving's in bits 0-3, guests' above
    R_DECLINES: Final = 40  # one word per GateReason, two lines
    # serving, in its slot
    S_HAS_PENDING: Final = 56
    S_LATEST_START: Final = 57
    S_ABSORBED: Final = 58
    S_MAX_STEP: Final = 59  # 0: nobody serves
    S_DEATHS: Final = 60
    # serving, at attach
    S_IDENTITY: Final = 64
    # serving's API servers; arrivals by atomic adds
    S_CLOSED_SHARE: Final = 65  # in parts of CLOSED_UNIT: which slices of time are closed to guests
    S_ARRIVALS: Final = 66
    S_ARRIVED: Final = 67
    # serving: counters since the page was made; the first four as in R_BUSY's line
    S_BUSY: Final = 72
    S_STEPS: Final = 73
    S_STARTED: Final = 74  # 0 between steps
    S_HEARTBEAT: Final = 75
    S_YIELDS: Final = 76
    S_YIELD_WAIT: Final = 77
    S_BEGIN_WAIT: Final = 78
    S_OVERRUNS: Final = 79
    # a guest, in its slot
    R_WANT: Final = 152
    R_EST_END: Final = 153
    R_ANSWERED: Final = 154  # the last offer that it declined
    R_MIN_STEP: Final = 155
    R_WAITS: Final = 156  # when it looked last for its turn; 0 if it does not wait
    R_LAST_END: Final = 157
    R_PAUSED: Final = 158  # since when a step is paused; 0 if none is
    # a guest, at attach
    R_IDENTITY: Final = 160
    # a guest: counters
    R_BUSY: Final = 168
    R_STEPS: Final = 169
    R_STARTED: Final = 170
    R_HEARTBEAT: Final = 171
    R_TOKENS: Final = 172
    R_STALLS: Final = 173
    R_PAUSES: Final = 174


SLOT_WORDS = 24
NUM_WORDS = 152 + MAX_GUESTS * SLOT_WORDS
assert BoardWord.S_HAS_PENDING + MAX_SERVING * SLOT_WORDS == BoardWord.R_WANT

_ARRIVED, _CLOSED_SHARE = BoardWord.S_ARRIVED, BoardWord.S_CLOSED_SHARE

CLOSED_UNIT = 1_000_000

REASONS = tuple(GateReason)
assert BoardWord.R_DECLINES + len(REASONS) <= BoardWord.S_HAS_PENDING


_GUESTS_SHIFT = 4
assert MAX_SERVING < 1 << _GUESTS_SHIFT


def to_ns(time_s: float) -> int:
    """Converts seconds to the page's nanoseconds. NEVER becomes NEVER_NS."""
    return NEVER_NS if time_s == NEVER else max(-NEVER_NS, int(time_s * 1e9))


def to_s(time_ns: int) -> float:
    """Converts the page's nanoseconds to seconds."""
    return NEVER if time_ns >= NEVER_NS else time_ns / 1e9


def ring(words: Words, bell: int) -> None:
    """Wakes the process that sleeps on a bell, or that has looked at it and is about to sleep."""
    words.add(bell, 1)
    words.wake(bell)


def _offsets(used: int) -> tuple[int, ...]:
    return tuple(SLOT_WORDS * slot for slot in range(used))


_PARTIES = [
    (_offsets(slots % (1 << _GUESTS_SHIFT)), _offsets(slots >> _GUESTS_SHIFT))
    for slots in range(MAX_GUESTS + 1 << _GUESTS_SHIFT)
]


def parties(words: Words) -> tuple[Sequence[int], Sequence[int]]:
    """Returns what to add to the S_ words for each serving slot that has been used, and to the R_ words for
    each guest slot."""
    return _PARTIES[words.load(BoardWord.SLOTS)]


def _with_slot(slots: int, role: Role, slot: int) -> int:
    """Returns the SLOTS word after a slot has been used."""
    servings, guests = slots % (1 << _GUESTS_SHIFT), slots >> _GUESTS_SHIFT
    if role is Role.SERVING:
        return guests << _GUESTS_SHIFT | max(servings, slot + 1)
    return max(guests, slot + 1) << _GUESTS_SHIFT | servings


def set_closed_share(words: Words, share: float, slot: int = 0) -> None:
    """Shuts guests out for a share of the time, 0 to 1, in slices that every process knows, for the serving
    engine in ``slot``."""
    words.store(BoardWord.S_CLOSED_SHARE + SLOT_WORDS * slot, round(share * CLOSED_UNIT))


def closed_slices(words: Words, servings: Iterable[int] | None = None) -> ClosedSlices:
    """Returns the slices of time in which no guest's step may start: those of the serving engine that closes
    the most slices, which contain the others'. There are none if nobody serves.

    ``servings`` are the offsets of the slots, if the caller has them.
    """
    load, most = words.load, 0
    for at in parties(words)[0] if servings is None else servings:
        closed = load(_CLOSED_SHARE + at)
        if closed > most and load(BoardWord.S_IDENTITY + at) != NOBODY:
            most = closed
    return _slices(most)


@lru_cache(maxsize=16)
def _slices(closed: int) -> ClosedSlices:
    return ClosedSlices(share=closed / CLOSED_UNIT)


def announce_arrival(words: Words, slot: int = 0) -> None:
    """Says that a request has reached a front end of the serving engine in ``slot``.

    This holds the next guest's step back and ends the wait of a hand-over, until ServingSide.absorb_arrival
    is called for the request. Any process of the serving engine may call it.
    """
    at = SLOT_WORDS * slot
    words.store(BoardWord.S_ARRIVED + at, time.monotonic_ns())
    words.add(BoardWord.S_ARRIVALS + at, 1)
    ring(words, BoardWord.SERVING_BELL)


def absorb_arrival(words: Words, arrival_s: float, slot: int = 0) -> None:
    """Ends the announcements of all requests that were at the front end of the serving engine in ``slot`` by
    ``arrival_s`` (time.monotonic), because its scheduler or another engine core has them."""
    absorbed = BoardWord.S_ABSORBED + SLOT_WORDS * slot
    words.store(absorbed, max(words.load(absorbed), to_ns(arrival_s)))


def is_arrival_pending(words: Words, servings: Iterable[int], now_ns: int) -> bool:
    """Whether a request announced to one of ``servings`` (offsets) has yet to reach its scheduler;
    False after ARRIVAL_HOLD_NS."""
    load = words.load
    for at in servings:
        arrived_ns = load(_ARRIVED + at)
        if now_ns - arrived_ns < ARRIVAL_HOLD_NS and load(BoardWord.S_ABSORBED + at) < arrived_ns:
            return True
    return False


def check_page(words: Words) -> None:
    """Formats a page of zeros. Raises: BoardError for a page of another layout."""
    if len(words) < NUM_WORDS:
        raise BoardError(f"the board needs {NUM_WORDS} words, and the page has {len(words)}")
    words.cas(BoardWord.MAGIC, 0, MAGIC)
    found = words.load(BoardWord.MAGIC)
    if found != MAGIC:
        raise BoardError(
            f"the board page starts with {found:#x}, and this version needs {MAGIC:#x}; "
            "both engines and the pool daemon must run the same ROSE version"
        )


def attach(words: Words, role: Role) -> int:
    """Takes a slot of the board for this process and returns it: its own, a dead process's, or a free one.

    A dead process's slot goes first, because its successor tells the others that nothing of it is left on the
    GPU.
    Raises: BoardError if every slot of the role is held by a live process.
    """
    check_page(words)
    identity = BoardWord.S_IDENTITY if role is Role.SERVING else BoardWord.R_IDENTITY
    most = MAX_ENGINES[role]
    me = own_identity()
    while True:
        holders = {slot: words.load(identity + SLOT_WORDS * slot) for slot in range(most)}
        dead = [slot for slot, one in holders.items() if one not in (NOBODY, me) and not is_alive(one)]
        own, free = ([slot for slot, one in holders.items() if one == each] for each in (me, NOBODY))
        if not (candidates := own + dead + free):
            pids = ", ".join(str(pid_of(one)) for one in holders.values())
            raise BoardError(
                f"all {most} {role} slots of this GPU's board are held, by pids {pids}; stop one"
            )
        slot = candidates[0]
        # The slot is counted first, so that nobody overlooks one that is held.
        change(words, BoardWord.SLOTS, partial(_with_slot, role=role, slot=slot))
        if words.cas(identity + SLOT_WORDS * slot, holders[slot], me):
            return slot
