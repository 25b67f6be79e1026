"""The level's whole decision for two pipelines: serial, or shared, and how far to look ahead.

Owns the choice and the shipped policy. Each way is played on the last iteration with the table's slowdowns,
and the best prediction wins. Pipelines stay serial unless sharing is predicted to pay, and always without a
table.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rose.scheduler.gpu.lookahead import LookAhead
from rose.scheduler.gpu.merge import Merge, WorkerTail, decide_merge
from rose.scheduler.gpu.player import Player
from rose.scheduler.gpu.slowdown import SlowdownTable, splits
from rose.scheduler.gpu.substages import Iteration, SubStageKind

WINDOWS = (1, 3)
PREDICTED_ITERATIONS = 4
MIN_GAIN = 1.02
"""Smaller gains are within the table's error."""


class Multiplexing(LookAhead):
    """The shipped policy: looks ahead, merges tails, and balances elastic phases."""

    def __init__(
        self,
        table: SlowdownTable,
        window: int,
        least_memory: Sequence[Mapping[SubStageKind, float]] = ({}, {}),
        *,
        merges: bool = True,
        is_balanced: bool = True,
    ) -> None:
        super().__init__(table, window, least_memory, splits(table.compute, table.memory))
        self._merges = merges
        self._is_balanced = is_balanced

    @property
    def is_balanced(self) -> bool:
        return self._is_balanced

    def merge(
        self, tails: Sequence[WorkerTail], pipeline: Iteration, beside_s: float, is_elastic: bool
    ) -> Merge | None:
        if not self._merges:
            return None
        return decide_merge(
            tails,
            pipeline.cost,
            num_workers=pipeline.num_workers,
            beside_s=beside_s,
            is_elastic=is_elastic and self._is_balanced,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPlan:
    """`window`: None for one iteration after the other. `gains`: each window's prediction over that."""

    window: int | None
    gains: Mapping[int, float]

    @property
    def gain(self) -> float:
        return self.gains[self.window] if self.window is not None else 1.0


def choose(
    pair: tuple[Iteration, Iteration],
    table: SlowdownTable,
    least_memory: Sequence[Mapping[SubStageKind, float]] = ({}, {}),
) -> WindowPlan:
    """Returns the way with the best predicted aggregate throughput."""
    graphs = [[each] * (1 + PREDICTED_ITERATIONS) for each in pair]
    gains = {
        window: Player(graphs, table, Multiplexing(table, window, least_memory)).play().gain
        for window in WINDOWS
    }
    best = max(gains, key=lambda window: gains[window])
    return WindowPlan(window=best if gains[best] >= MIN_GAIN else None, gains=gains)
