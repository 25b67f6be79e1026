"""Simulated runs for bench_slo: GPU-scale pairs, the shipped gate, every baseline. Nothing here is measured.

Owns the simulated workloads and their tables.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness import median_figure
from rich.console import Console
from rich.table import Table
from slo_figures import (
    ALONE,
    DENSITIES,
    HEAVY,
    Run,
    case_figures,
    dual_best_figures,
    harvest_at,
    mean,
    one,
    plain,
    simulated,
    trend_figures,
)

from rose.admission.gate import GateSettings
from rose.admission.twin.gpu import TwinGpu
from rose.admission.twin.pairs import PAIR_8B, PAIR_32B, Pair
from rose.admission.twin.serving import Arrival
from rose.demo.figures import Figure
from rose.demo.trace import TraceRow
from rose.types import SLO, GateMode

RATES_RPS = {"8B": 0.35, "32B": 0.25}
"""Of one GPU at density 1: serving alone then computes for about 30% of the time, as in the prototype's runs;
the paper's clusters show 19% (SM utilization)."""
BURST = "burst"
"""5 s at four times the rate of density 1, then 15 s of silence."""
BURST_ON_S, BURST_PERIOD_S = 5.0, 20.0
HEAVY_DENSITY = 6.0
"""Serving alone then computes for nine tenths of the time."""
HEAVY_POLICIES = ("naive", "alternate", "dual")
MAX_PROMPT_TOKENS = 8192
TIGHT_STEPS = 5.0
FRONTIER_TARGETS = (1.8, 2.0, 2.2, 2.4, 2.6, 3.0, 4.0, 5.0, 5.7, 6.4)
"""TPOT targets of the frontier, in decode steps."""
MODES = {
    "naive": GateMode.OFF,
    "alternate": GateMode.ALTERNATE,
    "idle only": GateMode.IDLE,
    "ttft-only": GateMode.TTFT_ONLY,
    "tpot-only": GateMode.TPOT_ONLY,
    "equations": GateMode.EQUATIONS,
    "dual": GateMode.DUAL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How much to simulate."""

    horizon_s: float
    repeats: int
    seed: int


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
            cases = {
                f"{pair.name}, density {d:g}": self._policies(pair, self._traffic(pair, d)) for d in DENSITIES
            }
            cases[f"{pair.name}, {BURST}"] = self._policies(pair, self._bursts(pair))
            heavy = self._policies(pair, self._traffic(pair, HEAVY_DENSITY), policies=HEAVY_POLICIES)
            cases[f"{pair.name}, {HEAVY}"] = heavy
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
        self,
        pair: Pair,
        samples: Sequence[list[Arrival]],
        slo: SLO | None = None,
        policies: Sequence[str] = tuple(MODES),
    ) -> dict[str, Run]:
        gate = GateSettings(slo=slo if slo is not None else pair.slo)
        runs = {ALONE: self.run(pair, gate, samples, rollouts=False)}
        return runs | {name: self.run(pair, replace(gate, mode=MODES[name]), samples) for name in policies}

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
        runs = self._policies(pair, self._traffic(pair, 1.0), slo, HEAVY_POLICIES)
        case = f"{pair.name}, TPOT SLO {1e3 * slo.tpot_s:.0f} ms"
        self._print(case, runs)
        figures = [
            one(
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
        return [*figures, simulated(harvest)]

    def _frontier(self, pair: Pair, runs: dict[str, Run]) -> list[Figure]:
        """What each allowed TPOT buys at density 1; the gate beside single objectives at equal harvest."""
        samples, alone_s = self._traffic(pair, 1.0), runs[ALONE].pooled("tpot", 99)
        points = []
        for steps in FRONTIER_TARGETS:
            gate = GateSettings(slo=pair.slo, tpot_target_s=steps * pair.decode_step_s)
            points.append(self.run(pair, gate, samples))
        points.append(runs["dual"])
        curve = [(p.pooled("tpot", 99) / alone_s, mean(p.harvest)) for p in points]
        self._print_curve(pair.name, curve)
        alternate = (runs["alternate"].pooled("tpot", 99) / alone_s, mean(runs["alternate"].harvest))
        peers: dict[str, float | None] = {"alternation": alternate[1], "at its TPOT of": alternate[0]}
        figures = [
            plain(
                f"frontier[{pair.name}, TPOT P99 cap {cap:g}x]",
                harvest_at(curve, cap),
                "of rollout alone",
                t,
                peers,
            )
            for cap, t in ((2.0, ">= 0.60"), (4.5, ">= 0.75"))
        ]
        over = harvest_at(curve, alternate[0]) - alternate[1]
        figures.append(plain(f"frontier_over_alternation[{pair.name}]", over, "more harvest", ">= 0", peers))
        return figures + dual_best_figures(pair.name, points, runs)

    # Traffic ------------------------------------------------------------------------------------------

    def _traffic(self, pair: Pair, density: float) -> list[list[Arrival]]:
        horizon_s = self._sampling.horizon_s
        return [
            sample(
                self._trace,
                round(RATES_RPS[pair.name] * density * horizon_s),
                horizon_s,
                self._sampling.seed + i,
            )
            for i in range(self._sampling.repeats)
        ]

    def _bursts(self, pair: Pair) -> list[list[Arrival]]:
        """The same requests as at density 1, their arrivals pressed into the bursts."""

        def pressed(at_s: float) -> float:
            period, within = divmod(at_s, BURST_PERIOD_S)
            return period * BURST_PERIOD_S + within * BURST_ON_S / BURST_PERIOD_S

        return [[replace(a, at_s=pressed(a.at_s)) for a in arrivals] for arrivals in self._traffic(pair, 1.0)]

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
