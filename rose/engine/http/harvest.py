"""What rollouts have computed beside serving, over any part of the last hour.

Owns readings of the board's counters, which start when the board is made. Never writes to the board.
"""

from collections import deque
from dataclasses import dataclass

from rose.admission.board_snapshot import BoardSnapshot
from rose.messages import Harvest


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    at_s: float
    tokens: int
    rollout_s: float
    serving_s: float


class HarvestLog:
    """The readings of one board, oldest first; the latest ``num_readings`` are kept."""

    def __init__(self, num_readings: int) -> None:
        self._readings: deque[_Reading] = deque(maxlen=num_readings)

    def add(self, seen: BoardSnapshot) -> None:
        """Adds a reading of the counters."""
        self._readings.append(
            _Reading(
                at_s=seen.taken_s,
                tokens=seen.rollout_tokens,
                rollout_s=seen.rollout.busy_s,
                serving_s=seen.serving.busy_s,
            )
        )

    def since(self, began_s: float) -> Harvest | None:
        """Returns what was computed since the last reading before ``began_s`` (time.monotonic), or since the
        first reading if there is none before. Returns None with fewer than two readings."""
        if len(self._readings) < 2:
            return None
        first, last = self._readings[0], self._readings[-1]
        for reading in self._readings:
            if reading.at_s > began_s:
                break
            first = reading
        return Harvest(
            seconds=last.at_s - first.at_s,
            tokens=last.tokens - first.tokens,
            rollout_s=last.rollout_s - first.rollout_s,
            serving_s=last.serving_s - first.serving_s,
        )
