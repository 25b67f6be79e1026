"""Slowdowns measured while two pipelines run: the splits that are still to be tried, and the table.

Owns the sums of each pair and split. A pair is in the table when each of its splits was measured for long
enough on both sides. Pure. Source: JigsawRL §4.2, with the pipelines' own steps in place of an offline grid.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rose.scheduler.gpu.slowdown import Share, SlowdownTable, Split
from rose.scheduler.gpu.substages import SubStageKind

ENOUGH_S = 0.25
ENOUGH_STEPS = 3
"""The least seconds and steps of each side of a pair."""


@dataclass(slots=True)
class _Sum:
    seconds: float = 0.0
    alone_s: float = 0.0
    num_steps: int = 0

    @property
    def is_enough(self) -> bool:
        return self.num_steps >= ENOUGH_STEPS and self.seconds >= ENOUGH_S


class MeasuredSlowdowns:
    """Measures at the shares of compute in ``levels``. Memory counts as halved, because only compute is
    split."""

    MEMORY = 0.5

    def __init__(self, hardware: str, levels: Sequence[float]) -> None:
        self._hardware = hardware
        self._levels = tuple(levels)
        self._sums: dict[tuple[SubStageKind, SubStageKind, float], _Sum] = {}

    def add(
        self, kind: SubStageKind, beside: SubStageKind, compute: float, seconds: float, alone_s: float
    ) -> None:
        """Adds a step of ``kind`` that took ``seconds``, and would take ``alone_s`` alone."""
        found = self._sums.setdefault((kind, beside, self._level(compute)), _Sum())
        found.seconds += seconds
        found.alone_s += alone_s
        found.num_steps += 1

    def to_try(self, one: SubStageKind, two: SubStageKind) -> Split | None:
        """Returns a split in which this pair has not run long enough; None if there is none."""
        for level in self._levels:
            rest = self._level(1 - level)
            if not (self._is_known(one, two, level) and self._is_known(two, one, rest)):
                return Split(
                    first=Share(compute=level, memory=self.MEMORY),
                    second=Share(compute=rest, memory=self.MEMORY),
                )
        return None

    def table(self) -> SlowdownTable:
        """Returns the slowdowns of all measured pairs. Other pairs run one after the other."""
        pairs = {(kind, beside) for kind, beside, _ in self._sums}
        return SlowdownTable(
            hardware=self._hardware,
            compute=self._levels,
            memory=(self.MEMORY,),
            entries={
                (kind, beside): tuple((self._slowdown(kind, beside, level),) for level in self._levels)
                for kind, beside in sorted(pairs)
                if all(self._is_known(kind, beside, level) for level in self._levels)
            },
        )

    def _level(self, compute: float) -> float:
        return min(self._levels, key=lambda level: abs(level - compute))

    def _is_known(self, kind: SubStageKind, beside: SubStageKind, level: float) -> bool:
        found = self._sums.get((kind, beside, level))
        return found is not None and found.is_enough

    def _slowdown(self, kind: SubStageKind, beside: SubStageKind, level: float) -> float:
        found = self._sums[kind, beside, level]
        return found.seconds / found.alone_s
