"""Counts by upper bound, as Prometheus has them. Adding a value costs a binary search."""

import bisect
import itertools
from collections.abc import Sequence
from typing import Any


class Histogram:
    """Counts by upper bound, the last without one."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Counts one more value."""
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def sum(self) -> float:
        """The sum of all values."""
        return self._sum

    def buckets(self) -> list[tuple[str, int]]:
        """(bound, how many are not above it), the last bound "+Inf": as prometheus_client takes them."""
        bounds = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        return list(zip(bounds, itertools.accumulate(self._counts), strict=True))

    def to_json(self) -> dict[str, Any]:
        return {"bounds": list(self._bounds), "counts": self._counts, "sum": self._sum}
