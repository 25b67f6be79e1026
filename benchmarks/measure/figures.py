"""A benchmark's numbers: the figure, and the arithmetic from request records to figures.

Owns percentiles, attainment, ratios and the benchmark JSON. Promises that a figure nobody measured is null,
never zero, and that an unanswered request misses every SLO. Never measures or draws.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rose.measure.environment import Environment
from rose.measure.records import RequestRecord, Window


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of a benchmark, in the project's format."""

    name: str
    value: float | None
    unit: str
    target: str | None = None
    kind: str = "measured"
    peers: dict[str, float | None] = field(default_factory=dict)
    spread: tuple[float, float] | None = None
    """Smallest and largest value over the windows, when there were several."""


def to_json(env: Environment, figures: Iterable[Figure]) -> dict[str, Any]:
    """Returns the benchmark object: ``env`` and ``figures``."""
    return {"env": env.to_json(), "figures": [asdict(figure) for figure in figures]}


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear interpolation between closest ranks; None without values."""
    return float(np.percentile(values, percent)) if values else None


def ttfts_s(requests: Iterable[RequestRecord]) -> list[float]:
    """TTFT of every request that got a first token."""
    return [r.ttft_s for r in requests if r.ttft_s is not None]


def tpots_s(requests: Iterable[RequestRecord]) -> list[float]:
    """Mean TPOT of every request with at least two tokens."""
    return [r.tpot_s for r in requests if r.tpot_s is not None]


def attainment(
    requests: Sequence[RequestRecord], latency: Callable[[RequestRecord], float | None], limit_s: float
) -> float | None:
    """Share within the limit. Incomplete requests miss; a complete one-token request has no TPOT to miss."""
    if not requests:
        return None
    met = 0
    for request in requests:
        value = latency(request)
        met += request.is_complete and (value is None or value <= limit_s)
    return met / len(requests)


def pooled_requests(windows: Iterable[Window]) -> list[RequestRecord]:
    """All requests of several windows."""
    return [request for window in windows for request in window.requests]


def ttft(request: RequestRecord) -> float | None:
    return request.ttft_s


def tpot(request: RequestRecord) -> float | None:
    return request.tpot_s


def ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def spread(values: Sequence[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if len(known) > 1 else None
