"""Simulated runs for bench_slo: GPU-scale pairs, the shipped gate, every baseline. Nothing here is measured.

Owns the simulated workloads and their tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from sim.twin.gpu import TwinGpu, TwinOutcome
from sim.twin.pairs import PAIR_8B, PAIR_32B, Pair
from sim.twin.serving import ServingArrival, for_decoder, for_prefiller
from sim.twin.traffic import RATES_RPS, sample

from lib.slo.figures import (
    ALONE,
    DUAL,
    PolicyRun,
    case_figures,
    deployment_figures,
    dual_best_figures,
    frontier_figures,
    mean,
    tight_figures,
)
from lib.slo.policies import FEW, IDLE, MODES, policy_table
from rose.admission.gate import GateSettings, mode_problem
from rose.measure.figures import Figure
from rose.scheduler.sim.requests import TraceRow
from rose.types import SLO, Deployment, GateMode

BURST = "burst"
"""5 s at four times the rate of density 1, then 15 s of silence."""
BURST_ON_S, BURST_PERIOD_S = 5.0, 20.0
HEAVY_DENSITY = 6.0
"""Serving alone then computes for nine tenths of the time."""
TIGHT_STEPS = 5.0
FRONTIER_TARGETS = (1.8, 2.0, 2.2, 2.4, 2.6, 3.0, 4.0, 5.0, 5.7, 6.4)
"""TPOT targets of the frontier, in decode steps."""
DENSITIES = (1.0, 1.5, 2.0)
PREFILL_DENSITY = {"8B": 18.0, "32B": 14.0}
"""One prefiller feeds many decoders: at these it computes for a fifth to a third of the time."""
OUT_OF_SERVICE = (0.25, 0.75)
"""An autoscaler keeps traffic away from the first to the second of these, in shares of the horizon."""
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
                f"{pair.name}, density {d:g}": self._policies(pair, self.traffic(pair, d)) for d in DENSITIES
            }
            cases[f"{pair.name}, {BURST}"] = self._policies(pair, self._bursts(pair))
            for case, runs in cases.items():
                self._print(case, runs)
                figures += case_figures(case, runs)
            heavy = self._policies(pair, self.traffic(pair, HEAVY_DENSITY), policies=FEW)
            self._print(f"{pair.name}, heavy", heavy)
            figures += case_figures(f"{pair.name}, heavy", heavy, is_heavy=True)
            figures += trend_figures(pair.name, [cases[f"{pair.name}, density {d:g}"] for d in DENSITIES])
            figures += self._tight(pair) + self._frontier(pair, cases[f"{pair.name}, density 1"])
            figures += self.deployments(pair)
        return figures

    def deployments(self, pair: Pair) -> list[Figure]:
        """A prefiller, the decoder of a disaggregated deployment, and an instance that autoscaling leaves
        idle for half of the time."""
        prefill = [for_prefiller(each) for each in self.traffic(pair, PREFILL_DENSITY[pair.name])]
        whole = self.traffic(pair, 1.0)
        gate = GateSettings(slo=pair.slo, deployment=Deployment.PREFILL)
        prefilled = self._outcomes(pair, gate, [for_prefiller(each) for each in whole], rollouts=False)
        decode = [
            for_decoder(arrivals, outcome.requests)
            for arrivals, outcome in zip(whole, prefilled, strict=True)
        ]
        figures = []
        for deployment, kind, samples in (
            (Deployment.PREFILL, "ttft", prefill),
            (Deployment.DECODE, "tpot", decode),
        ):
            names = [name for name, mode in MODES.items() if mode_problem(mode, deployment) is None]
            runs = self._policies(pair, samples, policies=names, deployment=deployment)
            self._print(f"{pair.name}, {deployment}", runs)
            figures += deployment_figures(f"{pair.name}, {deployment}", runs, DUAL, kind)
        runs = self._policies(pair, self._with_a_pause(pair), policies=("naive", IDLE, DUAL))
        self._print(f"{pair.name}, autoscaled", runs)
        return figures + deployment_figures(f"{pair.name}, autoscaled", runs, IDLE, "ttft")

    def _with_a_pause(self, pair: Pair) -> list[list[ServingArrival]]:
        """Density 1, and none of it while the instance is out of service."""
        start_s, end_s = (share * self._sampling.horizon_s for share in OUT_OF_SERVICE)
        return [
            [arrival for arrival in arrivals if not start_s <= arrival.at_s < end_s]
            for arrivals in self.traffic(pair, 1.0)
        ]

    def _outcomes(
        self, pair: Pair, gate: GateSettings, samples: Sequence[list[ServingArrival]], *, rollouts: bool
    ) -> list[TwinOutcome]:
        return [
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

    def run(
        self,
        pair: Pair,
        gate: GateSettings,
        samples: Sequence[list[ServingArrival]],
        *,
        rollouts: bool = True,
    ) -> PolicyRun:
        """Runs one policy over all samples."""
        outcomes = self._outcomes(pair, gate, samples, rollouts=rollouts)
        rates = zip(outcomes, self._rollouts_alone(pair), strict=True)
        return PolicyRun(
            requests=[outcome.requests for outcome in outcomes],
            slo=gate.slo,
            harvest=[outcome.generated_tokens / outcome.horizon_s / rate for outcome, rate in rates],
            free=[1 - outcome.serving_share for outcome in outcomes],
            is_simulated=True,
        )

    def _policies(
        self,
        pair: Pair,
        samples: Sequence[list[ServingArrival]],
        slo: SLO | None = None,
        policies: Sequence[str] = tuple(MODES),
        deployment: Deployment = Deployment.COLLOCATED,
    ) -> dict[str, PolicyRun]:
        gate = GateSettings(slo=slo if slo is not None else pair.slo, deployment=deployment)
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
        runs = self._policies(pair, self.traffic(pair, 1.0), slo, FEW)
        case = f"{pair.name}, TPOT SLO {1e3 * slo.tpot_s:.0f} ms"
        self._print(case, runs)
        return tight_figures(case, runs, slo)

    def _frontier(self, pair: Pair, runs: dict[str, PolicyRun]) -> list[Figure]:
        """What each allowed TPOT buys at density 1; the gate beside single objectives at equal harvest."""
        samples = self.traffic(pair, 1.0)
        points = []
        for steps in FRONTIER_TARGETS:
            gate = GateSettings(slo=pair.slo, tpot_target_s=steps * pair.decode_step_s)
            points.append(self.run(pair, gate, samples))
        points.append(runs[DUAL])
        prefix = f"{pair.name}, "
        return frontier_figures(prefix, points, runs) + dual_best_figures(prefix, points, runs)

    # Traffic ------------------------------------------------------------------------------------------

    def traffic(self, pair: Pair, density: float) -> list[list[ServingArrival]]:
        """Samples of the trace at a density, one per repeat."""
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

    def _bursts(self, pair: Pair) -> list[list[ServingArrival]]:
        """Returns the same requests as at density 1, their arrivals pressed into the bursts."""

        def pressed(at_s: float) -> float:
            period, within = divmod(at_s, BURST_PERIOD_S)
            return period * BURST_PERIOD_S + within * BURST_ON_S / BURST_PERIOD_S

        return [[replace(a, at_s=pressed(a.at_s)) for a in arrivals] for arrivals in self.traffic(pair, 1.0)]

    # Tables -------------------------------------------------------------------------------------------

    def _print(self, case: str, runs: dict[str, PolicyRun]) -> None:
        self._console.print(policy_table(f"SIMULATED: {case}", runs))


def trend_figures(pair: str, by_density: Sequence[dict[str, PolicyRun]]) -> list[Figure]:
    """Table 5: rollout time and tails grow with density, within the SLO."""
    first = by_density[0][DUAL]
    figures = []
    for density, runs in list(zip(DENSITIES, by_density, strict=True))[1:]:
        paper: dict[str, float | None] = {"paper": PAPER_ROLLOUT_TIME[pair][density]}
        value = mean(first.harvest) / mean(runs[DUAL].harvest)
        figures.append(
            first.figure(f"rollout_time[{pair}, density {density:g} over 1]", value, "ratio", None, paper)
        )
    return figures
