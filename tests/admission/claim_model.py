"""Two serving engines and two guests on one claim: every state that they can reach, in every order of steps.

The word's changes are those of rose.admission.claim. One action is one access to the word, and an action may
come at any time after the last, so a process that is stopped anywhere is one whose next action comes late.
Times are left out: a guest that has overrun its time is marked as HUNG instead.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto

from rose.admission import claim as rules
from rose.admission.claim import ServingState

NUM = 2
WORD = 0xFFFF
"""The word without its count. Views are kept as current or not, and no word comes back."""


class At(Enum):
    """Where a process is."""

    # serving
    IDLE = auto()
    OPEN = auto()
    OFFERING = auto()  # it has looked, and is about to grant
    GRANTED = auto()
    CLAIMING = auto()
    STEP = auto()
    # guests
    OUT = auto()
    WAITS = auto()
    DECIDED = auto()
    COMPUTES = auto()
    # both
    DEAD = auto()


@dataclass(frozen=True, slots=True)
class Guest:
    at: At = At.OUT
    is_hung: bool = False
    has_current_view: bool = False
    passed: int = 0
    """How often the other has stepped since this one began to wait, or hung last."""


@dataclass(frozen=True, slots=True)
class State:
    claim: int = 0
    servings: tuple[At, ...] = (At.IDLE,) * NUM
    guests: tuple[Guest, ...] = (Guest(),) * NUM
    next_guest: int = 0
    """Whose last step ended longest ago."""


Action = tuple[str, State]


class Model:
    """The protocol. Tests replace a rule to see that a fault is found."""

    def released(self, claim: int, guest: int) -> int:
        return rules.released(claim, guest)

    def must_wait(self, state: State) -> bool:
        """Whether a serving engine that has claimed the GPU has to wait for a guest."""
        guest = rules.guest_of(state.claim)
        return guest >= 0 and not is_given_up(state, guest)

    def may_take(self, state: State, guest: Guest) -> bool:
        """Whether a guest that has decided gets the GPU."""
        return guest.has_current_view and rules.is_open(state.claim)

    def actions(self, state: State) -> Iterator[Action]:
        for slot in range(NUM):
            for name, after in (*self._serving(state, slot), *self._guest(state, slot)):
                yield f"{name} {slot}", after

    def _serving(self, state: State, slot: int) -> Iterator[Action]:
        at = state.servings[slot]
        if at is At.DEAD:
            yield "serving attaches", self._publish(state, slot, ServingState.IDLE, At.IDLE)
            return
        yield "serving dies", moved(state, slot, At.DEAD)
        if at in (At.IDLE, At.OPEN, At.GRANTED):
            yield "serving claims", self._publish(state, slot, ServingState.RUNNING, At.CLAIMING)
        if at in (At.IDLE, At.OPEN, At.GRANTED, At.STEP):
            yield "serving has work", self._publish(state, slot, ServingState.OPEN, At.OPEN)
            yield "serving has none", self._publish(state, slot, ServingState.IDLE, At.IDLE)
        if at is At.OPEN and not rules.has_work_beside(state.claim, slot) and rules.guest_of(state.claim) < 0:
            yield "serving looks", moved(state, slot, At.OFFERING)
        if at is At.OFFERING:
            yield "serving grants", self._publish(state, slot, ServingState.GRANTED, At.GRANTED)
        if at is At.CLAIMING and not self.must_wait(state):
            guest = rules.guest_of(state.claim)
            claim = state.claim
            if guest >= 0 and state.guests[guest].at is At.DEAD:
                claim = self.released(claim, guest)
            yield "serving steps", moved(changed(state, claim), slot, At.STEP)

    def _publish(self, state: State, slot: int, published: ServingState, at: At) -> State:
        return moved(changed(state, rules.with_state(state.claim, slot, published)), slot, at)

    def _guest(self, state: State, slot: int) -> Iterator[Action]:
        guest = state.guests[slot]
        if guest.at is At.DEAD:
            claim = self.released(state.claim, slot)
            after = replace(changed(state, claim), next_guest=1 - slot)
            yield "guest attaches", with_guest(after, slot, Guest())
            return
        yield "guest dies", with_guest(state, slot, Guest(At.DEAD))
        if guest.at is not At.OUT and not guest.is_hung:
            yield "guest hangs", with_guest(state, slot, replace(guest, is_hung=True, passed=0))
        alive = replace(guest, is_hung=False)
        match guest.at:
            case At.OUT:
                yield "guest wants", with_guest(state, slot, Guest(At.WAITS))
            case At.WAITS:
                if rules.is_open(state.claim) and is_next(state, slot):
                    decided = replace(alive, at=At.DECIDED, has_current_view=True)
                    yield "guest decides", with_guest(state, slot, decided)
                other = rules.guest_of(state.claim)
                if other >= 0 and is_given_up(state, other):
                    after = changed(state, self.released(state.claim, other))
                    yield "guest evicts", with_guest(after, slot, replace(alive, has_current_view=False))
            case At.DECIDED:
                yield "guest declines", with_guest(state, slot, Guest(At.WAITS))
                yield "guest takes", self._take(state, slot, alive)
            case At.COMPUTES:
                after = changed(state, self.released(state.claim, slot))
                after = replace(after, next_guest=1 - slot)
                yield "guest ends", with_guest(after, slot, Guest())
                yield "guest pauses", with_guest(after, slot, Guest(At.WAITS))

    def _take(self, state: State, slot: int, alive: Guest) -> State:
        if not self.may_take(state, alive):
            return with_guest(state, slot, replace(alive, at=At.WAITS, has_current_view=False))
        after = changed(state, rules.taken(state.claim, slot))
        other = after.guests[1 - slot]
        if other.at in (At.WAITS, At.DECIDED) and not other.is_hung:
            after = with_guest(after, 1 - slot, replace(other, passed=other.passed + 1))
        return with_guest(after, slot, Guest(At.COMPUTES))


def moved(state: State, slot: int, at: At) -> State:
    servings = list(state.servings)
    servings[slot] = at
    return replace(state, servings=tuple(servings))


def with_guest(state: State, slot: int, guest: Guest) -> State:
    guests = list(state.guests)
    guests[slot] = guest
    return replace(state, guests=tuple(guests))


def changed(state: State, claim: int) -> State:
    """The state after the word has changed, so that no view is current any more."""
    if claim == state.claim:
        return state
    guests = tuple(replace(guest, has_current_view=False) for guest in state.guests)
    return replace(state, claim=claim & WORD, guests=guests)


def is_given_up(state: State, slot: int) -> bool:
    return state.guests[slot].at is At.DEAD or state.guests[slot].is_hung


def is_next(state: State, slot: int) -> bool:
    """Whether a guest need not leave the GPU to the other, or has done so for long enough."""
    other = state.guests[1 - slot]
    return other.at not in (At.WAITS, At.DECIDED) or other.is_hung or state.next_guest == slot


def fault_of(before: State, name: str, state: State) -> str | None:
    """Says what is wrong with a state that an action has led to; None if nothing is."""
    computing = [slot for slot, one in enumerate(state.guests) if one.at is At.COMPUTES and not one.is_hung]
    if computing and At.STEP in state.servings:
        return "a serving engine and a guest compute at once"
    if len(computing) > 1:
        return "two guests compute at once"
    took = name.startswith("guest takes ") and state.claim != before.claim
    if took and any(at in (At.CLAIMING, At.STEP) for at in before.servings):
        return "a guest began while a serving engine waited"
    left = rules.released(state.claim, rules.guest_of(state.claim))
    if took and rules.has_work(left) and rules.is_open(left):
        return "a grant was not used up"
    if any(guest.passed > 1 for guest in state.guests):
        return "a guest was passed twice"
    return None


def explore(model: Model) -> tuple[dict[State, list[State]], str | None]:
    """Returns every state with those that processes reach from it without a death, and the first fault."""
    start = State()
    found: dict[State, list[State]] = {start: []}
    queue = [start]
    while queue:
        state = queue.pop()
        for name, after in model.actions(state):
            if (fault := fault_of(state, name, after)) is not None:
                return found, f"{fault}: {name} in {state}"
            if "dies" not in name and "hangs" not in name:
                found[state].append(after)
            if after not in found:
                found[after] = []
                queue.append(after)
    return found, None
