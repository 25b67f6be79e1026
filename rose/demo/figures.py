"""The demo's figures: from records to the numbers that the issue asks for, and a verdict on each.

Owns the figures' names and targets. Promises that a figure nobody measured is null, never zero. Never
measures or draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rose.demo.records import UNDER_ROSE, DemoResult, PhaseName
from rose.measure.environment import Environment
from rose.measure.figures import (
    Figure,
    attainment,
    percentile,
    pooled_requests,
    ratio,
    spread,
    to_json,
    tpot,
    tpots_s,
    ttft,
    ttfts_s,
)
from rose.measure.records import Window

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
        return to_json(self.env, self.figures)


def rollout_rate(windows: Sequence[Window]) -> float | None:
    """Rollout tokens per second over all windows."""
    seconds = sum(window.duration_s for window in windows)
    return sum(window.rollout_tokens for window in windows) / seconds if seconds > 0 else None


def busy_share(windows: Sequence[Window]) -> float | None:
    """Share of the time in which the serving engine ran steps."""
    seconds = sum(window.duration_s for window in windows)
    return sum(window.serving_busy_s for window in windows) / seconds if seconds > 0 else None


def worse_attainment(result: DemoResult, *phases: PhaseName) -> float | None:
    """The smaller one of two shares of these phases' requests: those that met the TTFT and the TPOT SLO."""
    requests = pooled_requests(result.windows(*phases))
    both = (attainment(requests, ttft, result.slo.ttft_s), attainment(requests, tpot, result.slo.tpot_s))
    return min((share for share in both if share is not None), default=None)


def compute_figures(result: DemoResult, env: Environment) -> DemoFigures:
    """All figures of a run; the order is the order of the printed table."""
    return DemoFigures(
        env=env,
        figures=(
            Figure(
                name="greedy_equal",
                value=ratio(result.greedy_equal, result.greedy_compared),
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
    limits = (("ttft", ttft, result.slo.ttft_s), ("tpot", tpot, result.slo.tpot_s))
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
                spread=spread(shares),
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
                    value=ratio(p99, alone),
                    unit="x serving alone",
                    peers={"serving alone, s": alone, f"{phases[0].value}, s": p99},
                    spread=spread([ratio(one, alone) for one in each]),
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
            value=ratio(rose, alone),
            unit="x rollout alone",
            target=f">= {MIN_HARVEST}",
            peers={name.value: ratio(rates[name], alone) for name in BASELINES},
            spread=spread([ratio(one, alone) for one in each]),
        ),
        Figure(
            name="serving_busy_share",
            value=busy_share(result.windows(PhaseName.SERVING_ALONE)),
            unit="share",
            target=f"<= {MAX_BUSY_SHARE}",
            peers={"rose": busy_share(result.windows(PhaseName.ROSE))},
        ),
        Figure(name="rollout_tokens_per_s", value=rose, unit="tokens/s", peers=others, spread=spread(each)),
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
        value=ratio(sum(sync.wire_bytes for sync in deltas), changed),
        unit="bytes",
        peers={
            "coo": ratio(sum(sync.coo_bytes for sync in deltas), changed),
            "dense": ratio(sum(sync.dense_bytes for sync in deltas), changed),
        },
    )
