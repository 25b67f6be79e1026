"""What sub-stages cost one another: slowdowns measured on a grid of shares, interpolated between.

Owns shares of one GPU, and the table. What was not measured is unknown, never guessed: the policies run such
pairs one after the other. Source: JigsawRL §4.2.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rose.scheduler.gpu.substages import SubStageKind

COMPUTE_LEVELS = (0.25, 0.5, 0.75, 1.0)
MEMORY_LEVELS = (0.2, 0.4, 0.6, 0.8)
"""The paper's grid."""
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of one GPU: compute by SMs or cores; memory by the slab budget or by the microbatch."""

    compute: float = 1.0
    memory: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.compute <= 1 and 0 < self.memory <= 1):
            raise ValueError(f"a share must be above 0 and at most 1, got {self}")


WHOLE = Share()


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Two shares of one GPU. Raises: ValueError if they add up to more than all of it."""

    first: Share
    second: Share

    def __post_init__(self) -> None:
        for name in ("compute", "memory"):
            one, two = getattr(self.first, name), getattr(self.second, name)
            if one + two > 1 + _ROUNDING:
                raise ValueError(f"{name} shares {one:g} + {two:g} exceed one GPU; they must add up to 1")


class Slowdowns(Protocol):
    """Says what a sub-stage's time beside another is over its time alone on the whole GPU."""

    def slowdown(self, kind: SubStageKind, beside: SubStageKind | None, share: Share) -> float | None:
        """Returns the slowdown of a sub-stage; None if it is unknown. `beside`: the one on the rest of the
        GPU; None: there is none."""


Grid = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowdownTable:
    """f(k_a, k_b, compute, memory): a row for each level of compute, a column for each of memory."""

    hardware: str
    entries: Mapping[tuple[SubStageKind, SubStageKind], Grid]
    compute: Sequence[float] = COMPUTE_LEVELS
    memory: Sequence[float] = MEMORY_LEVELS

    def __post_init__(self) -> None:
        for name in ("compute", "memory"):
            levels = getattr(self, name)
            if not levels or list(levels) != sorted(set(levels)) or not 0 < levels[0] <= levels[-1] <= 1:
                raise ValueError(f"{name} levels must ascend within (0, 1], got {list(levels)}")
        for (kind, beside), grid in self.entries.items():
            where = f"{kind} beside {beside}"
            if [len(row) for row in grid] != [len(self.memory)] * len(self.compute):
                raise ValueError(
                    f"{where}: expected {len(self.compute)} rows of {len(self.memory)} slowdowns"
                )
            wrong = [value for row in grid for value in row if not 0 < value < math.inf]
            if wrong:
                raise ValueError(f"{where}: a slowdown must be a number above 0, got {wrong[0]}")

    def slowdown(self, kind: SubStageKind, beside: SubStageKind | None, share: Share) -> float | None:
        """Interpolates between the four nearest points; outside of the grid the nearest one counts. Never
        below 1."""
        if beside is None:
            return 1.0 if share == WHOLE else None
        grid = self.entries.get((kind, beside))
        if grid is None:
            return None
        low, high, part = _between(self.compute, share.compute)
        left, right, across = _between(self.memory, share.memory)
        rows = [grid[row][left] * (1 - across) + grid[row][right] * across for row in (low, high)]
        return max(1.0, rows[0] * (1 - part) + rows[1] * part)


def _between(levels: Sequence[float], value: float) -> tuple[int, int, float]:
    """Returns the two levels around a value, and how far it is from the first to the second."""
    high = min(bisect_right(levels, value), len(levels) - 1)
    low = max(0, high - 1)
    if high == low:
        return low, high, 0.0
    return low, high, min(1.0, max(0.0, (value - levels[low]) / (levels[high] - levels[low])))


def splits(compute: Sequence[float] = COMPUTE_LEVELS, memory: Sequence[float] = MEMORY_LEVELS) -> list[Split]:
    """Returns every split of one GPU whose first share is on the grid. All of it is given away."""
    return [
        Split(
            first=Share(compute=part, memory=room),
            second=Share(compute=round(1 - part, 9), memory=round(1 - room, 9)),  # 1 - 0.8 is less than 0.2
        )
        for part in compute
        for room in memory
        if part < 1 and room < 1
    ]
