"""What simulated runs of the sharing policies come to: percentiles, attainment, harvest, and the figures.

Owns the figures' names and targets; each carries kind "simulated". Runs nothing.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from harness import median_figure

from rose.admission.twin.gpu import TwinOutcome
from rose.admission.twin.serving import ServedRequest
from rose.demo.figures import Figure
from rose.types import SLO

DENSITIES = (1.0, 1.5, 2.0)
HEAVY = "heavy"
ALONE = "serving alone"
# ROSE §6.2: P99 of dual relative to a single objective.
PAPER_DUAL = {
    "tpot-only": {"ttft": 1 - 0.037, "tpot": 1 - 0.034},
    "ttft-only": {"ttft": 1 - 0.284, "tpot": 1 - 0.763},
}
# ROSE Table 5: average rollout time relative to density 1.
PAPER_ROLLOUT_TIME = {
    "8B": {1.5: 511.7 / 496.3, 2.0: 569.9 / 496.3},
    "32B": {1.5: 977.7 / 960.1, 2.0: 989.9 / 960.1},
}


class Run:
    """One policy on the same samples of the traffic as every other."""

    def __init__(self, outcomes: Sequence[TwinOutcome], slo: SLO, alone_rates: Sequence[float]) -> None:
        self._outcomes = outcomes
        self._slo = slo
        self.harvest = [
            outcome.generated_tokens / outcome.horizon_s / rate
            for outcome, rate in zip(outcomes, alone_rates, strict=True)
        ]
        self.free = [1 - outcome.serving_share for outcome in outcomes]

    @cached_property
    def ttfts_s(self) -> list[list[float]]:
        """Per repeat."""
        return [[r.ttft_s for r in o.requests if r.ttft_s is not None] for o in self._outcomes]

    @cached_property
    def tpots_s(self) -> list[list[float]]:
        """Per repeat: of answers that came to their end."""
        return [[r.tpot_s for r in o.requests if r.tpot_s is not None] for o in self._outcomes]

    def p99(self, kind: str) -> list[float]:
        """Per repeat, of "ttft" or "tpot"."""
        return [quantile(values, 99) for values in (self.ttfts_s if kind == "ttft" else self.tpots_s)]

    def pooled(self, kind: str, percent: float) -> float:
        """Over all repeats, seconds."""
        return quantile(
            [v for values in (self.ttfts_s if kind == "ttft" else self.tpots_s) for v in values], percent
        )

    def attainment(self, kind: str) -> float:
        """Share of all requests within the SLO; one that was not answered misses it."""
        requests = [r for outcome in self._outcomes for r in outcome.requests]
        return sum(self._is_met(kind, r) for r in requests) / len(requests)

    def _is_met(self, kind: str, r: ServedRequest) -> bool:
        if kind == "ttft":
            return r.ttft_s is not None and r.ttft_s <= self._slo.ttft_s
        if r.last_token_s is None:
            return False
        if kind == "itl":
            return r.max_gap_s <= self._slo.tpot_s
        return r.tpot_s is None or r.tpot_s <= self._slo.tpot_s


def case_figures(case: str, runs: dict[str, Run]) -> list[Figure]:
    """Attainment, harvest and tail ratios of one workload."""
    dual, alone = runs["dual"], runs[ALONE]
    figures = [
        one(f"slo_attainment[{kind}, {case}]", dual.attainment(kind), "share", ">= 0.99", runs, kind)
        for kind in ("ttft", "tpot", "itl")
    ]
    peers: dict[str, float | None] = {name: mean(run.harvest) for name, run in runs.items() if name != ALONE}
    # Under heavy load serving itself takes more of the time.
    target = None if HEAVY in case else ">= 0.80"
    of_free = [h / f for h, f in zip(dual.harvest, dual.free, strict=True)]
    figures += [
        simulated(
            median_figure(
                f"harvested_fraction[{case}]", dual.harvest, "of rollout alone", target=target, peers=peers
            )
        ),
        simulated(
            median_figure(f"harvested_free_fraction[{case}]", of_free, "of free time", target=">= 0.97")
        ),
        _ratio(
            f"ttft_p99_ratio[{case}]",
            dual,
            alone,
            "ttft",
            "<= 1.05",
            {"paper": 1.07, "Prism": 3.1, "Valve": 1.05},
        ),
        _ratio(
            f"tpot_p99_ratio[{case}]",
            dual,
            alone,
            "tpot",
            None,
            {"alternate": _p99_ratio(runs["alternate"], alone, "tpot")},
        ),
    ]
    return figures + (invisible_figures(case, runs["idle only"], alone) if "idle only" in runs else [])


def invisible_figures(case: str, idle: Run, alone: Run) -> list[Figure]:
    """The mode that harvests idle time only."""
    share = [h / f for h, f in zip(idle.harvest, idle.free, strict=True)]
    return [
        _ratio(f"invisible_p99_ratio[ttft, {case}]", idle, alone, "ttft", "<= 1.10", {"Valve": 1.05}),
        _ratio(f"invisible_p99_ratio[tpot, {case}]", idle, alone, "tpot", "<= 1.05", {"Valve": 1.02}),
        simulated(median_figure(f"invisible_idle_fraction[{case}]", share, "of idle time", target=">= 0.95")),
    ]


def trend_figures(pair: str, by_density: Sequence[dict[str, Run]]) -> list[Figure]:
    """Table 5: rollout time and tails grow with density, within the SLO."""
    first = by_density[0]["dual"]
    figures = []
    for density, runs in list(zip(DENSITIES, by_density, strict=True))[1:]:
        paper: dict[str, float | None] = {"paper": PAPER_ROLLOUT_TIME[pair][density]}
        value = mean(first.harvest) / mean(runs["dual"].harvest)
        figures.append(
            plain(f"rollout_time[{pair}, density {density:g} over 1]", value, "ratio", None, paper)
        )
    return figures


def dual_best_figures(pair: str, points: Sequence[Run], runs: dict[str, Run]) -> list[Figure]:
    """The gate's tails over a single objective's, where its TPOT target gives it that one's harvest.

    ROSE Figure 9 compares at about equal rollout time; the gate's place on its frontier is a setting.
    """
    figures = []
    for single in ("ttft-only", "tpot-only"):
        harvest = mean(runs[single].harvest)
        for kind in ("ttft", "tpot"):
            curve = sorted((mean(point.harvest), point.pooled(kind, 99)) for point in points)
            harvests, tails_s = ([point[i] for point in curve] for i in (0, 1))
            at = float(np.interp(harvest, harvests, tails_s))
            peers: dict[str, float | None] = {"at harvest": harvest, "paper": PAPER_DUAL[single][kind]}
            name = f"dual_best[{kind}, {pair}, over {single}]"
            figures.append(plain(name, at / runs[single].pooled(kind, 99), "P99 ratio", "<= 1.02", peers))
    return figures


def harvest_at(curve: Sequence[tuple[float, float]], cap: float) -> float:
    """The most harvest at a TPOT ratio of at most `cap`, straight lines between the points run."""
    points = sorted(curve)
    below = [harvest for ratio, harvest in points if ratio <= cap]
    best = max(below, default=0.0)
    for (left, low), (right, high) in pairwise(points):
        if left <= cap < right:
            best = max(best, low + (high - low) * (cap - left) / (right - left))
    return best


def quantile(values: Sequence[float], percent: float) -> float:
    """NaN without values: nothing was answered."""
    return float(np.percentile(values, percent)) if values else float("nan")


def mean(values: Sequence[float]) -> float:
    """Arithmetic."""
    return sum(values) / len(values)


def _p99_ratio(run: Run, alone: Run, kind: str) -> float:
    return run.pooled(kind, 99) / alone.pooled(kind, 99)


def _ratio(
    name: str, run: Run, alone: Run, kind: str, target: str | None, peers: dict[str, float | None]
) -> Figure:
    ratios = [ours / theirs for ours, theirs in zip(run.p99(kind), alone.p99(kind), strict=True)]
    figure = simulated(median_figure(name, ratios, "ratio", target=target, peers=peers))
    return replace(figure, value=_p99_ratio(run, alone, kind))


def one(name: str, value: float, unit: str, target: str, runs: dict[str, Run], kind: str) -> Figure:
    peers: dict[str, float | None] = {
        each: run.attainment(kind) for each, run in runs.items() if each != "dual"
    }
    # Where serving alone misses it nobody can reach it.
    reachable = runs[ALONE].attainment(kind) >= 0.99
    return plain(name, value, unit, target if reachable else None, peers)


def plain(name: str, value: float, unit: str, target: str | None, peers: dict[str, float | None]) -> Figure:
    return Figure(name=name, value=value, unit=unit, target=target, peers=peers, kind="simulated")


def simulated(figure: Figure) -> Figure:
    return replace(figure, kind="simulated")
