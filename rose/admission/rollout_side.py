"""The rollout engine's side of the board: it says whether it has work, waits for grants, and takes steps.

It writes the rollout lines of the page. It starts no step while serving claims the GPU or after serving died,
and never sleeps longer than MAX_GRANT_WAIT_S. One thread uses it, the engine core's. rose.admission.board has
the protocol.
"""

import logging
import time
from enum import Enum, auto

from rose._shm import Words
from rose.admission.board import (
    MAX_GRANT_WAIT_S,
    NEVER_NS,
    REASONS,
    EngineState,
    Word,
    check_page,
    claim_side,
    closed_slices,
    is_arrival_pending,
    ring,
    to_ns,
    to_s,
)
from rose.admission.gate import GateReason, ServingView
from rose.admission.liveness import NOBODY, is_alive, pid_of

logger = logging.getLogger(__name__)

# A process check costs up to 100 us, and a dead serving engine's state stays closed anyway. Between a grant
# and the step that uses it there is no time for one, unless there was no wait in which it could be done.
LIVENESS_INTERVAL_NS = 100_000_000
MAX_LIVENESS_AGE_NS = 300_000_000
MAX_LAYERS_AHEAD = 2
"""How many layers a GPU's queue may hold beyond the one that runs: before a pause it has to empty."""
MAX_PAUSE_S = 10.0
"""No step of serving takes so long, and no slice in which rollouts are shut out."""
# These are plain integers: an IntEnum's members cost more than the atomic load that they are compared with.
_OPEN, _RUNNING = int(EngineState.OPEN), int(EngineState.RUNNING)
_S_STATE, _S_GRANT = Word.S_STATE, Word.S_GRANT
_DECLINE_WORD = {reason: Word.R_DECLINES + i for i, reason in enumerate(REASONS)}


class Resumed(Enum):
    """Whether a paused step goes on."""

    NOT = auto()
    WHILE_IDLE = auto()
    WITH_GRANT = auto()
    """To its end: serving has work, and waits for it."""


class RolloutSide:
    """The rollout process's end of the board, attached when it is made.

    Raises: BoardError if another live process holds the rollout side.
    """

    def __init__(self, words: Words) -> None:
        check_page(words)
        self._words = words
        self._load = words.load  # looked up once: it is called before every step, and during every wait
        self._serving_alive = True
        self._checked_ns = -MAX_LIVENESS_AGE_NS
        self._last_loss = NOBODY
        claim_side(words, Word.R_IDENTITY, Word.R_EPOCH, "rollout")
        words.store(Word.R_WANT, 0)
        words.store(Word.R_STARTED, 0)
        words.store(Word.R_PAUSED, 0)
        words.store(Word.R_HEARTBEAT, time.monotonic_ns())
        self._use_grant(words.load(Word.S_GRANT))
        words.store(Word.R_STATE, EngineState.IDLE)
        ring(words, Word.SERVING_BELL)

    def set_want(self, wants: bool, min_step_s: float = 0.0) -> None:
        """Publishes whether this engine has anything to run, and the shortest step that it could use.

        Serving offers no grant that leaves less time than that.
        """
        self._words.store(Word.R_MIN_STEP, to_ns(min_step_s))
        self._words.store(Word.R_WANT, int(wants))

    def view(self) -> ServingView:
        """Reads what serving published last, for the gate."""
        words = self._words
        now_ns = time.monotonic_ns()
        # seq is read first: words read after it can only be newer, and try_begin then refuses.
        seq = words.load(Word.S_SEQ)
        grant = words.load(Word.S_GRANT)
        state = words.load(Word.S_STATE)
        is_announced = is_arrival_pending(words, now_ns)
        is_open = grant != self._grant_used if state == _OPEN else state != _RUNNING
        return ServingView(
            has_work=state in (_OPEN, _RUNNING),
            has_pending_prefill=is_announced or bool(words.load(Word.S_HAS_PENDING)),
            latest_start_s=to_s(words.load(Word.S_LATEST_START)),
            max_step_s=to_s(words.load(Word.S_MAX_STEP) or NEVER_NS),
            alive=self._check_serving(now_ns, MAX_LIVENESS_AGE_NS),
            may_start=not is_announced and is_open,
            seq=seq,
            grant=grant,
            is_closed=closed_slices(words).is_closed(now_ns / 1e9),
        )

    def try_begin(self, est_end_s: float, view: ServingView) -> bool:
        """Takes the GPU for one step that was decided on ``view``.

        ``est_end_s`` is when the step ends (time.monotonic, error included). Returns False if serving was
        faster or has published since: the caller has to decide again.
        """
        words = self._words
        words.store(Word.R_EST_END, to_ns(est_end_s))
        words.store(Word.R_STATE, EngineState.RUNNING)
        if not self._is_open() or words.load(Word.S_SEQ) != view.seq:
            words.store(Word.R_STATE, EngineState.IDLE)
            ring(words, Word.SERVING_BELL)
            return False
        self._use_grant(words.load(Word.S_GRANT))
        words.store(Word.R_STARTED, time.monotonic_ns())
        return True

    def end_step(self, num_tokens: int) -> None:
        """Hands the GPU back after a step that made or prefilled ``num_tokens`` rollout tokens.

        A step of 0 tokens is not counted, and so ends serving's offers until its next step.
        """
        words = self._words
        now_ns = time.monotonic_ns()
        started_ns = words.load(Word.R_STARTED)
        assert started_ns > 0, "end_step without try_begin"
        words.store(Word.R_STARTED, 0)
        # Counted before the state changes: serving, once woken, sees by it that its grant was used for a
        # step.
        if num_tokens > 0:
            words.add(Word.R_STEPS, 1)
        words.store(Word.R_STATE, EngineState.IDLE)
        ring(words, Word.SERVING_BELL)
        words.add(Word.R_BUSY, now_ns - started_ns)
        words.add(Word.R_TOKENS, num_tokens)
        words.store(Word.R_HEARTBEAT, now_ns)

    def is_called(self) -> bool:
        """Whether serving wants the GPU now, or a request is on its way to it. It is asked at every layer."""
        state = self._load(_S_STATE)
        return state in (_OPEN, _RUNNING) or is_arrival_pending(self._words, time.monotonic_ns())

    def pause(self) -> None:
        """Hands the GPU back in the middle of a step; try_resume takes it again."""
        words = self._words
        now_ns = time.monotonic_ns()
        words.add(Word.R_BUSY, now_ns - words.load(Word.R_STARTED))
        words.store(Word.R_STARTED, 0)
        words.store(Word.R_PAUSED, now_ns)
        words.add(Word.R_PAUSES, 1)
        words.store(Word.R_STATE, EngineState.IDLE)
        ring(words, Word.SERVING_BELL)

    def try_resume(self, left_s: float, paused_s: float) -> Resumed:
        """Takes the GPU for the rest of a step: ``left_s``, error included, after a pause of ``paused_s``.

        A serving engine that is dead, or silent for MAX_PAUSE_S, holds nobody up: the step had its grant.
        """
        words = self._words
        identity = words.load(Word.S_IDENTITY)
        view = self.view()
        est_end_s = time.monotonic() + left_s
        if not view.alive or (paused_s >= MAX_PAUSE_S and self._is_serving_silent()):
            words.store(Word.R_EST_END, to_ns(est_end_s))
            words.store(Word.R_STATE, EngineState.RUNNING)
            if words.load(Word.S_IDENTITY) != identity:  # one has attached meanwhile
                words.store(Word.R_STATE, EngineState.IDLE)
                ring(words, Word.SERVING_BELL)
                return Resumed.NOT
            words.store(Word.R_STARTED, time.monotonic_ns())
        else:
            waits_for_slice = view.is_closed and not view.has_work and paused_s < MAX_PAUSE_S
            if waits_for_slice or not view.may_start or not self.try_begin(est_end_s, view):
                return Resumed.NOT
        words.store(Word.R_PAUSED, 0)
        return Resumed.WITH_GRANT if view.has_work else Resumed.WHILE_IDLE

    def _is_serving_silent(self) -> bool:
        age_ns = time.monotonic_ns() - self._words.load(Word.S_HEARTBEAT)
        return self._load(_S_STATE) in (_OPEN, _RUNNING) and age_ns >= to_ns(MAX_PAUSE_S)

    def decline(self, view: ServingView, reason: GateReason) -> None:
        """Counts a refusal and answers an offered grant, so that serving stops waiting."""
        words = self._words
        words.add(_DECLINE_WORD[reason], 1)
        if self._grant_used != view.grant:
            self._use_grant(view.grant)
            ring(words, Word.SERVING_BELL)

    def wait_grant(self, timeout_s: float = MAX_GRANT_WAIT_S) -> bool:
        """Sleeps until a step may be tried, for MAX_GRANT_WAIT_S at most; returns whether it may."""
        words = self._words
        until_ns = time.monotonic_ns() + to_ns(min(timeout_s, MAX_GRANT_WAIT_S))
        while True:
            seen = words.load(Word.ROLLOUT_BELL)
            if self.may_try():
                return True
            now_ns = time.monotonic_ns()
            # Stored even if it is too late for the grant: serving offers none to a process that seems gone.
            words.store(Word.R_HEARTBEAT, now_ns)
            if now_ns >= until_ns:
                return False
            self._check_serving(now_ns, LIVENESS_INTERVAL_NS)
            words.wait(Word.ROLLOUT_BELL, seen, (until_ns - now_ns) / 1e9)

    def may_try(self) -> bool:
        """Whether a step may be tried now."""
        now_ns = time.monotonic_ns()
        is_closed = closed_slices(self._words).is_closed(now_ns / 1e9)
        return self._is_open() and not is_closed and not is_arrival_pending(self._words, now_ns)

    def serving_alive(self) -> bool:
        """Whether the serving process lives; checks it now. True if none is attached."""
        return self._check_serving(time.monotonic_ns(), 0)

    def count_stalls(self, num_requests: int) -> None:
        """Adds to the board's count of stalled requests."""
        self._words.add(Word.R_STALLS, num_requests)

    def detach(self) -> None:
        """Leaves the board. The object is of no use afterwards."""
        words = self._words
        words.store(Word.R_WANT, 0)
        words.store(Word.R_STARTED, 0)
        words.store(Word.R_PAUSED, 0)
        words.store(Word.R_STATE, EngineState.DETACHED)
        words.store(Word.R_IDENTITY, NOBODY)
        ring(words, Word.SERVING_BELL)

    def _use_grant(self, grant: int) -> None:
        # Kept here as well: nobody else writes the word, and it is needed before every step.
        self._grant_used = grant
        self._words.store(Word.R_GRANT_USED, grant)

    def _is_open(self) -> bool:
        state = self._load(_S_STATE)
        if state == _OPEN:
            return self._load(_S_GRANT) != self._grant_used
        return state != _RUNNING and self._serving_alive

    def _check_serving(self, now_ns: int, max_age_ns: int) -> bool:
        if now_ns - self._checked_ns >= max_age_ns:
            self._checked_ns = now_ns
            identity = self._words.load(Word.S_IDENTITY)
            self._serving_alive = identity == NOBODY or is_alive(identity)
            if not self._serving_alive and identity != self._last_loss:
                self._last_loss = identity
                logger.warning("serving process is gone pid=%d", pid_of(identity))
        return self._serving_alive
