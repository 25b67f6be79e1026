"""The serving engine's side of the board: it publishes what it needs, offers grants and claims the GPU.

It writes the serving lines of the page, and never sleeps past a rollout step's predicted end plus the grace.
One thread uses it, the engine core's. rose.admission.board has the protocol.
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
    EngineState,
    Word,
    check_page,
    claim_side,
    closed_slices,
    is_arrival_pending,
    ring,
    set_closed_share,
    to_ns,
)
from rose.admission.gate import ServingView
from rose.admission.liveness import NOBODY, is_alive, pid_of
from rose.admission.slack import NEVER

logger = logging.getLogger(__name__)

# These are plain integers: an IntEnum's members cost more than the atomic store that they go into.
_IDLE, _OPEN = int(EngineState.IDLE), int(EngineState.OPEN)

NO_WORK = ServingView(has_work=False, has_pending_prefill=False, latest_start_s=NEVER)


class StepStart(StrEnum):
    """How serving got the GPU."""

    CLEAR = "clear"
    """No rollout step was running."""
    WAITED = "waited"
    """A rollout step ended while serving waited."""
    OVERRUN = "overrun"
    """A rollout step ran past its predicted end and the grace, so both may run now."""
    ROLLOUT_DIED = "rollout_died"


class ServingSide:
    """The serving process's end of the board, attached when it is made.

    Raises: BoardError if another live process serves on this board.
    """

    def __init__(self, words: Words) -> None:
        check_page(words)
        self._words = words
        self._is_stepping = False
        self._dead_epoch = -1
        self._unanswered_ns = -1
        """When the last grant was offered, if it is unanswered; else -1."""
        claim_side(words, Word.S_IDENTITY, Word.S_EPOCH, "serving")
        words.store(Word.S_STARTED, 0)
        set_closed_share(words, 0.0)  # a predecessor's
        self.publish(NO_WORK)

    def set_max_step(self, max_step_s: float) -> None:
        """Publishes how long a rollout step may take while this engine has no work: a request that comes
        meanwhile waits for its end."""
        self._words.store(Word.S_MAX_STEP, to_ns(max_step_s))

    @property
    def is_stepping(self) -> bool:
        """Whether the GPU is claimed: between begin_step and end_step."""
        return self._is_stepping

    @property
    def is_wanted(self) -> bool:
        """Whether a rollout engine has something to run."""
        words = self._words
        return bool(words.load(Word.R_WANT)) and words.load(Word.R_EPOCH) != self._dead_epoch

    def rollout_paused_s(self) -> float | None:
        """Returns for how long a rollout step has been paused, or None if none is."""
        since_ns = self._words.load(Word.R_PAUSED)
        return (time.monotonic_ns() - since_ns) / 1e9 if since_ns and self.is_wanted else None

    def begin_step(self, *, grace_s: float = GRACE_S) -> StepStart:
        """Claims the GPU and waits, for a bounded time, for a running rollout step to end.

        Idempotent until end_step, so that steps that are in flight together share one claim.
        """
        if self._is_stepping:
            return StepStart.CLEAR
        words = self._words
        words.store(Word.S_STATE, EngineState.RUNNING)
        self._is_stepping = True
        before_ns = time.monotonic_ns()
        outcome = self._await_rollout(grace_s, NEVER_NS)
        now_ns = time.monotonic_ns()
        words.store(Word.S_STARTED, now_ns)
        if outcome is not StepStart.CLEAR:
            words.add(Word.S_BEGIN_WAIT, now_ns - before_ns)
        return outcome

    def end_step(self, view: ServingView, *, num_steps: int = 1) -> None:
        """Releases the GPU and publishes what the next step needs; without a claim it only publishes.

        ``num_steps`` is the number of steps that have ended with it, 0 if the claim went unused.
        """
        words = self._words
        if self._is_stepping:
            started_ns = words.load(Word.S_STARTED)
            words.store(Word.S_STARTED, 0)
            words.add(Word.S_BUSY, time.monotonic_ns() - started_ns)
            self._is_stepping = False
        else:
            num_steps = 0
        self.publish(view, num_steps=num_steps)

    def publish(self, view: ServingView, *, num_steps: int = 0) -> None:
        """Publishes has_work, has_pending_prefill and latest_start_s of serving's next step, at any time.

        A claim on the GPU stays, although ``num_steps`` of its steps have ended. Without one, a request's
        arrival changes IDLE into OPEN here.
        """
        # The state is written last: rollout may act on these words once it no longer reads RUNNING.
        words = self._words
        words.store(Word.S_HAS_PENDING, int(view.has_pending_prefill))
        words.store(Word.S_LATEST_START, to_ns(view.latest_start_s))
        words.store(Word.S_HEARTBEAT, time.monotonic_ns())
        words.add(Word.S_STEPS, num_steps)
        words.add(Word.S_SEQ, 1)
        if self._is_stepping:
            return
        words.store(Word.S_STATE, _OPEN if view.has_work else _IDLE)
        # In OPEN rollout can do nothing until offer_grant rings: waking it would only cost a switch.
        if not view.has_work:
            words.add(Word.ROLLOUT_BELL, 1)
            if words.load(Word.R_WANT):
                words.wake(Word.ROLLOUT_BELL)

    def absorb_arrival(self, arrival_s: float) -> None:
        """Says that the scheduler has a request that was at the front end by ``arrival_s`` (time.monotonic).

        From here on has_work and has_pending_prefill stand for the announcements up to then. Later ones of
        the same burst are still on their way.
        """
        words = self._words
        words.store(Word.S_ABSORBED, max(words.load(Word.S_ABSORBED), to_ns(arrival_s)))

    def offer_grant(self, latest_start_s: float, handover_s: float, *, grace_s: float = GRACE_S) -> float:
        """Lets rollout take one step between two of serving's, if it wants one that can fit.

        Returns the seconds waited. The begin_step that has to follow takes an unused grant back.
        """
        words = self._words
        now_ns = time.monotonic_ns()
        latest_ns = to_ns(latest_start_s)
        is_open = not self._is_stepping and words.load(Word.S_STATE) == EngineState.OPEN
        if not is_open or not self._rollout_can_use_a_grant(now_ns, latest_ns):
            return 0.0
        grant = words.add(Word.S_GRANT, 1)
        ring(words, Word.ROLLOUT_BELL)
        words.add(Word.S_YIELDS, 1)
        is_answered = self._await_grant(grant, min(now_ns + to_ns(handover_s), latest_ns), latest_ns, grace_s)
        self._unanswered_ns = -1 if is_answered else now_ns
        waited_ns = time.monotonic_ns() - now_ns
        words.add(Word.S_YIELD_WAIT, waited_ns)
        return waited_ns / 1e9

    def may_offer(self, at_s: float, latest_start_s: float) -> bool:
        """Whether rollout wants a grant, and could use one that is offered at ``at_s`` (time.monotonic)."""
        return self._rollout_can_use_a_grant(to_ns(at_s), to_ns(latest_start_s))

    def offer_grants(
        self,
        latest_start_s: float,
        handover_s: float,
        *,
        is_called: Callable[[], bool] = lambda: False,
        grace_s: float = GRACE_S,
    ) -> float:
        """Offers grants while rollout uses them and slack is left: a rollout step is often a part of the
        slack.

        Ends on an announced arrival, and when ``is_called`` says that the engine has other work. Returns the
        seconds waited.
        """
        words = self._words
        arrivals = words.load(Word.ARRIVALS)
        waited_s = 0.0
        while not is_called():
            steps = words.load(Word.R_STEPS)
            waited_s += self.offer_grant(latest_start_s, handover_s, grace_s=grace_s)
            if words.load(Word.R_STEPS) == steps or words.load(Word.ARRIVALS) != arrivals:
                break
        return waited_s

    def detach(self) -> None:
        """Leaves the GPU to rollout. The object is of no use afterwards."""
        words = self._words
        words.store(Word.S_STARTED, 0)
        words.store(Word.S_STATE, EngineState.DETACHED)
        words.store(Word.S_IDENTITY, NOBODY)
        ring(words, Word.ROLLOUT_BELL)

    def _rollout_can_use_a_grant(self, now_ns: int, latest_ns: int) -> bool:
        words = self._words
        if (
            not self.is_wanted
            or is_arrival_pending(words, now_ns)
            or closed_slices(words).is_closed(now_ns / 1e9)
        ):
            return False
        # Each offer to a process that is gone or stopped would cost the whole hand-over, step after step.
        if words.load(Word.R_HEARTBEAT) <= self._unanswered_ns:
            return False
        return now_ns + words.load(Word.R_MIN_STEP) <= latest_ns

    def _await_grant(self, grant: int, give_up_ns: int, latest_ns: int, grace_s: float) -> bool:
        """Waits for the answer to a grant; False if the time was over without one."""
        words = self._words
        arrivals = words.load(Word.ARRIVALS)
        while True:
            seen = words.load(Word.SERVING_BELL)
            # grant_used is read first: if it is this grant and the state is then not RUNNING, the step is
            # over.
            is_used = words.load(Word.R_GRANT_USED) == grant
            if words.load(Word.R_STATE) == EngineState.RUNNING:
                self._await_rollout(grace_s, latest_ns)
                return True
            if is_used or words.load(Word.ARRIVALS) != arrivals:
                return True
            now_ns = time.monotonic_ns()
            if now_ns >= give_up_ns:
                return False
            words.wait(Word.SERVING_BELL, seen, (give_up_ns - now_ns) / 1e9)

    def _await_rollout(self, grace_s: float, until_ns: int) -> StepStart:
        """Sleeps while a rollout step runs, at most until `until_ns`, its est_end + grace or 5 s."""
        words = self._words
        start_ns = time.monotonic_ns()
        outcome = StepStart.CLEAR
        while True:
            seen = words.load(Word.SERVING_BELL)
            epoch = words.load(Word.R_EPOCH)
            if words.load(Word.R_STATE) != EngineState.RUNNING or epoch == self._dead_epoch:
                return outcome
            now_ns = time.monotonic_ns()
            if outcome is StepStart.WAITED and self._has_rollout_died(epoch):
                return StepStart.ROLLOUT_DIED
            end_ns = min(words.load(Word.R_EST_END) + to_ns(grace_s), start_ns + to_ns(MAX_STEP_WAIT_S))
            if now_ns >= end_ns:
                return self._overrun(epoch)
            if now_ns >= until_ns:
                return StepStart.WAITED
            outcome = StepStart.WAITED
            sleep_s = min((min(end_ns, until_ns) - now_ns) / 1e9, LIVENESS_SLICE_S)
            words.wait(Word.SERVING_BELL, seen, sleep_s)

    def _has_rollout_died(self, epoch: int) -> bool:
        identity = self._words.load(Word.R_IDENTITY)
        if is_alive(identity):
            return False
        self._dead_epoch = epoch
        self._words.add(Word.S_DEATHS, 1)
        logger.warning("rollout died in a step pid=%d", pid_of(identity))
        return True

    def _overrun(self, epoch: int) -> StepStart:
        if self._has_rollout_died(epoch):
            return StepStart.ROLLOUT_DIED
        self._words.add(Word.S_OVERRUNS, 1)
        return StepStart.OVERRUN
