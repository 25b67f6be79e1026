"""A benchmark's numbers: the figure, and the arithmetic from request records to figures.

Owns percentiles, serving's objectives, attainment, ratios and the benchmark JSON. Promises that a figure
which was not measured is null, never zero, and that an unanswered request misses every SLO. Never measures or
draws.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rose.measure.environment import Environment
from rose.measure.records import RequestRecord, Window
from rose.types import SLO

LATENCIES = ("ttft", "tpot")
TTFT_MEDIANS, TPOT_MEDIANS = 3.0, 2.0
"""Serving's objectives, in medians of serving alone: what an operator may promise who has measured it. The
first tokens of the largest bursts alone take twice the median."""


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


def latencies_s(requests: Iterable[RequestRecord], kind: str) -> list[float]:
    """Returns the "ttft" of every request with a token, or the "tpot" of every one with two."""
    found = (getattr(request, f"{kind}_s") for request in requests)
    return [seconds for seconds in found if seconds is not None]


def latency_s(requests: Iterable[RequestRecord], kind: str, percent: float) -> float | None:
    """Returns a percentile of the requests' "ttft" or "tpot"; None without answers."""
    return percentile(latencies_s(requests, kind), percent)


def objectives(alone: Sequence[RequestRecord]) -> SLO | None:
    """Returns serving's objectives on this machine, from requests to serving alone; None without answers."""
    ttft_s, tpot_s = (latency_s(alone, kind, 50) for kind in LATENCIES)
    if ttft_s is None or tpot_s is None:
        return None
    return SLO(ttft_s=TTFT_MEDIANS * ttft_s, tpot_s=TPOT_MEDIANS * tpot_s)


def attainment(requests: Sequence[RequestRecord], kind: str, slo: SLO | None) -> float | None:
    """Returns the share of requests within the objective for "ttft" or "tpot"; None without requests or
    objectives.

    Incomplete requests miss it. A complete request of one token has no TPOT to miss.
    """
    if not requests or slo is None:
        return None
    limit_s, met = getattr(slo, f"{kind}_s"), 0
    for request in requests:
        seconds = getattr(request, f"{kind}_s")
        met += request.is_complete and (seconds is None or seconds <= limit_s)
    return met / len(requests)


def worse_attainment(requests: Sequence[RequestRecord], slo: SLO | None) -> float | None:
    """Returns the smaller one of the shares of requests within the TTFT and within the TPOT objective."""
    shares = (attainment(requests, kind, slo) for kind in LATENCIES)
    return min((share for share in shares if share is not None), default=None)


def pooled_requests(windows: Iterable[Window]) -> list[RequestRecord]:
    """All requests of several windows."""
    return [request for window in windows for request in window.requests]


def ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def spread(values: Sequence[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if len(known) > 1 else None
