"""Turns runs of the sharing policies into percentiles, attainment, harvest and figures.

Owns the figures' names and targets, for simulated and for measured runs alike; a figure says which it is.
Runs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Protocol

import numpy as np

from lib.harness import median_figure
from rose.measure.figures import Figure
from rose.types import SLO

ALONE, AGAIN, DUAL = "serving alone", "serving alone, again", "dual"
"""Alone a second time: how far two windows of the same requests are from each other without any rollout."""
MAX_TTFT_P99_RATIO = {True: "<= 1.05", False: "<= 1.15"}
"""Simulated, measured."""
# ROSE §6.2: P99 of dual relative to a single objective.
PAPER_DUAL = {
    "tpot-only": {"ttft": 1 - 0.037, "tpot": 1 - 0.034},
    "ttft-only": {"ttft": 1 - 0.284, "tpot": 1 - 0.763},
}


class Served(Protocol):
    """One serving request, measured or simulated; None for what never happened."""

    @property
    def ttft_s(self) -> float | None: ...

    @property
    def tpot_s(self) -> float | None: ...

    @property
    def max_itl_s(self) -> float | None: ...

    @property
    def is_complete(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class PolicyRun:
    """One policy on the same samples of the traffic as every other; lists are per repeat."""

    requests: Sequence[Sequence[Served]]
    slo: SLO
    harvest: list[float]
    """Rollout tokens/s over those of rollouts alone."""
    free: list[float]
    """Share of the time that serving left."""
    is_simulated: bool

    @cached_property
    def ttfts_s(self) -> list[list[float]]:
        """Per repeat."""
        return [[r.ttft_s for r in repeat if r.ttft_s is not None] for repeat in self.requests]

    @cached_property
    def tpots_s(self) -> list[list[float]]:
        """Per repeat: of answers that came to their end."""
        return [
            [r.tpot_s for r in repeat if r.is_complete and r.tpot_s is not None] for repeat in self.requests
        ]

    def p99(self, kind: str) -> list[float]:
        """Per repeat, of "ttft" or "tpot"."""
        return [quantile(values, 99) for values in (self.ttfts_s if kind == "ttft" else self.tpots_s)]

    def pooled(self, kind: str, percent: float) -> float:
        """Over all repeats, seconds."""
        return quantile(
            [v for values in (self.ttfts_s if kind == "ttft" else self.tpots_s) for v in values], percent
        )

    def attainment(self, kind: str, slo: SLO | None = None) -> float:
        """Share of all requests within the SLO; one that was not answered misses it."""
        requests = [r for repeat in self.requests for r in repeat]
        limits = slo if slo is not None else self.slo
        return sum(_is_met(kind, r, limits) for r in requests) / len(requests)

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        target: str | None = None,
        peers: dict[str, float | None] | None = None,
    ) -> Figure:
        """One number without a spread."""
        made = Figure(name=name, value=value, unit=unit, target=target, peers=peers if peers else {})
        return self.marked(made)

    def marked(self, figure: Figure) -> Figure:
        """Returns the figure, marked where it is simulated."""
        return replace(figure, kind="simulated") if self.is_simulated else figure


def _is_met(kind: str, r: Served, slo: SLO) -> bool:
    if kind == "ttft":
        return r.ttft_s is not None and r.ttft_s <= slo.ttft_s
    latency_s = r.max_itl_s if kind == "itl" else r.tpot_s
    return r.is_complete and (latency_s is None or latency_s <= slo.tpot_s)


def case_figures(case: str, runs: dict[str, PolicyRun], *, is_heavy: bool = False) -> list[Figure]:
    """Attainment, harvest and tail ratios of one workload. ``is_heavy``: serving takes most of the time."""
    dual, alone = runs[DUAL], runs[ALONE]
    figures = [
        attainment_figure(f"slo_attainment[{kind}, {case}]", runs, kind) for kind in ("ttft", "tpot", "itl")
    ]
    peers: dict[str, float | None] = {
        name: mean(run.harvest) for name, run in runs.items() if name not in (ALONE, AGAIN)
    }
    target = None if is_heavy else ">= 0.80"
    of_free = [h / f for h, f in zip(dual.harvest, dual.free, strict=True)]
    harvested = median_figure(
        f"harvested_fraction[{case}]", dual.harvest, "of rollout alone", target=target, peers=peers
    )
    free = median_figure(f"harvested_free_fraction[{case}]", of_free, "of free time", target=">= 0.97")
    figures += [dual.marked(harvested), dual.marked(free)]
    paper: dict[str, float | None] = {"paper": 1.07, "Prism": 3.1, "Valve": 1.05}
    max_ratio = MAX_TTFT_P99_RATIO[dual.is_simulated]
    figures.append(p99_ratio_figure(f"ttft_p99_ratio[{case}]", dual, alone, "ttft", max_ratio, paper))
    others: dict[str, float | None] = {
        name: _p99_ratio(run, alone, "tpot") for name, run in runs.items() if name in ("alternate", "naive")
    }
    figures.append(p99_ratio_figure(f"tpot_p99_ratio[{case}]", dual, alone, "tpot", None, others))
    if "idle only" not in runs:
        return figures
    return figures + invisible_figures(case, runs["idle only"], alone, runs.get(AGAIN))


def deployment_figures(case: str, runs: dict[str, PolicyRun], ours: str, kind: str) -> list[Figure]:
    """An instance that has one objective, or is idle for most of the time. ``ours``: the policy for it."""
    run, alone = runs[ours], runs[ALONE]
    peers: dict[str, float | None] = {
        name: mean(each.harvest) for name, each in runs.items() if name != ALONE
    }
    of_free = [h / f for h, f in zip(run.harvest, run.free, strict=True)]
    target = MAX_TTFT_P99_RATIO[run.is_simulated] if kind == "ttft" else None
    return [
        attainment_figure(f"slo_attainment[{kind}, {case}]", runs, kind, ours=ours),
        run.marked(
            median_figure(f"harvested_fraction[{case}]", run.harvest, "of rollout alone", peers=peers)
        ),
        run.marked(
            median_figure(f"harvested_free_fraction[{case}]", of_free, "of free time", target=">= 0.97")
        ),
        p99_ratio_figure(f"{kind}_p99_ratio[{case}]", run, alone, kind, target, {}),
    ]


def attainment_figure(
    name: str, runs: dict[str, PolicyRun], kind: str, slo: SLO | None = None, ours: str = DUAL
) -> Figure:
    """The gate's, held against its target only where serving alone reaches it."""
    peers: dict[str, float | None] = {
        each: run.attainment(kind, slo) for each, run in runs.items() if each != ours
    }
    is_reachable = runs[ALONE].attainment(kind, slo) >= 0.99
    value = runs[ours].attainment(kind, slo)
    return runs[ours].figure(name, value, "share", ">= 0.99" if is_reachable else None, peers)


def invisible_figures(case: str, idle: PolicyRun, alone: PolicyRun, again: PolicyRun | None) -> list[Figure]:
    """The mode that harvests idle time only, beside what the noise does to the same ratio."""
    share = [h / f for h, f in zip(idle.harvest, idle.free, strict=True)]
    of_idle = median_figure(f"invisible_idle_fraction[{case}]", share, "of idle time", target=">= 0.95")
    figures = []
    for kind, target, valve in (("ttft", "<= 1.10", 1.05), ("tpot", "<= 1.05", 1.02)):
        peers: dict[str, float | None] = {"Valve": valve}
        if again is not None:
            peers[AGAIN] = _p99_ratio(again, alone, kind)
        figures.append(
            p99_ratio_figure(f"invisible_p99_ratio[{kind}, {case}]", idle, alone, kind, target, peers)
        )
    return [*figures, idle.marked(of_idle)]


def tight_figures(case: str, runs: dict[str, PolicyRun], slo: SLO) -> list[Figure]:
    """A TPOT SLO of a few decode steps."""
    figures = [
        attainment_figure(f"tight_attainment[{kind}, {case}]", runs, kind, slo) for kind in ("ttft", "tpot")
    ]
    dual = runs[DUAL]
    harvest = median_figure(f"tight_harvest[{case}]", dual.harvest, "of rollout alone", target=">= 0.70")
    return [*figures, dual.marked(harvest)]


def frontier_figures(prefix: str, points: Sequence[PolicyRun], runs: dict[str, PolicyRun]) -> list[Figure]:
    """Returns what each allowed TPOT buys, beside alternation. ``prefix``: of the case, e.g. "8B, "."""
    alone_s = runs[ALONE].pooled("tpot", 99)
    curve = [(p.pooled("tpot", 99) / alone_s, mean(p.harvest)) for p in points]
    alternate = (runs["alternate"].pooled("tpot", 99) / alone_s, mean(runs["alternate"].harvest))
    peers: dict[str, float | None] = {"alternation": alternate[1], "at its TPOT of": alternate[0]}
    figures = [
        runs[DUAL].figure(
            f"frontier[{prefix}TPOT P99 cap {cap:g}x]",
            harvest_at(curve, cap),
            "of rollout alone",
            target,
            peers,
        )
        for cap, target in ((2.0, ">= 0.60"), (4.5, ">= 0.75"))
    ]
    over = harvest_at(curve, alternate[0]) - alternate[1]
    name = "frontier_over_alternation" + (f"[{prefix.removesuffix(', ')}]" if prefix else "")
    return [*figures, runs[DUAL].figure(name, over, "more harvest", ">= 0", peers)]


def dual_best_figures(prefix: str, points: Sequence[PolicyRun], runs: dict[str, PolicyRun]) -> list[Figure]:
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
            name = f"dual_best[{kind}, {prefix}over {single}]"
            over = at / runs[single].pooled(kind, 99)
            figures.append(runs[DUAL].figure(name, over, "P99 ratio", "<= 1.02", peers))
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
    """Returns the arithmetic mean."""
    return sum(values) / len(values)


def _p99_ratio(run: PolicyRun, alone: PolicyRun, kind: str) -> float:
    return run.pooled(kind, 99) / alone.pooled(kind, 99)


def p99_ratio_figure(
    name: str, run: PolicyRun, alone: PolicyRun, kind: str, target: str | None, peers: dict[str, float | None]
) -> Figure:
    """Returns the ratio of the pooled percentiles; the spread is over the repeats."""
    ratios = [ours / theirs for ours, theirs in zip(run.p99(kind), alone.p99(kind), strict=True)]
    figure = run.marked(median_figure(name, ratios, "ratio", target=target, peers=peers))
    return replace(figure, value=_p99_ratio(run, alone, kind))
