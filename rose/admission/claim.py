"""The claim: one shared word that says who may compute on a GPU, and how it changes.

Every change is one compare-and-swap, so all claims have one order, whichever process dies or is stopped in
between. This module is pure: board.py has the page, and serving_side.py and rollout_side.py make the changes.
Their tests walk through every interleaving of these functions.

    bits 0-7    the state of each serving engine, two bits each      bits 8-15  the guest that computes, + 1
    bits 16-62  a count that grows with each publication and each guest's step, so that no value comes back
                (for 44 years at 100,000 changes a second)

Serving engines:  IDLE --> RUNNING --> IDLE or OPEN;  OPEN <--> GRANTED;  GRANTED --> RUNNING
    IDLE: it has no work, or no engine is there.  OPEN: it has work and is between two steps.  GRANTED: it
    lends its time until its next step to one guest's step.  RUNNING: it steps, or waits for a guest's step to
    end. Each engine changes only its own state, whatever the others do: it gives way to nobody. Serving
    engines don't exclude each other.
Guests (rollout engines, and trainers):  a guest takes the word if no engine is OPEN or RUNNING and no other
    guest has it; the same change turns each GRANTED into OPEN, so a grant is for one step. It then computes,
    and gives the word back.
"""

from collections.abc import Callable
from enum import IntEnum

from rose._shm import Words
from rose.types import MAX_ENGINES, Role

MAX_SERVING, MAX_GUESTS = MAX_ENGINES[Role.SERVING], MAX_ENGINES[Role.ROLLOUT]

_STATE_BITS = 2
_STATES = (1 << _STATE_BITS * MAX_SERVING) - 1
# The lower bit of each state; it is set in OPEN and RUNNING, in which guests must not start.
_SHUT = _STATES // 3
_GUEST_SHIFT = 8
assert _STATES >> _GUEST_SHIFT == 0
_GUEST = 0xFF << _GUEST_SHIFT
_CHANGE = 1 << 16


class ServingState(IntEnum):
    """What one serving engine does now. The word holds these values."""

    IDLE = 0b00
    OPEN = 0b01
    GRANTED = 0b10
    RUNNING = 0b11


def state_of(claim: int, slot: int) -> int:
    """Returns a serving engine's ServingState, as a plain integer."""
    return claim >> _STATE_BITS * slot & 0b11


def with_state(claim: int, slot: int, state: int) -> int:
    """Returns the word after a serving engine has published ``state``."""
    shift = _STATE_BITS * slot
    return (claim & ~(0b11 << shift) | state << shift) + _CHANGE


def has_work(claim: int) -> bool:
    """Whether any serving engine has work."""
    return claim & _STATES != 0


def has_work_beside(claim: int, slot: int) -> bool:
    """Whether a serving engine other than the one in ``slot`` has work."""
    return claim & _STATES & ~(0b11 << _STATE_BITS * slot) != 0


def has_gpu(claim: int, guest: int) -> bool:
    """Whether a guest has the word and may go on: no serving engine is RUNNING or OPEN. OPEN calls the guest
    back."""
    return claim & (_SHUT | _GUEST) == guest + 1 << _GUEST_SHIFT


def is_open(claim: int) -> bool:
    """Whether a guest may take the word: no guest has it, and no serving engine is OPEN or RUNNING."""
    return claim & (_SHUT | _GUEST) == 0


def guest_of(claim: int) -> int:
    """Returns the slot of the guest that computes; -1 if none does."""
    return (claim >> _GUEST_SHIFT & 0xFF) - 1


def taken(claim: int, guest: int) -> int:
    """Returns the word after a guest has taken it for one step. That uses up the grants."""
    states = claim & _STATES
    granted = states & ~_SHUT & ~((states & _SHUT) << 1)
    return (claim & ~_GUEST | guest + 1 << _GUEST_SHIFT) - (granted >> 1) + _CHANGE


def released(claim: int, guest: int) -> int:
    """Returns the word after a guest has given it back, or the same word if the guest no longer has it."""
    return claim & ~_GUEST if guest_of(claim) == guest else claim


def change(words: Words, index: int, to: Callable[[int], int]) -> int:
    """Replaces the word at ``index`` by ``to(word)``; returns the word that it replaced."""
    while True:
        seen = words.load(index)
        new = to(seen)
        if new == seen or words.cas(index, seen, new):
            return seen
