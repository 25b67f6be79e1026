"""The rollout engine's hand on the board: want, look, try, end.

Owns the rollout lines of the page. Promises to start no step while serving claims the GPU or died with
work in hand, and never to sleep longer than MAX_TURN_WAIT_S. Used by one thread, the engine core's; the
protocol is in rose.admission.board.
"""

import logging
import time

from rose._shm import Words
from rose.admission.board import (
    MAX_TURN_WAIT_S,
    NEVER_NS,
    REASONS,
    Phase,
    Word,
    check_page,
    claim_side,
    is_arrival_pending,
    ring,
    to_ns,
    to_s,
)
from rose.admission.gate import GateReason, ServingView
from rose.admission.liveness import NOBODY, is_alive, pid_of

logger = logging.getLogger(__name__)

# A process check costs up to 100 us and a dead serving engine's phase stays closed anyway. Between a turn and
# the step that uses it there is no time for one, unless there was no wait in which it could be done.
LIVENESS_INTERVAL_NS = 100_000_000
MAX_LIVENESS_AGE_NS = 300_000_000
# Plain integers: an IntEnum's members cost more than the atomic load they are compared with.
_OPEN, _RUNNING = int(Phase.OPEN), int(Phase.RUNNING)
_S_PHASE, _S_TURN = Word.S_PHASE, Word.S_TURN
_DECLINE_WORD = {reason: Word.R_DECLINES + i for i, reason in enumerate(REASONS)}


class RolloutSide:
    """The rollout process's end of the board.

    Attached at construction. Raises BoardError if another live process holds the rollout side.
    """

    def __init__(self, words: Words) -> None:
        check_page(words)
        self._words = words
        self._load = words.load  # looked up once: it is called before every step, and while waiting for one
        self._serving_alive = True
        self._checked_ns = -MAX_LIVENESS_AGE_NS
        self._last_loss = NOBODY
        claim_side(words, Word.R_IDENTITY, Word.R_EPOCH, "rollout")
        words.store(Word.R_WANT, 0)
        words.store(Word.R_STARTED, 0)
        words.store(Word.R_HEARTBEAT, time.monotonic_ns())
        self._use_turn(words.load(Word.S_TURN))
        words.store(Word.R_PHASE, Phase.IDLE)
        ring(words, Word.SERVING_BELL)

    def set_want(self, wants: bool, min_step_s: float = 0.0) -> None:
        """Says whether this engine has anything to run, and the shortest step it could use: serving
        offers no turn that leaves less."""
        self._words.store(Word.R_MIN_STEP, to_ns(min_step_s))
        self._words.store(Word.R_WANT, int(wants))

    def view(self) -> ServingView:
        """What serving last published, for the gate."""
        words = self._words
        now_ns = time.monotonic_ns()
        # seq first: words read after it may only be newer, and try_begin then refuses.
        seq = words.load(Word.S_SEQ)
        turn = words.load(Word.S_TURN)
        phase = words.load(Word.S_PHASE)
        is_announced = is_arrival_pending(words, now_ns)
        is_open = turn != self._turn_used if phase == _OPEN else phase != _RUNNING
        return ServingView(
            has_work=phase in (_OPEN, _RUNNING),
            has_pending_prefill=is_announced or bool(words.load(Word.S_HAS_PENDING)),
            latest_start_s=to_s(words.load(Word.S_LATEST_START)),
            max_step_s=to_s(words.load(Word.S_MAX_STEP) or NEVER_NS),
            alive=self._check_serving(now_ns, MAX_LIVENESS_AGE_NS),
            may_start=not is_announced and is_open,
            seq=seq,
            turn=turn,
        )

    def try_begin(self, est_end_s: float, view: ServingView) -> bool:
        """Takes the GPU for one step that ends by `est_end_s` (time.monotonic, error included), decided
        on `view`. False: serving was faster or has published since; decide anew."""
        words = self._words
        words.store(Word.R_EST_END, to_ns(est_end_s))
        words.store(Word.R_PHASE, Phase.RUNNING)
        if not self._is_open() or words.load(Word.S_SEQ) != view.seq:
            words.store(Word.R_PHASE, Phase.IDLE)
            ring(words, Word.SERVING_BELL)
            return False
        self._use_turn(words.load(Word.S_TURN))
        words.store(Word.R_STARTED, time.monotonic_ns())
        return True

    def end_step(self, num_tokens: int) -> None:
        """Hands the GPU back after the step drained; `num_tokens`: rollout tokens it made or prefilled.

        A step of none is not counted, and so ends serving's offers until its next step.
        """
        words = self._words
        now_ns = time.monotonic_ns()
        started_ns = words.load(Word.R_STARTED)
        assert started_ns > 0, "end_step without try_begin"
        words.store(Word.R_STARTED, 0)
        # Before the phase: serving, once woken, sees from it that its turn was used for a step.
        if num_tokens > 0:
            words.add(Word.R_STEPS, 1)
        words.store(Word.R_PHASE, Phase.IDLE)
        ring(words, Word.SERVING_BELL)
        words.add(Word.R_BUSY, now_ns - started_ns)
        words.add(Word.R_TOKENS, num_tokens)
        words.store(Word.R_HEARTBEAT, now_ns)

    def decline(self, view: ServingView, reason: GateReason) -> None:
        """Counts a refusal and answers a granted turn, so that serving stops waiting for it."""
        words = self._words
        words.add(_DECLINE_WORD[reason], 1)
        if self._turn_used != view.turn:
            self._use_turn(view.turn)
            ring(words, Word.SERVING_BELL)

    def wait_turn(self, timeout_s: float = MAX_TURN_WAIT_S) -> bool:
        """Sleeps until a step may be tried, at most MAX_TURN_WAIT_S; True if it may."""
        words = self._words
        until_ns = time.monotonic_ns() + to_ns(min(timeout_s, MAX_TURN_WAIT_S))
        while True:
            seen = words.load(Word.ROLLOUT_BELL)
            if self.may_try():
                return True
            now_ns = time.monotonic_ns()
            # Also when woken too late for a turn: serving offers none to whom it takes for gone.
            words.store(Word.R_HEARTBEAT, now_ns)
            if now_ns >= until_ns:
                return False
            self._check_serving(now_ns, LIVENESS_INTERVAL_NS)
            words.wait(Word.ROLLOUT_BELL, seen, (until_ns - now_ns) / 1e9)

    def may_try(self) -> bool:
        """Whether a step may be tried now; one call while the answer is no."""
        return self._is_open() and not is_arrival_pending(self._words, time.monotonic_ns())

    def serving_alive(self) -> bool:
        """Whether the serving process lives, checked now; True if none is attached."""
        return self._check_serving(time.monotonic_ns(), 0)

    def count_stalls(self, num_requests: int) -> None:
        """Adds to the board's count of stalled requests."""
        self._words.add(Word.R_STALLS, num_requests)

    def detach(self) -> None:
        """Leaves the board; the object is of no use afterwards."""
        words = self._words
        words.store(Word.R_WANT, 0)
        words.store(Word.R_STARTED, 0)
        words.store(Word.R_PHASE, Phase.DETACHED)
        words.store(Word.R_IDENTITY, NOBODY)
        ring(words, Word.SERVING_BELL)

    def _use_turn(self, turn: int) -> None:
        # Kept here too: nobody else writes the word, and it is looked at before every step.
        self._turn_used = turn
        self._words.store(Word.R_TURN_USED, turn)

    def _is_open(self) -> bool:
        phase = self._load(_S_PHASE)
        if phase == _OPEN:
            return self._load(_S_TURN) != self._turn_used
        return phase != _RUNNING and self._serving_alive

    def _check_serving(self, now_ns: int, max_age_ns: int) -> bool:
        if now_ns - self._checked_ns >= max_age_ns:
            self._checked_ns = now_ns
            identity = self._words.load(Word.S_IDENTITY)
            self._serving_alive = identity == NOBODY or is_alive(identity)
            if not self._serving_alive and identity != self._last_loss:
                self._last_loss = identity
                logger.warning("serving process is gone pid=%d", pid_of(identity))
        return self._serving_alive
