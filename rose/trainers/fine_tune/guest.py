"""A trainer as the guest of a serving engine: it computes one piece at a time, under a grant of the board.

Owns the trainer's place on the board and the measured seconds of its pieces. Promises that each piece begins
with a grant. A grant is kept for further pieces only while serving doesn't call and they still fit. A piece
that can never fit ends the trainer with one clear line. Only one thread may use it at a time.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Iterable

from rose._shm import Words
from rose.admission.board import MAX_STEP_WAIT_S
from rose.admission.gate import GatePolicy, GateReason, GateSettings, ServingView
from rose.admission.rollout_side import RolloutSide
from rose.admission.slack import NEVER
from rose.errors import WorkerError
from rose.scheduler.node.pieces import GIVE_WAY_S, Piece, PieceTimes, Work
from rose.trainers.fine_tune.ranks import TELL_S, Ranks
from rose.types import SLO, GateMode

logger = logging.getLogger(__name__)

FORWARD_BEGIN = Piece("forward", -1)
"""The piece that a training pass computes before its first layer."""
_SETTINGS = GateSettings(
    # The latest start that serving publishes already holds its objectives; the longest step is the board's.
    slo=SLO(ttft_s=1.0, tpot_s=1.0),
    mode=GateMode.DUAL,
    max_step_s=MAX_STEP_WAIT_S,
)


class TrainingGuest:
    """A trainer's end of the board. It is attached when it is made.

    ``give_way_s``: the longest grant, unless a single piece takes longer. ``synchronize`` waits until the
    device has done its work. ``cpus`` stand for the GPU on a host without one: the thread that computes is
    pinned to them until it leaves. ``ranks``: the trainer's processes, if there are several; only the leader
    has ``words``, and the others follow it.
    Raises: BoardError if every guest's place on this board is taken.
    """

    def __init__(
        self,
        words: Words | None,
        *,
        give_way_s: float = GIVE_WAY_S,
        synchronize: Callable[[], None] = lambda: None,
        cpus: Iterable[int] = (),
        ranks: Ranks | None = None,
    ) -> None:
        if give_way_s <= 0:
            raise ValueError(f"give_way_s must be positive, got {give_way_s}")
        self.times = PieceTimes()
        self.give_way_s = give_way_s
        self.num_grants = 0
        self.computed_s = 0.0
        """The seconds computed under grants."""
        self.waited_s = 0.0
        """The seconds that pieces waited for grants."""
        self._side = RolloutSide(words) if words is not None else None
        self._ranks = ranks
        self._gate = GatePolicy(_SETTINGS)
        self._synchronize = synchronize
        self._cpus = frozenset(cpus)
        self._elsewhere: set[int] | None = None
        """Where the computing thread ran before it was pinned."""
        self._piece: tuple[Piece, Work] | None = None
        """What is being computed."""
        self._has_grant = False
        self._began_s = 0.0
        self._ends_s = 0.0
        """The time at which the pieces of the present grant must have ended."""
        self._may_be_called = False
        """Whether the grant ends when serving gets work. If serving has lent its slack, it waits for the
        end."""
        self._tokens = 0
        self._longest_s = 0.0
        """The longest step that serving has ever allowed."""
        self._is_closed = False

    @property
    def is_computing(self) -> bool:
        """Whether a piece is being computed under a grant."""
        return self._piece is not None

    def begin(self, piece: Piece, work: Work) -> None:
        """Waits until the piece may compute. The piece before it ends here.

        Raises: WorkerError if the piece takes longer than serving ever allows.
        """
        soon = self._note_end()
        if self._cpus and self._elsewhere is None:
            self._elsewhere = os.sched_getaffinity(0)
            os.sched_setaffinity(0, self._cpus)
        safe_s = self.agree(self.times.predict_safe(piece, work), soon=soon)
        has_none = True
        while has_none:  # the others compute once the leader has the grant
            is_given = self._side is None or self._hold_grant(self._side, piece, work, safe_s)
            has_none = self.agree(float(not is_given), soon=True) > 0
        self._piece = (piece, work)
        # A forward pass begins with the piece before its first layer: its tokens count once.
        self._tokens += work.tokens if piece == FORWARD_BEGIN else 0
        self._began_s = time.monotonic()

    def agree(self, value: float, *, soon: bool = False) -> float:
        """Returns the largest value of all the trainer's processes, once all are here. ``soon``: whether the
        others must be here within `LATE_S`."""
        return self._ranks.most(value, soon=soon) if self._ranks is not None else value

    def leave(self, *, keeps_cpus: bool = False) -> None:
        """Hands the GPU back, because what follows needs no grant. Does nothing without a grant.

        keeps_cpus: the next piece follows soon, so the thread stays on the CPUs that stand for the GPU.
        Moving it away and back would take longer than its work in between.
        """
        if self._note_end():
            self.agree(0.0, soon=True)  # the last process ends its piece
        if self._side is not None:
            self._hand_back(self._side)
            self._side.set_want(False)
        if not keeps_cpus:
            self._unpin()

    def close(self) -> None:
        """Leaves the board, once the device has done what was begun. Idempotent. The object can't be used
        afterwards."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._piece is not None:  # an error or a signal came while it was computed
                self._synchronize()
        finally:
            self._piece = None
            if self._side is not None:
                self._side.detach()
            self._unpin()

    def _unpin(self) -> None:
        if self._elsewhere is not None:
            os.sched_setaffinity(0, self._elsewhere)
            self._elsewhere = None

    def _note_end(self) -> bool:
        """Ends the piece that is being computed, if there is one; returns whether there was."""
        if self._piece is None:
            return False
        self._synchronize()
        seconds = time.monotonic() - self._began_s
        self.times.add(*self._piece, seconds)
        self.computed_s += seconds
        self._piece = None
        return True

    def _hold_grant(self, side: RolloutSide, piece: Piece, work: Work, safe_s: float) -> bool:
        """Keeps the present grant if the piece fits into it, or else hands it back and takes another.

        Returns False if serving has left none for `TELL_S`.
        """
        if self._has_grant:
            is_called = self._may_be_called and side.is_called()
            if is_called or time.monotonic() + safe_s > self._ends_s:
                self._hand_back(side)
        if not self._has_grant and self._take(side, piece, work, safe_s):
            self._has_grant = True
            self.num_grants += 1
        return self._has_grant

    def _hand_back(self, side: RolloutSide) -> None:
        if self._has_grant:
            # A step without tokens would end serving's offers, and not every piece has tokens.
            side.end_step(max(1, self._tokens))
            self._has_grant, self._tokens = False, 0

    def _take(self, side: RolloutSide, piece: Piece, work: Work, safe_s: float) -> bool:
        """Waits for a grant, for `TELL_S` at most; returns whether there is one."""
        asked_s = now = time.monotonic()
        while now < asked_s + TELL_S:
            view, now = side.view(), time.monotonic()
            least_s = self._least_s(piece, work, safe_s, view)
            side.set_want(True, least_s if math.isfinite(least_s) else MAX_STEP_WAIT_S)
            allowed = self._gate.piece_s(now, view, least_s, max(least_s, self.give_way_s))
            if isinstance(allowed, GateReason):
                side.decline(view, allowed)
            elif side.try_begin(now + allowed, view):
                self._ends_s, self._may_be_called = now + allowed, not view.has_work
                self.waited_s += now - asked_s
                return True
            side.wait_grant()
        self.waited_s += now - asked_s
        return False

    def _least_s(self, piece: Piece, work: Work, safe_s: float, view: ServingView) -> float:
        """Returns the slack that a piece needs. Raises: WorkerError if serving never leaves this much.

        Requests with a tight SLO of their own make the longest step shorter for minutes, which the piece then
        waits for.
        """
        longest_s = self._gate.longest_step_s(view)
        if view.max_step_s < NEVER:
            self._longest_s = max(self._longest_s, longest_s)
        if math.isinf(safe_s) or safe_s <= longest_s:
            return safe_s
        least_s = self.times.predict_least(piece, work)
        if least_s > max(longest_s, self._longest_s):
            expected_s = self.times.predict(piece, work)
            raise WorkerError(
                f"{piece.kind} of layer {piece.layer} takes {1e3 * expected_s:.0f} ms for {work.sequences} "
                f"sequences of {work.length} tokens, and serving allows a guest {1e3 * longest_s:.0f} ms: "
                "train on shorter sequences or fewer at once, or raise max_step_ms of the serving engine"
            )
        if least_s > longest_s:
            return safe_s
        return longest_s  # not all measurements are too long, or there are few
