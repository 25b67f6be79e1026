"""The times of a training pass's pieces, and the split of a microbatch so that each piece fits a gap of
serving.

Owns the measured seconds of each piece and their fit. Promises that a piece which was never measured counts
as endless. Never reads a clock, never runs anything. Source: LeMix §IV-A (the profile of a stage) and §IV-B
(backward planning); a piece is one layer's part of a forward or a backward pass, because a whole backward
pass seldom fits a gap.
"""

import math
from collections import deque
from typing import NamedTuple

from rose.scheduler.node.model import PassCost
from rose.scheduler.node.profile import fit_cost

GIVE_WAY_S = 0.02
"""A training pass stops within this time when a request is due."""
_KEPT = 64
"""The number of a piece's latest measurements that count."""
_LEAST = 3
"""The measurements that a prediction needs. The very first is left out, because it allocates memory."""
_REFIT_EVERY = 8
_COEFFICIENTS = 3
_OUTLIERS_FROM = 20
"""With this many measurements the slowest is left out, because something else had the processor then."""
_STALLED = 8.0
"""A measurement of this many times the expected seconds says nothing of its piece: the machine stood still.
If it counted, a busy engine might have no gap long enough, and the piece would not be measured again."""
_FEW_STALLS = 0.2
"""Where more of the measurements are this long, the machine has become slower, and they count."""
_ENOUGH = 8
"""The measurements from which it may be said that a piece never takes less."""
_MARGIN_S = 2e-4
"""The cost of a wake-up or a clock, for a piece of any length."""


class Piece(NamedTuple):
    """A part of a training pass: ``layer`` of its ``kind``, such as forward, backward or optimizer."""

    kind: str
    layer: int


class Work(NamedTuple):
    """A microbatch: equally long sequences."""

    sequences: int
    length: int

    @property
    def tokens(self) -> int:
        """The tokens of all sequences together."""
        return self.sequences * self.length

    @property
    def pairs(self) -> int:
        """The sum of the squares of the sequences' lengths."""
        return self.sequences * self.length**2


class _Measured:
    """One piece: its latest seconds, and a + b tokens + c pairs fitted to them."""

    def __init__(self) -> None:
        self.samples: deque[tuple[Work, float]] = deque(maxlen=_KEPT)
        self._is_warm = False
        self._since_fit = 0
        self._sizes: set[int] = set()
        """The first sizes that were measured, until there are enough to fit all coefficients."""
        self._cost: PassCost | None = None
        self._safe_ratio, self._least_ratio = 1.0, 0.0

    def add(self, work: Work, seconds: float) -> None:
        if not self._is_warm:
            self._is_warm = True
            return
        self.samples.append((work, seconds))
        self._since_fit += 1
        is_new_size = len(self._sizes) < _COEFFICIENTS and work.tokens not in self._sizes
        if is_new_size:
            self._sizes.add(work.tokens)
        is_due = self._cost is None or is_new_size or self._since_fit >= _REFIT_EVERY
        if len(self.samples) >= _LEAST and is_due:
            self._fit()

    def predict(self, work: Work) -> float:
        return math.inf if self._cost is None else self._cost.seconds(work.tokens, work.pairs)

    def predict_safe(self, work: Work) -> float:
        return self.predict(work) * self._safe_ratio + _MARGIN_S

    def predict_least(self, work: Work) -> float:
        return 0.0 if self._cost is None else self.predict(work) * self._least_ratio

    def _fit(self) -> None:
        self._since_fit = 0
        works, seconds = zip(*self.samples, strict=True)
        if len({work.tokens for work in works}) >= _COEFFICIENTS:
            self._cost = fit_cost([work.tokens for work in works], seconds, [work.pairs for work in works])
        else:  # too few sizes to fit all coefficients: proportional to the tokens
            # With the least relative squared error, as in fit_cost: a measurement during which the machine
            # stood still for seconds hardly counts.
            speeds = [work.tokens / s for work, s in self.samples]
            per_token_s = sum(speeds) / sum(speed * speed for speed in speeds)
            self._cost = PassCost(constant_s=0.0, per_token_s=per_token_s, per_pair_s=0.0)
        ratios = sorted(s / self._cost.seconds(work.tokens, work.pairs) for work, s in self.samples)
        counted = [ratio for ratio in ratios if ratio < _STALLED]
        if len(counted) < (1 - _FEW_STALLS) * len(ratios):
            counted = ratios
        if len(counted) >= _OUTLIERS_FROM:
            counted.pop()
        self._safe_ratio = max([1.0, *counted])
        self._least_ratio = ratios[0] if len(ratios) >= _ENOUGH else 0.0


class PieceTimes:
    """The times of one trainer's pieces. They are measured while it trains, so they follow a change of
    speed."""

    def __init__(self) -> None:
        self._pieces: dict[Piece, _Measured] = {}

    def add(self, piece: Piece, work: Work, seconds: float) -> None:
        """Notes that a piece took ``seconds``, without pauses."""
        self._pieces.setdefault(piece, _Measured()).add(work, max(seconds, 1e-7))

    def predict(self, piece: Piece, work: Work) -> float:
        """Returns the expected seconds; infinite for a piece without enough measurements."""
        measured = self._pieces.get(piece)
        return math.inf if measured is None else measured.predict(work)

    def predict_safe(self, piece: Piece, work: Work) -> float:
        """Returns the seconds within which nearly all such pieces end."""
        measured = self._pieces.get(piece)
        return math.inf if measured is None else measured.predict_safe(work)

    def predict_least(self, piece: Piece, work: Work) -> float:
        """Returns the seconds that each such piece takes at least, by the fastest of many measurements; 0 for
        a piece without enough of them."""
        measured = self._pieces.get(piece)
        return 0.0 if measured is None else measured.predict_least(work)

    def longest_s(self, work: Work, kinds: frozenset[str]) -> float:
        """Returns the expected seconds of the longest piece of these kinds; infinite if one is unknown."""
        of_kinds = [each.predict(work) for piece, each in self._pieces.items() if piece.kind in kinds]
        return max(of_kinds, default=math.inf)


PASSES = frozenset({"forward", "backward"})
"""The kinds of pieces that become shorter with the microbatch."""


def num_parts(times: PieceTimes, work: Work, at_most_s: float) -> int:
    """Returns into how many parts to split a microbatch, so that each piece of a part takes ``at_most_s``.

    Returns the number of its sequences if nothing is known, or if even one sequence takes longer.
    """
    for parts in range(1, work.sequences):
        part = Work(math.ceil(work.sequences / parts), work.length)
        if times.longest_s(part, PASSES) <= at_most_s:
            return parts
    return work.sequences
