"""The simulated half of bench_slo: GPU-scale pairs, the shipped gate, every baseline. Nothing is measured.

Owns the simulated workloads and the figures made of them; each carries kind "simulated".
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
from harness import median_figure
from rich.console import Console
from rich.table import Table

from rose.admission.gate import GateSettings
from rose.admission.twin.gpu import TwinGpu, TwinOutcome
from rose.admission.twin.pairs import PAIR_8B, PAIR_32B, Pair
from rose.admission.twin.serving import Arrival
from rose.demo.figures import Figure
from rose.demo.trace import TraceRow
from rose.types import SLO, GateMode

RATE_RPS = 1.0
"""Of one GPU at density 1: serving alone then hardly queues, as in an overprovisioned cluster."""
DENSITIES = (1.0, 1.5, 2.0)
BURST = "burst"
"""5 s at four times the rate of density 1, then 15 s of silence."""
BURST_ON_S, BURST_PERIOD_S = 5.0, 20.0
MAX_PROMPT_TOKENS = 8192
TIGHT_STEPS = 5.0
FRONTIER_TARGETS = (1.8, 2.0, 2.2, 2.4, 2.6, 3.0, 4.0, 5.0, 5.7, 6.4)
"""TPOT targets of the frontier, in decode steps."""
ALONE = "serving alone"
MODES = {
    "naive": GateMode.OFF,
    "alternate": GateMode.ALTERNATE,
    "idle only": GateMode.IDLE,
    "ttft-only": GateMode.TTFT_ONLY,
    "tpot-only": GateMode.TPOT_ONLY,
    "equations": GateMode.EQUATIONS,
    "dual": GateMode.DUAL,
}
# ROSE Table 5: average rollout time relative to density 1.
PAPER_ROLLOUT_TIME = {
    "8B": {1.5: 511.7 / 496.3, 2.0: 569.9 / 496.3},
    "32B": {1.5: 977.7 / 960.1, 2.0: 989.9 / 960.1},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How much to simulate."""

    horizon_s: float
    repeats: int
    seed: int


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
        slo = self._slo
        met = {
            "ttft": lambda r: r.ttft_s is not None and r.ttft_s <= slo.ttft_s,
            "tpot": lambda r: r.last_token_s is not None and (r.tpot_s or 0.0) <= slo.tpot_s,
            "itl": lambda r: r.last_token_s is not None and r.max_gap_s <= slo.tpot_s,
        }[kind]
        return sum(map(met, requests)) / len(requests)


class TwinBench:
    """Runs policies on samples of a trace; remembers what rollouts alone reach."""

    def __init__(self, trace: Sequence[TraceRow], sampling: Sampling, console: Console) -> None:
        self._trace = trace
        self._sampling = sampling
        self._console = console
        self._alone_rates: dict[str, list[float]] = {}

    def figures(self) -> list[Figure]:
        """Everything, pair by pair."""
        figures: list[Figure] = []
        for pair in (PAIR_8B, PAIR_32B):
            cases = {f"{pair.name}, density {d:g}": self._policies(pair, self._traffic(d)) for d in DENSITIES}
            cases[f"{pair.name}, {BURST}"] = self._policies(pair, self._bursts())
            for case, runs in cases.items():
                self._print(case, runs)
                figures += case_figures(case, runs)
            figures += trend_figures(pair.name, list(cases.values())[: len(DENSITIES)])
            figures += self._tight(pair) + self._frontier(pair, cases[f"{pair.name}, density 1"])
        return figures

    def run(
        self, pair: Pair, gate: GateSettings, samples: Sequence[list[Arrival]], *, rollouts: bool = True
    ) -> Run:
        """One policy over all samples."""
        outcomes = [
            TwinGpu(
                pair,
                gate,
                arrivals,
                horizon_s=self._sampling.horizon_s,
                seed=self._sampling.seed + index,
                has_rollouts=rollouts,
            ).run()
            for index, arrivals in enumerate(samples)
        ]
        return Run(outcomes, gate.slo, self._rollouts_alone(pair))

    def _policies(
        self, pair: Pair, samples: Sequence[list[Arrival]], slo: SLO | None = None
    ) -> dict[str, Run]:
        gate = GateSettings(slo=slo if slo is not None else pair.slo)
        runs = {ALONE: self.run(pair, gate, samples, rollouts=False)}
        return runs | {
            name: self.run(pair, replace(gate, mode=mode), samples) for name, mode in MODES.items()
        }

    def _rollouts_alone(self, pair: Pair) -> list[float]:
        if pair.name not in self._alone_rates:
            naive = GateSettings(slo=pair.slo, mode=GateMode.OFF)
            horizon_s = self._sampling.horizon_s
            self._alone_rates[pair.name] = [
                TwinGpu(pair, naive, [], horizon_s=horizon_s, seed=self._sampling.seed + i)
                .run()
                .generated_tokens
                / horizon_s
                for i in range(self._sampling.repeats)
            ]
        return self._alone_rates[pair.name]

    def _tight(self, pair: Pair) -> list[Figure]:
        slo = SLO(ttft_s=pair.slo.ttft_s, tpot_s=TIGHT_STEPS * pair.decode_step_s)
        runs = self._policies(pair, self._traffic(1.0), slo)
        case = f"{pair.name}, TPOT SLO {1e3 * slo.tpot_s:.0f} ms"
        self._print(case, runs)
        figures = [
            _one(
                f"tight_attainment[{kind}, {case}]",
                runs["dual"].attainment(kind),
                "share",
                ">= 0.99",
                runs,
                kind,
            )
            for kind in ("ttft", "tpot")
        ]
        harvest = median_figure(
            f"tight_harvest[{case}]", runs["dual"].harvest, "of rollout alone", target=">= 0.70"
        )
        return [*figures, _simulated(harvest)]

    def _frontier(self, pair: Pair, runs: dict[str, Run]) -> list[Figure]:
        """What each allowed TPOT buys at density 1; the gate beside single objectives at equal harvest."""
        samples, alone_s = self._traffic(1.0), runs[ALONE].pooled("tpot", 99)
        points = []
        for steps in FRONTIER_TARGETS:
            gate = GateSettings(slo=pair.slo, tpot_target_s=steps * pair.decode_step_s)
            points.append(self.run(pair, gate, samples))
        points.append(runs["dual"])
        curve = [(p.pooled("tpot", 99) / alone_s, mean(p.harvest)) for p in points]
        self._print_curve(pair.name, curve)
        alternate = (runs["alternate"].pooled("tpot", 99) / alone_s, mean(runs["alternate"].harvest))
        peers = {"alternation": alternate[1], "at its TPOT of": alternate[0]}
        figures = [
            _plain(
                f"frontier[{pair.name}, TPOT P99 cap {cap:g}x]",
                harvest_at(curve, cap),
                "of rollout alone",
                t,
                peers,
            )
            for cap, t in ((2.0, ">= 0.60"), (4.5, ">= 0.75"))
        ]
        over = harvest_at(curve, alternate[0]) - alternate[1]
        figures.append(_plain(f"frontier_over_alternation[{pair.name}]", over, "more harvest", ">= 0", peers))
        return figures + dual_best_figures(pair.name, points, runs)

    # Traffic ------------------------------------------------------------------------------------------

    def _traffic(self, density: float) -> list[list[Arrival]]:
        horizon_s = self._sampling.horizon_s
        return [
            sample(self._trace, round(RATE_RPS * density * horizon_s), horizon_s, self._sampling.seed + i)
            for i in range(self._sampling.repeats)
        ]

    def _bursts(self) -> list[list[Arrival]]:
        """The same requests as at density 1, their arrivals pressed into the bursts."""

        def pressed(at_s: float) -> float:
            period, within = divmod(at_s, BURST_PERIOD_S)
            return period * BURST_PERIOD_S + within * BURST_ON_S / BURST_PERIOD_S

        return [[replace(a, at_s=pressed(a.at_s)) for a in arrivals] for arrivals in self._traffic(1.0)]

    # Tables -------------------------------------------------------------------------------------------

    def _print(self, case: str, runs: dict[str, Run]) -> None:
        table = Table(title=f"SIMULATED: {case}")
        for column in (
            "policy",
            "TTFT P50/P95/P99 ms",
            "TPOT P50/P95/P99 ms",
            "attained ttft/tpot/itl",
            "harvest",
            "of free",
        ):
            table.add_column(column, justify="left" if column == "policy" else "right")
        for name, run in runs.items():
            table.add_row(
                name,
                *(
                    " / ".join(f"{1e3 * run.pooled(kind, p):.1f}" for p in (50, 95, 99))
                    for kind in ("ttft", "tpot")
                ),
                " / ".join(f"{run.attainment(kind):.3f}" for kind in ("ttft", "tpot", "itl")),
                f"{mean(run.harvest):.3f}",
                f"{mean(run.harvest) / mean(run.free):.3f}",
            )
        self._console.print(table)

    def _print_curve(self, name: str, curve: Sequence[tuple[float, float]]) -> None:
        points = ", ".join(f"{ratio:.2f}x {harvest:.3f}" for ratio, harvest in sorted(curve))
        self._console.print(f"SIMULATED frontier {name}, TPOT P99 over serving alone, harvest: {points}")


def case_figures(case: str, runs: dict[str, Run]) -> list[Figure]:
    """Attainment, harvest and tail ratios of one workload."""
    dual, idle, alone = runs["dual"], runs["idle only"], runs[ALONE]
    figures = [
        _one(f"slo_attainment[{kind}, {case}]", dual.attainment(kind), "share", ">= 0.99", runs, kind)
        for kind in ("ttft", "tpot", "itl")
    ]
    peers: dict[str, float | None] = {name: mean(run.harvest) for name, run in runs.items() if name != ALONE}
    # The target is for the paper's load; at twice the density serving itself takes more.
    target = None if "density" in case and "density 1]" not in f"{case}]" else ">= 0.80"
    of_free = [h / f for h, f in zip(dual.harvest, dual.free, strict=True)]
    idle_share = [h / f for h, f in zip(idle.harvest, idle.free, strict=True)]
    figures += [
        _simulated(
            median_figure(
                f"harvested_fraction[{case}]", dual.harvest, "of rollout alone", target=target, peers=peers
            )
        ),
        _simulated(
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
        _ratio(f"invisible_p99_ratio[ttft, {case}]", idle, alone, "ttft", "<= 1.10", {"Valve": 1.05}),
        _ratio(f"invisible_p99_ratio[tpot, {case}]", idle, alone, "tpot", "<= 1.05", {"Valve": 1.02}),
        _simulated(
            median_figure(f"invisible_idle_fraction[{case}]", idle_share, "of idle time", target=">= 0.95")
        ),
    ]
    return figures


def trend_figures(pair: str, by_density: Sequence[dict[str, Run]]) -> list[Figure]:
    """Table 5: rollout time and tails grow with density, within the SLO."""
    first = by_density[0]["dual"]
    figures = []
    for density, runs in list(zip(DENSITIES, by_density, strict=True))[1:]:
        paper = {"paper": PAPER_ROLLOUT_TIME[pair][density]}
        value = mean(first.harvest) / mean(runs["dual"].harvest)
        figures.append(
            _plain(f"rollout_time[{pair}, density {density:g} over 1]", value, "ratio", None, paper)
        )
    return figures


def dual_best_figures(pair: str, points: Sequence[Run], runs: dict[str, Run]) -> list[Figure]:
    """The gate's tails over a single objective's, at no less harvest than that has.

    ROSE Figure 9 compares at about equal rollout time; the gate's place on its frontier is a setting.
    """
    figures = []
    for single in ("ttft-only", "tpot-only"):
        harvest = min(mean(runs[single].harvest), mean(runs["dual"].harvest))
        enough = [point for point in points if mean(point.harvest) >= harvest]
        at = min(enough, key=lambda point: point.pooled("tpot", 99))
        for kind in ("ttft", "tpot"):
            value = at.pooled(kind, 99) / runs[single].pooled(kind, 99)
            peers = {"harvest": mean(at.harvest), f"{single}'s": mean(runs[single].harvest)}
            figures.append(
                _plain(f"dual_best[{kind}, {pair}, over {single}]", value, "P99 ratio", "<= 1.02", peers)
            )
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


def sample(trace: Sequence[TraceRow], count: int, horizon_s: float, seed: int) -> list[Arrival]:
    """A random stretch of the trace with its own lengths, its time stretched to the horizon."""
    start = random.Random(seed).randrange(len(trace) - count)
    rows, end_s = trace[start : start + count], trace[start + count].arrival_s
    stretch = horizon_s / max(end_s - rows[0].arrival_s, 1e-9)
    return [
        Arrival(
            at_s=(row.arrival_s - rows[0].arrival_s) * stretch,
            prompt_tokens=min(row.prompt_tokens, MAX_PROMPT_TOKENS),
            output_tokens=max(2, row.output_tokens),
        )
        for row in rows
    ]


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
    figure = _simulated(median_figure(name, ratios, "ratio", target=target, peers=peers))
    return replace(figure, value=_p99_ratio(run, alone, kind))


def _one(name: str, value: float, unit: str, target: str, runs: dict[str, Run], kind: str) -> Figure:
    peers: dict[str, float | None] = {
        each: run.attainment(kind) for each, run in runs.items() if each != "dual"
    }
    # Where serving alone misses it nobody can reach it.
    reachable = runs[ALONE].attainment(kind) >= 0.99
    return _plain(name, value, unit, target if reachable else None, peers)


def _plain(name: str, value: float, unit: str, target: str | None, peers: dict[str, float | None]) -> Figure:
    return Figure(name=name, value=value, unit=unit, target=target, peers=peers, kind="simulated")


def _simulated(figure: Figure) -> Figure:
    return replace(figure, kind="simulated")
