"""The demo's figures: from records to the numbers that the issue asks for, and a verdict on each.

Owns percentiles, attainment, ratios and the benchmark JSON. Promises that a figure nobody measured
is null, never zero, and that an unanswered request misses every SLO. Never measures or draws.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rose.demo.environment import Environment, collect_env
from rose.demo.records import UNDER_ROSE, DemoResult, PhaseName, PhaseResult, RequestRecord

__all__ = [
    "MAX_BUSY_SHARE",
    "MIN_ATTAINMENT",
    "MIN_HARVEST",
    "MIN_REWARD_RISE",
    "DemoFigures",
    "Environment",
    "Figure",
    "Verdict",
    "attainment",
    "busy_share",
    "collect_env",
    "compute_figures",
    "percentile",
    "pooled_requests",
    "reward_ends",
    "rollout_rate",
    "tpots_s",
    "ttfts_s",
]

BASELINES = (PhaseName.NAIVE, PhaseName.ALTERNATE)
MAX_BUSY_SHARE = 0.35
"""The harvest criterion speaks of serving that is at most this busy."""
MIN_HARVEST = 0.6
MIN_ATTAINMENT = 0.99
MIN_REWARD_RISE = 0.3
MIN_REWARD_STEPS = 40
"""Training steps within which a reward has to have risen; a run cut off before proves nothing either way."""
REWARD_WINDOW = 5
"""Steps averaged at either end of the run: one step's reward is noise."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How one criterion came out; ``is_met`` is None when the run can't tell."""

    title: str
    is_met: bool | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoFigures:
    """All figures of one run with where they were measured."""

    env: Environment
    figures: tuple[Figure, ...]

    def __getitem__(self, name: str) -> Figure:
        for figure in self.figures:
            if figure.name == name:
                return figure
        raise KeyError(name)

    def value(self, name: str) -> float | None:
        """The figure's value, None when it wasn't measured."""
        return self[name].value

    def to_json(self) -> dict[str, Any]:
        """The benchmark object: ``env`` and ``figures``."""
        return {"env": self.env.to_json(), "figures": [asdict(figure) for figure in self.figures]}


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear interpolation between closest ranks; None without values."""
    if not values:
        return None
    if not 0 <= percent <= 100:
        raise ValueError(f"a percentile lies in 0..100, got {percent}")
    ranked = sorted(values)
    position = (len(ranked) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (position - low)


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


def pooled_requests(windows: Iterable[PhaseResult]) -> list[RequestRecord]:
    """All requests of several windows."""
    return [request for window in windows for request in window.requests]


def rollout_rate(windows: Sequence[PhaseResult]) -> float | None:
    """Rollout tokens per second over all windows."""
    seconds = sum(window.duration_s for window in windows)
    return sum(window.rollout_tokens for window in windows) / seconds if seconds > 0 else None


def busy_share(windows: Sequence[PhaseResult]) -> float | None:
    """Share of the time in which the serving engine ran steps."""
    seconds = sum(window.duration_s for window in windows)
    return sum(window.serving_busy_s for window in windows) / seconds if seconds > 0 else None


def worse_attainment(result: DemoResult, *phases: PhaseName) -> float | None:
    """The smaller one of two shares of these phases' requests: those that met the TTFT and the TPOT SLO."""
    requests = pooled_requests(result.windows(*phases))
    both = (attainment(requests, _ttft, result.slo.ttft_s), attainment(requests, _tpot, result.slo.tpot_s))
    return min((share for share in both if share is not None), default=None)


def compute_figures(result: DemoResult, env: Environment) -> DemoFigures:
    """All figures of a run; the order is the order of the printed table."""
    return DemoFigures(
        env=env,
        figures=(
            Figure(
                name="greedy_equal",
                value=_ratio(result.greedy_equal, result.greedy_compared),
                unit="share",
                target="== 1",
                peers={"outputs compared": result.greedy_compared},
            ),
            Figure(
                name="checksum_mismatches",
                value=result.checksum_mismatches if result.checksums_compared else None,
                unit="count",
                target="== 0",
                peers={"checksums compared": result.checksums_compared},
            ),
            *_attainment_figures(result),
            *_latency_figures(result),
            *_throughput_figures(result),
            *_training_figures(result),
            _wire_figure(result),
        ),
    )


def _attainment_figures(result: DemoResult) -> list[Figure]:
    """What co-location without ROSE and with it does to the SLOs: the demo's first sentence."""
    return [
        Figure(
            name="demo_naive_attainment",
            value=worse_attainment(result, PhaseName.NAIVE),
            unit="share",
            target="<= 0.9",
            peers={PhaseName.ALTERNATE.value: worse_attainment(result, PhaseName.ALTERNATE)},
        ),
        Figure(
            name="demo_rose_attainment",
            value=worse_attainment(result, *UNDER_ROSE),
            unit="share",
            target=f">= {MIN_ATTAINMENT}",
            peers={
                name.value: worse_attainment(result, name) for name in (PhaseName.SERVING_ALONE, *UNDER_ROSE)
            },
        ),
    ]


def _latency_figures(result: DemoResult) -> list[Figure]:
    limits = (("ttft", _ttft, result.slo.ttft_s), ("tpot", _tpot, result.slo.tpot_s))
    figures = []
    for name, latency, limit_s in limits:
        met = {
            phases[0]: attainment(pooled_requests(result.windows(*phases)), latency, limit_s)
            for phases in (UNDER_ROSE, (PhaseName.SERVING_ALONE,), (PhaseName.NAIVE,), (PhaseName.ALTERNATE,))
        }
        shares = [attainment(window.requests, latency, limit_s) for window in result.windows(*UNDER_ROSE)]
        figures.append(
            Figure(
                name=f"slo_attainment[{name}]",
                value=met.pop(PhaseName.ROSE),
                unit="share",
                target=f">= {MIN_ATTAINMENT}",
                peers={phase.value: share for phase, share in met.items()},
                spread=_spread(shares),
            )
        )
    for prefix, phases in (("", UNDER_ROSE), ("naive_", (PhaseName.NAIVE,))):
        for name, values in (("ttft", ttfts_s), ("tpot", tpots_s)):
            alone = percentile(values(pooled_requests(result.windows(PhaseName.SERVING_ALONE))), 99)
            p99 = percentile(values(pooled_requests(result.windows(*phases))), 99)
            each = [percentile(values(window.requests), 99) for window in result.windows(*phases)]
            figures.append(
                Figure(
                    name=f"{prefix}{name}_p99_ratio",
                    value=_ratio(p99, alone),
                    unit="x serving alone",
                    peers={"serving alone, s": alone, f"{phases[0].value}, s": p99},
                    spread=_spread([_ratio(one, alone) for one in each]),
                )
            )
    return figures


def _throughput_figures(result: DemoResult) -> list[Figure]:
    rates: dict[PhaseName, float | None] = {
        name: rollout_rate(result.windows(name)) for name in PhaseName if name != PhaseName.SERVING_ALONE
    }
    alone, rose = rates[PhaseName.ROLLOUT_ALONE], rates[PhaseName.ROSE]
    each = [rollout_rate([window]) for window in result.windows(PhaseName.ROSE)]
    others = {name.value: rates[name] for name in (PhaseName.ROLLOUT_ALONE, *BASELINES)}
    return [
        Figure(
            name="harvested_fraction",
            value=_ratio(rose, alone),
            unit="x rollout alone",
            target=f">= {MIN_HARVEST}",
            peers={name.value: _ratio(rates[name], alone) for name in BASELINES},
            spread=_spread([_ratio(one, alone) for one in each]),
        ),
        Figure(
            name="serving_busy_share",
            value=busy_share(result.windows(PhaseName.SERVING_ALONE)),
            unit="share",
            target=f"<= {MAX_BUSY_SHARE}",
            peers={"rose": busy_share(result.windows(PhaseName.ROSE))},
        ),
        Figure(name="rollout_tokens_per_s", value=rose, unit="tokens/s", peers=others, spread=_spread(each)),
    ]


def _training_figures(result: DemoResult) -> list[Figure]:
    first, last = reward_ends(result)
    target = f">= reward_first + {MIN_REWARD_RISE}"
    return [
        Figure(name="reward_first", value=first, unit="reward"),
        Figure(name="reward_last", value=last, unit="reward", target=target),
    ]


def reward_ends(result: DemoResult) -> tuple[float | None, float | None]:
    """Mean reward over the first and over the last steps; they never overlap. None below two steps."""
    means = [point.reward_mean for point in result.rewards]
    window = min(REWARD_WINDOW, len(means) // 2)
    if window == 0:
        return None, None
    return sum(means[:window]) / window, sum(means[-window:]) / window


def _wire_figure(result: DemoResult) -> Figure:
    deltas = [sync for sync in result.syncs if not sync.is_base]
    changed = sum(sync.num_changed for sync in deltas)
    return Figure(
        name="wire_bytes_per_changed_element",
        value=_ratio(sum(sync.wire_bytes for sync in deltas), changed),
        unit="bytes",
        peers={
            "coo": _ratio(sum(sync.coo_bytes for sync in deltas), changed),
            "dense": _ratio(sum(sync.dense_bytes for sync in deltas), changed),
        },
    )


def _ttft(request: RequestRecord) -> float | None:
    return request.ttft_s


def _tpot(request: RequestRecord) -> float | None:
    return request.tpot_s


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _spread(values: Sequence[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    return (min(known), max(known)) if len(known) > 1 else None
