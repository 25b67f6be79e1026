"""A serving engine's side of the board: it publishes what it needs, offers grants and claims the GPU.

It writes the lines of its slot, and never sleeps past a guest's predicted end plus the grace. One thread uses
it, the engine core's. rose.admission.board has the protocol.
"""

import logging
import time
from collections.abc import Callable
from enum import StrEnum

from rose._shm import Words
from rose.admission.board import (
    GRACE_S,
    LIVENESS_SLICE_S,
    MAX_STEP_WAIT_S,
    NEVER_NS,
    SLOT_WORDS,
    BoardWord,
    absorb_arrival,
    attach,
    closed_slices,
    is_arrival_pending,
    parties,
    ring,
    set_closed_share,
    to_ns,
)
from rose.admission.claim import (
    ServingState,
    change,
    guest_of,
    has_work_beside,
    released,
    state_of,
    with_state,
)
from rose.admission.gate import ServingView
from rose.admission.liveness import NOBODY, is_alive, pid_of
from rose.admission.slack import NEVER
from rose.types import Role

logger = logging.getLogger(__name__)

# These are plain integers: an IntEnum's members cost more than the atomic load that they are compared with.
_IDLE, _OPEN, _GRANTED, _RUNNING = map(int, ServingState)
_CLAIM, _WANT, _PAUSED = BoardWord.CLAIM, BoardWord.R_WANT, BoardWord.R_PAUSED

NO_WORK = ServingView(has_work=False, has_pending_prefill=False, latest_start_s=NEVER)


class StepStart(StrEnum):
    """How serving got the GPU."""

    CLEAR = "clear"
    """No guest was computing."""
    WAITED = "waited"
    """A guest's step ended while serving waited."""
    OVERRUN = "overrun"
    """A guest's step ran past its predicted end and the grace, so both may run now."""
    ROLLOUT_DIED = "rollout_died"
    """The guest died in its step."""


class ServingSide:
    """A serving engine's end of the board. It is attached when it is made.

    Raises: BoardError if as many live processes serve on this board as it has slots for.
    """

    def __init__(self, words: Words) -> None:
        self.slot = attach(words, Role.SERVING)
        """The engine's place on the board."""
        self._at = SLOT_WORDS * self.slot
        self._words = words
        self._load = words.load  # looked up once, because it is called before every step
        self._is_stepping = False
        self._has_pending: bool | None = None  # nothing is published yet
        self._claim = 0
        """The claim as this engine last wrote it."""
        self._unanswered_ns: dict[int, int] = {}
        """The time of the last grant that each guest left unanswered, by the guest's offset."""
        words.store(BoardWord.S_STARTED + self._at, 0)
        set_closed_share(words, 0.0, self.slot)  # a predecessor's
        self.publish(NO_WORK)

    def set_max_step(self, max_step_s: float) -> None:
        """Publishes how long a rollout step may take while this engine has no work. A request that comes
        meanwhile waits for the step's end."""
        self._words.store(BoardWord.S_MAX_STEP + self._at, to_ns(max_step_s))

    @property
    def is_stepping(self) -> bool:
        """Whether the GPU is claimed: between begin_step and end_step."""
        return self._is_stepping

    @property
    def is_wanted(self) -> bool:
        """Whether a guest has something to run."""
        load = self._load
        for at in self._guests:  # noqa: SIM110 a generator costs more than the loads
            if load(_WANT + at):
                return True
        return False

    def rollout_paused_s(self) -> float | None:
        """Returns for how long a guest's step has been paused, or None if none is; of several the longest.

        A guest that left its last grant unanswered does not count.
        """
        load, first_ns = self._load, 0
        for at in self._guests:
            since_ns = load(_PAUSED + at)
            is_first = since_ns and (not first_ns or since_ns < first_ns)
            if is_first and load(_WANT + at) and not self._is_silent(at):
                first_ns = since_ns
        return (time.monotonic_ns() - first_ns) / 1e9 if first_ns else None

    def begin_step(self, *, grace_s: float = GRACE_S) -> StepStart:
        """Claims the GPU and waits, for a bounded time, for a guest's step that has begun to end.

        Idempotent until end_step, so that steps that are in flight together share one claim.
        """
        if self._is_stepping:
            return StepStart.CLEAR
        words = self._words
        self._is_stepping = True
        # From here on no guest takes the GPU.
        seen = self._set_state(_RUNNING)
        outcome, now_ns = StepStart.CLEAR, time.monotonic_ns()
        if guest_of(seen) >= 0:
            before_ns = now_ns
            outcome = self._await_guest(grace_s, NEVER_NS)
            now_ns = time.monotonic_ns()
            words.add(BoardWord.S_BEGIN_WAIT + self._at, now_ns - before_ns)
        words.store(BoardWord.S_STARTED + self._at, now_ns)
        return outcome

    def end_step(self, view: ServingView, *, num_steps: int = 1) -> None:
        """Releases the GPU and publishes what the next step needs; without a claim it only publishes.

        ``num_steps`` is the number of steps that have ended with it, 0 if the claim went unused.
        """
        words = self._words
        if self._is_stepping:
            started_ns = words.load(BoardWord.S_STARTED + self._at)
            words.store(BoardWord.S_STARTED + self._at, 0)
            words.add(BoardWord.S_BUSY + self._at, time.monotonic_ns() - started_ns)
            self._is_stepping = False
        else:
            num_steps = 0
        self.publish(view, num_steps=num_steps)

    def publish(self, view: ServingView, *, num_steps: int = 0) -> None:
        """Publishes has_work, has_pending_prefill and latest_start_s of serving's next step, at any time.

        A claim on the GPU stays, although ``num_steps`` of its steps have ended. Without one, a request's
        arrival changes IDLE into OPEN here.
        """
        # The state is written last: guests may act on these words once the claim lets them.
        words, at = self._words, self._at
        if view.has_pending_prefill != self._has_pending:
            self._has_pending = view.has_pending_prefill
            words.store(BoardWord.S_HAS_PENDING + at, int(view.has_pending_prefill))
        words.store(BoardWord.S_LATEST_START + at, to_ns(view.latest_start_s))
        words.store(BoardWord.S_HEARTBEAT + at, time.monotonic_ns())
        if num_steps:
            words.add(BoardWord.S_STEPS + at, num_steps)
        # A guest that comes later is seen at the next publication.
        self._servings, self._guests = parties(words)
        if self._is_stepping:
            return
        self._set_state(_OPEN if view.has_work else _IDLE)
        # In OPEN, guests can do nothing until offer_grant rings, so waking them would only cost a switch.
        if not view.has_work:
            words.add(BoardWord.GUEST_BELL, 1)
            if self.is_wanted:
                words.wake(BoardWord.GUEST_BELL)

    def _set_state(self, state: int) -> int:
        """Publishes this engine's state; returns the claim that it replaced."""
        words, slot, seen = self._words, self.slot, self._claim
        # Most often nobody has changed it since.
        self._claim = with_state(seen, slot, state)
        if not words.cas(_CLAIM, seen, self._claim):
            seen = change(words, _CLAIM, lambda claim: with_state(claim, slot, state))
            self._claim = with_state(seen, slot, state)
        return seen

    def absorb_arrival(self, arrival_s: float) -> None:
        """Says that the scheduler has a request that was at the front end by ``arrival_s`` (time.monotonic).

        From here on has_work and has_pending_prefill replace the announcements up to then. Later requests of
        the same burst are still on their way.
        """
        absorb_arrival(self._words, arrival_s, self.slot)

    def offer_grant(
        self,
        latest_start_s: float,
        handover_s: float,
        *,
        grace_s: float = GRACE_S,
        to_paused: bool = False,
    ) -> float:
        """Lets a guest take one step between two of serving's, if one wants a step that can fit.

        With ``to_paused`` it waits only for guests whose step is paused, to take the rest of it. Returns
        the seconds waited. The begin_step that has to follow takes an unused grant back.
        """
        words, at = self._words, self._at
        now_ns = time.monotonic_ns()
        latest_ns = to_ns(latest_start_s)
        is_open = not self._is_stepping and state_of(self._claim, self.slot) != _IDLE
        if not is_open or not (guests := self._guests_for_a_grant(now_ns, latest_ns, to_paused)):
            return 0.0
        grant = words.add(BoardWord.GRANTS, 1)
        self._set_state(_GRANTED)
        words.add(BoardWord.S_YIELDS + at, 1)
        ring(words, BoardWord.GUEST_BELL)
        give_up_ns = min(now_ns + to_ns(handover_s), latest_ns)
        for guest in self._await_grant(grant, guests, give_up_ns, latest_ns, grace_s):
            self._unanswered_ns[guest] = now_ns
        waited_ns = time.monotonic_ns() - now_ns
        words.add(BoardWord.S_YIELD_WAIT + at, waited_ns)
        return waited_ns / 1e9

    def may_offer(self, at_s: float, latest_start_s: float, *, to_paused: bool = False) -> bool:
        """Whether a guest wants a grant, and could use one that is offered at ``at_s`` (time.monotonic)."""
        return bool(self._guests_for_a_grant(to_ns(at_s), to_ns(latest_start_s), to_paused))

    def offer_grants(
        self,
        latest_start_s: float,
        handover_s: float,
        *,
        is_called: Callable[[], bool] = lambda: False,
        grace_s: float = GRACE_S,
    ) -> float:
        """Offers grants while guests use them and slack is left, because a step often uses only a part of it.

        Ends on an announced arrival, and when ``is_called`` says that the engine has other work. Returns the
        seconds waited.
        """
        words = self._words
        arrivals = words.load(BoardWord.S_ARRIVALS + self._at)
        waited_s = 0.0
        while not is_called():
            steps = self._num_guest_steps()
            waited_s += self.offer_grant(latest_start_s, handover_s, grace_s=grace_s)
            if self._num_guest_steps() == steps or words.load(BoardWord.S_ARRIVALS + self._at) != arrivals:
                break
        return waited_s

    def detach(self) -> None:
        """Leaves the board, and the GPU to the others. The object can't be used afterwards."""
        words, at = self._words, self._at
        words.store(BoardWord.S_STARTED + at, 0)
        words.store(BoardWord.S_HAS_PENDING + at, 0)
        words.store(BoardWord.S_LATEST_START + at, NEVER_NS)
        words.store(BoardWord.S_MAX_STEP + at, 0)
        self._set_state(_IDLE)
        words.store(BoardWord.S_IDENTITY + at, NOBODY)
        ring(words, BoardWord.GUEST_BELL)

    def _num_guest_steps(self) -> int:
        return sum(self._load(BoardWord.R_STEPS + at) for at in self._guests)

    def _guests_for_a_grant(self, now_ns: int, latest_ns: int, to_paused: bool) -> list[int]:
        """Returns the offsets of the guests that want a grant and can use one that is offered now."""
        words, servings = self._words, self._servings
        guests = [at for at in self._guests if self._can_use_a_grant(at, now_ns, latest_ns)]
        if to_paused:
            guests = [at for at in guests if words.load(_PAUSED + at)]
        if not guests:
            return guests
        claim = self._load(_CLAIM)
        if (
            has_work_beside(claim, self.slot)
            or guest_of(claim) >= 0  # a guest that ran past its time holds the GPU
            or is_arrival_pending(words, servings, now_ns)
            or closed_slices(words, servings).is_closed(now_ns / 1e9)
        ):
            return []
        return guests

    def _can_use_a_grant(self, guest: int, now_ns: int, latest_ns: int) -> bool:
        load = self._load
        if not load(_WANT + guest):
            return False
        # Offers to a process that is gone or stopped would cost the whole hand-over at every step.
        if self._is_silent(guest):
            return False
        return now_ns + load(BoardWord.R_MIN_STEP + guest) <= latest_ns

    def _is_silent(self, guest: int) -> bool:
        """Whether a guest left a grant unanswered and has not been seen since the grant was offered."""
        return self._load(BoardWord.R_HEARTBEAT + guest) <= self._unanswered_ns.get(guest, -1)

    def _await_grant(
        self, grant: int, guests: list[int], give_up_ns: int, latest_ns: int, grace_s: float
    ) -> list[int]:
        """Waits until a grant is used or can no longer be used; returns the guests that gave no answer in the
        whole time."""
        words = self._words
        arrivals = words.load(BoardWord.S_ARRIVALS + self._at)
        while True:
            seen = words.load(BoardWord.SERVING_BELL)
            claim = words.load(_CLAIM)
            if guest_of(claim) >= 0:
                self._await_guest(grace_s, latest_ns)
                return []
            # If the state is no longer GRANTED, the step is over.
            is_over = state_of(claim, self.slot) != _GRANTED or has_work_beside(claim, self.slot)
            silent = [at for at in guests if self._owes_an_answer(at, grant)]
            if is_over or not silent or words.load(BoardWord.S_ARRIVALS + self._at) != arrivals:
                return []
            now_ns = time.monotonic_ns()
            if now_ns >= give_up_ns:
                return silent
            words.wait(BoardWord.SERVING_BELL, seen, (give_up_ns - now_ns) / 1e9)

    def _owes_an_answer(self, guest: int, grant: int) -> bool:
        words = self._words
        return bool(words.load(BoardWord.R_WANT + guest)) and words.load(BoardWord.R_ANSWERED + guest) < grant

    def _await_guest(self, grace_s: float, until_ns: int) -> StepStart:
        """Sleeps while a guest computes, at most until `until_ns`, its est_end + grace or 5 s."""
        words = self._words
        start_ns = time.monotonic_ns()
        outcome = StepStart.CLEAR
        while True:
            seen = words.load(BoardWord.SERVING_BELL)
            claim = words.load(_CLAIM)
            if guest_of(claim) < 0:
                return outcome
            guest = SLOT_WORDS * guest_of(claim)
            now_ns = time.monotonic_ns()
            if outcome is StepStart.WAITED and self._has_died(claim):
                return StepStart.ROLLOUT_DIED
            end_ns = min(
                words.load(BoardWord.R_EST_END + guest) + to_ns(grace_s), start_ns + to_ns(MAX_STEP_WAIT_S)
            )
            if now_ns >= end_ns:
                return self._overrun(claim)
            if now_ns >= until_ns:
                return StepStart.WAITED
            outcome = StepStart.WAITED
            sleep_s = min((min(end_ns, until_ns) - now_ns) / 1e9, LIVENESS_SLICE_S)
            words.wait(BoardWord.SERVING_BELL, seen, sleep_s)

    def _has_died(self, claim: int) -> bool:
        """Whether the guest that has the claim is dead. Takes the claim from a dead guest."""
        words, guest = self._words, guest_of(claim)
        identity = words.load(BoardWord.R_IDENTITY + SLOT_WORDS * guest)
        if is_alive(identity):
            return False
        # No other guest can have taken it since, because this engine's own state prevents that.
        if guest_of(change(words, _CLAIM, lambda claim: released(claim, guest))) == guest:
            words.store(BoardWord.R_WANT + SLOT_WORDS * guest, 0)
            words.add(BoardWord.S_DEATHS + self._at, 1)
            logger.warning("guest died in a step slot=%d pid=%d", guest, pid_of(identity))
        return True

    def _overrun(self, claim: int) -> StepStart:
        if self._has_died(claim):
            return StepStart.ROLLOUT_DIED
        self._words.add(BoardWord.S_OVERRUNS + self._at, 1)
        return StepStart.OVERRUN
