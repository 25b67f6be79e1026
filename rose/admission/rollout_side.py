"""A guest's side of the board: it says whether it has work, waits for its turn, and takes steps.

A guest is a rollout engine, or a trainer that computes while serving leaves the GPU idle. It writes the lines
of its slot. It starts no step while a serving engine claims the GPU, after a serving engine has died, or
while another guest steps. It never sleeps longer than MAX_GRANT_WAIT_S. Only one thread uses it: the engine
core's, or the thread in which a trainer computes. rose.admission.board has the protocol.
"""

import logging
import time
from enum import Enum, auto

from rose._shm import Words
from rose.admission.board import (
    GIVE_WAY_S,
    MAX_GRANT_WAIT_S,
    MAX_STEP_WAIT_S,
    NEVER_NS,
    REASONS,
    SLOT_WORDS,
    WAITS_FOR_S,
    BoardWord,
    attach,
    closed_slices,
    is_arrival_pending,
    parties,
    ring,
    to_ns,
    to_s,
)
from rose.admission.claim import (
    ServingState,
    change,
    guest_of,
    has_gpu,
    has_work,
    is_open,
    released,
    state_of,
    taken,
)
from rose.admission.gate import GateReason, ServingView
from rose.admission.liveness import NOBODY, is_alive, pid_of
from rose.types import Role

logger = logging.getLogger(__name__)

# A check of a process costs up to 100 us, and the state of a dead serving engine stays closed anyway. Between
# a grant and its step there is no time for a check, so it is made there only if no wait came before.
LIVENESS_INTERVAL_NS = 100_000_000
MAX_LIVENESS_AGE_NS = 300_000_000
MAX_LAYERS_AHEAD = 2
"""How many layers a GPU's queue may hold beyond the one that runs. The queue has to empty before a pause."""
MAX_PAUSE_S = 10.0
"""Longer than any step of serving, or any slice in which rollouts are shut out."""
_CLAIM = BoardWord.CLAIM
_GIVE_WAY_NS, _WAITS_FOR_NS = to_ns(GIVE_WAY_S), to_ns(WAITS_FOR_S)
_DECLINE_WORD = {reason: BoardWord.R_DECLINES + i for i, reason in enumerate(REASONS)}


class Resumed(Enum):
    """Whether a paused step goes on."""

    NOT = auto()
    WHILE_IDLE = auto()
    WITH_GRANT = auto()
    """It goes on to its end: serving has work, and waits for it."""


class RolloutSide:
    """A guest's end of the board, attached when it is made.

    Raises: BoardError if as many live processes are guests on this board as it has slots for.
    """

    def __init__(self, words: Words) -> None:
        self.slot = attach(words, Role.ROLLOUT)
        """The guest's place on the board."""
        self._at = at = SLOT_WORDS * self.slot
        self._words = words
        self._load = words.load  # looked up once, because it is called before every step and in every wait
        self._serving_alive = True
        self._checked_ns = -MAX_LIVENESS_AGE_NS
        self._losses: set[int] = set()
        self._gives_way_since_ns: int | None = None
        self._look_around()
        # What this process alone writes is kept here as well: it is needed before every step.
        self._answered = words.load(BoardWord.R_ANSWERED + at)
        self._waits, self._taken = False, 0
        for word in (BoardWord.R_WANT, BoardWord.R_STARTED, BoardWord.R_PAUSED, BoardWord.R_WAITS):
            words.store(word + at, 0)
        # A new guest goes behind those that wait: one that dies in every step must not always pass them.
        for word in (BoardWord.R_HEARTBEAT, BoardWord.R_LAST_END):
            words.store(word + at, time.monotonic_ns())
        self._release()  # the claim with which a predecessor may have died

    def set_want(self, wants: bool, min_step_s: float = 0.0) -> None:
        """Publishes whether this guest has anything to run, and the shortest step that it could use.

        Serving offers no grant that leaves less time than that.
        """
        words, at = self._words, self._at
        words.store(BoardWord.R_MIN_STEP + at, to_ns(min_step_s))
        words.store(BoardWord.R_WANT + at, int(wants))
        if not wants:
            self._stop_waiting()

    def view(self) -> ServingView:
        """Returns, for the gate, what the strictest of the serving engines allows by its last publication."""
        load = self._load
        now_ns = time.monotonic_ns()
        # The claim is read first: words read after it can only be newer, and try_begin then refuses.
        claim = load(_CLAIM)
        grant = load(BoardWord.GRANTS)
        self._look_around()
        is_announced = is_arrival_pending(self._words, self._servings, now_ns)
        latest_ns = max_step_ns = NEVER_NS
        is_pending = is_announced
        for at in self._servings:
            if load(BoardWord.S_HAS_PENDING + at):
                is_pending = True
            if 0 < (step_ns := load(BoardWord.S_MAX_STEP + at)) < max_step_ns:
                max_step_ns = step_ns
            if state_of(claim, at // SLOT_WORDS):
                latest_ns = min(latest_ns, load(BoardWord.S_LATEST_START + at))
        alive = self._check_others(now_ns, MAX_LIVENESS_AGE_NS)
        return ServingView(
            has_work=has_work(claim),
            has_pending_prefill=is_pending,
            latest_start_s=to_s(latest_ns),
            max_step_s=to_s(max_step_ns),
            alive=alive,
            may_start=not is_announced and self._may_take(claim, now_ns),
            seq=claim,
            grant=grant,
            is_closed=closed_slices(self._words, self._servings).is_closed(now_ns / 1e9),
        )

    def _look_around(self) -> None:
        """Learns which serving engines have come. During a step only the claim shows a new engine; its
        announcements do not."""
        self._servings, self._guests = parties(self._words)

    def try_begin(self, est_end_s: float, view: ServingView) -> bool:
        """Takes the GPU for one step that was decided on ``view``.

        ``est_end_s`` is when the step ends (time.monotonic, error included). Returns False if serving has
        taken the GPU or published since, or another guest has stepped. The caller has to decide again.
        """
        return is_open(view.seq) and self._serving_alive and self._take(view.seq, est_end_s)

    def _take(self, claim: int, est_end_s: float) -> bool:
        words, at = self._words, self._at
        words.store(BoardWord.R_EST_END + at, to_ns(est_end_s))
        self._taken = taken(claim, self.slot)
        if not words.cas(_CLAIM, claim, self._taken):
            return False
        words.store(BoardWord.R_STARTED + at, time.monotonic_ns())
        self._stop_waiting()
        self._gives_way_since_ns = None
        return True

    def _release(self) -> None:
        words = self._words
        # Serving has most often published nothing during the step.
        if not words.cas(_CLAIM, self._taken, released(self._taken, self.slot)):
            change(words, _CLAIM, lambda claim: released(claim, self.slot))
        ring(words, BoardWord.SERVING_BELL)
        # The next in turn sleeps on it.
        words.add(BoardWord.GUEST_BELL, 1)
        if len(self._guests) > 1:
            words.wake(BoardWord.GUEST_BELL)

    def _stop_waiting(self) -> None:
        if self._waits:
            self._waits = False
            self._words.store(BoardWord.R_WAITS + self._at, 0)

    def end_step(self, num_tokens: int) -> None:
        """Hands the GPU back after a step that made or prefilled ``num_tokens`` rollout tokens.

        A step of 0 tokens is not counted, which ends serving's offers until its next step.
        """
        words, at = self._words, self._at
        now_ns = time.monotonic_ns()
        started_ns = words.load(BoardWord.R_STARTED + at)
        assert started_ns > 0, "end_step without try_begin"
        words.store(BoardWord.R_STARTED + at, 0)
        # The step is counted before the release, so that serving sees that its grant was used once it is
        # woken.
        if num_tokens > 0:
            words.add(BoardWord.R_STEPS + at, 1)
        words.store(BoardWord.R_LAST_END + at, now_ns)
        self._release()
        words.add(BoardWord.R_BUSY + at, now_ns - started_ns)
        words.add(BoardWord.R_TOKENS + at, num_tokens)
        words.store(BoardWord.R_HEARTBEAT + at, now_ns)

    def is_called(self) -> bool:
        """Whether serving wants the GPU, a request is on its way to it, or another guest has the GPU because
        this one was stopped for too long. It is asked at every layer."""
        if not has_gpu(self._load(_CLAIM), self.slot):
            return True
        return is_arrival_pending(self._words, self._servings, time.monotonic_ns())

    def pause(self) -> None:
        """Hands the GPU back in the middle of a step; try_resume takes it again."""
        words, at = self._words, self._at
        now_ns = time.monotonic_ns()
        words.add(BoardWord.R_BUSY + at, now_ns - words.load(BoardWord.R_STARTED + at))
        words.store(BoardWord.R_STARTED + at, 0)
        words.store(BoardWord.R_PAUSED + at, now_ns)
        words.add(BoardWord.R_PAUSES + at, 1)
        self._release()

    def try_resume(self, left_s: float, paused_s: float) -> Resumed:
        """Takes the GPU for the rest of a step: ``left_s``, error included, after a pause of ``paused_s``.

        A serving engine that is dead or was silent for MAX_PAUSE_S does not hold the step up, because the
        step had its grant. After that time, neither do several engines with work.
        """
        view = self.view()
        est_end_s = time.monotonic() + left_s
        if (not view.alive or paused_s >= MAX_PAUSE_S) and self._is_held_up_by_nobody(view.seq, paused_s):
            is_taken = self._take(view.seq, est_end_s)  # not if one has attached meanwhile
        else:
            waits_for_slice = view.is_closed and not view.has_work and paused_s < MAX_PAUSE_S
            is_taken = not waits_for_slice and view.may_start and self.try_begin(est_end_s, view)
        if not is_taken:
            return Resumed.NOT
        self._words.store(BoardWord.R_PAUSED + self._at, 0)
        return Resumed.WITH_GRANT if view.has_work else Resumed.WHILE_IDLE

    def _is_held_up_by_nobody(self, claim: int, paused_s: float) -> bool:
        """Whether no guest has the claim, and each serving engine with work is dead, silent or lends its
        time.

        Several engines with work offer no grants, so they hold a step up for MAX_PAUSE_S at most.
        """
        silent_since_ns = time.monotonic_ns() - to_ns(MAX_PAUSE_S)
        states = {at: state_of(claim, at // SLOT_WORDS) for at in self._servings}
        working = [at for at, state in states.items() if state != ServingState.IDLE]
        if len(working) == 1 or paused_s < MAX_PAUSE_S:
            for at in working:
                is_silent = (
                    self._load(BoardWord.S_HEARTBEAT + at) <= silent_since_ns and paused_s >= MAX_PAUSE_S
                )
                is_lending = states[at] == ServingState.GRANTED
                if not (is_silent or is_lending) and is_alive(self._load(BoardWord.S_IDENTITY + at)):
                    return False
        return guest_of(claim) < 0

    def decline(self, view: ServingView, reason: GateReason) -> None:
        """Counts a refusal and answers an offered grant, so that serving stops waiting for this guest."""
        self._words.add(_DECLINE_WORD[reason], 1)
        # NO_GRANT is no answer: the guest waits for the grant until another one has had its turn.
        if reason is not GateReason.NO_GRANT:
            self._answer(view.grant)

    def _answer(self, grant: int) -> None:
        """Answers every grant up to that one without a step."""
        if self._answered != grant:
            self._answered = grant
            self._words.store(BoardWord.R_ANSWERED + self._at, grant)
            self._stop_waiting()
            ring(self._words, BoardWord.SERVING_BELL)
            if len(self._guests) > 1:
                ring(self._words, BoardWord.GUEST_BELL)  # it is the next one's turn

    def wait_grant(self, timeout_s: float = MAX_GRANT_WAIT_S) -> bool:
        """Sleeps until a step may be tried, for MAX_GRANT_WAIT_S at most; returns whether it may."""
        words, at = self._words, self._at
        until_ns = time.monotonic_ns() + to_ns(min(timeout_s, MAX_GRANT_WAIT_S))
        while True:
            seen = words.load(BoardWord.GUEST_BELL)
            now_ns = time.monotonic_ns()
            if len(self._guests) == 1 or not self._has_refused(self._load(_CLAIM)):
                words.store(BoardWord.R_WAITS + at, now_ns)
                self._waits = True
            if self.may_try():
                return True
            # Stored even if it is too late for the grant, because serving offers none to a process that seems
            # gone.
            words.store(BoardWord.R_HEARTBEAT + at, now_ns)
            if now_ns >= until_ns:
                return False
            if not self._check_others(now_ns, LIVENESS_INTERVAL_NS):
                if words.load(BoardWord.R_PAUSED + at):
                    # A living engine may lend its time to the rest of a step: try_resume looks at each ring.
                    if not is_open(words.load(_CLAIM)):
                        words.wait(BoardWord.GUEST_BELL, seen, (until_ns - now_ns) / 1e9)
                    return False
                # The grants are of no use, and another serving engine may wait for the answer.
                self._answer(words.load(BoardWord.GRANTS))
            # Nobody rings when a guest that should go first has let its time pass.
            wake_ns = until_ns if self._gives_way_since_ns is None else now_ns + _GIVE_WAY_NS
            words.wait(BoardWord.GUEST_BELL, seen, (min(wake_ns, until_ns) - now_ns) / 1e9)

    def may_try(self) -> bool:
        """Whether a step may be tried now."""
        now_ns = time.monotonic_ns()
        self._look_around()
        words, servings = self._words, self._servings
        if is_arrival_pending(words, servings, now_ns):
            return False
        if closed_slices(words, servings).is_closed(now_ns / 1e9):
            return False
        return self._may_take(self._load(_CLAIM), now_ns)

    def serving_alive(self) -> bool:
        """Whether every serving process lives; checks it now. True if none is attached."""
        return self._check_others(time.monotonic_ns(), 0)

    def count_stalls(self, num_requests: int) -> None:
        """Adds to the board's count of stalled requests."""
        self._words.add(BoardWord.R_STALLS + self._at, num_requests)

    def detach(self) -> None:
        """Leaves the board. The object can't be used afterwards."""
        words, at = self._words, self._at
        for word in (BoardWord.R_WANT, BoardWord.R_STARTED, BoardWord.R_PAUSED, BoardWord.R_WAITS):
            words.store(word + at, 0)
        self._release()
        words.store(BoardWord.R_IDENTITY + at, NOBODY)

    def _may_take(self, claim: int, now_ns: int) -> bool:
        """Whether the claim may be taken, this guest has not refused its time, and it is this guest's
        turn."""
        if not is_open(claim) or not self._serving_alive:
            self._gives_way_since_ns = None
            return False
        if self._has_refused(claim):
            return False
        return len(self._guests) == 1 or self._is_next(now_ns)

    def _has_refused(self, claim: int) -> bool:
        """Whether this guest has answered everything that serving lends without a step."""
        return has_work(claim) and self._answered >= self._load(BoardWord.GRANTS)

    def _is_next(self, now_ns: int) -> bool:
        """Whether no other guest waits whose last step ended earlier, or such a guest has let its time
        pass."""
        load, me = self._load, self._at
        mine = (load(BoardWord.R_LAST_END + me), me)
        for at in self._guests:
            waits_ns = load(BoardWord.R_WAITS + at)
            if (
                at != me
                and now_ns - waits_ns < _WAITS_FOR_NS
                and (load(BoardWord.R_LAST_END + at), at) < mine
            ):
                if self._gives_way_since_ns is None:
                    self._gives_way_since_ns = now_ns
                return now_ns - self._gives_way_since_ns >= _GIVE_WAY_NS
        return True

    def _check_others(self, now_ns: int, max_age_ns: int) -> bool:
        """Checks whether the serving processes live, and whether a guest keeps the GPU but can't use it."""
        if now_ns - self._checked_ns >= max_age_ns:
            self._checked_ns = now_ns
            self._serving_alive = True
            self._look_around()
            for at in self._servings:
                self._check_serving(self._load(BoardWord.S_IDENTITY + at))
            self._check_guest(now_ns)
        return self._serving_alive

    def _check_serving(self, identity: int) -> None:
        if identity == NOBODY or is_alive(identity):
            return
        self._serving_alive = False
        if identity not in self._losses:
            self._losses.add(identity)
            logger.warning("serving process is gone pid=%d", pid_of(identity))

    def _check_guest(self, now_ns: int) -> None:
        """Takes the claim from a guest that has died, or has kept it for far too long."""
        words = self._words
        claim = words.load(_CLAIM)
        slot = guest_of(claim)
        if slot < 0 or slot == self.slot:
            return
        at = SLOT_WORDS * slot
        identity = words.load(BoardWord.R_IDENTITY + at)
        overdue_ns = now_ns - words.load(BoardWord.R_EST_END + at)
        if overdue_ns < to_ns(MAX_STEP_WAIT_S) and is_alive(identity):
            return
        # The word as it was read: it does not come back, so nothing is taken from a successor.
        if words.cas(_CLAIM, claim, released(claim, slot)):
            words.add(BoardWord.EVICTIONS, 1)
            ring(words, BoardWord.GUEST_BELL)
            logger.warning("guest's claim taken back slot=%d pid=%d", slot, pid_of(identity))
