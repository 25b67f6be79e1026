"""The serving fleet under a conversation trace: what its gate leaves to rollouts, and what its clients see.

Owns the fleet's traffic and the tapes. The gate's decisions are the shipped ones, made by sim.twin step by
step; a tape keeps of them the share of every second that rollouts got. Rollouts always have something to run
there, so what they cost serving is an upper bound.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rose.admission.gate import GateSettings
from rose.scheduler.sim.requests import TraceRow
from rose.types import SLO, GateMode
from sim.e2e.calibration import CALM_S, MAX_DENSITY, RELOAD_S, PaperWorkload
from sim.e2e.supply import Rented, SharedGpu, from_levels
from sim.twin.gpu import TwinGpu
from sim.twin.serving import ServedRequest, ServingArrival
from sim.twin.traffic import sample

RATE_WINDOW_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedLatencies:
    """What clients of some serving engines saw. Whoever got no answer counts as having waited for ever."""

    ttfts_s: tuple[float, ...]
    tpots_s: tuple[float, ...]

    @classmethod
    def of(cls, requests: Sequence[ServedRequest]) -> "ServedLatencies":
        ttfts = [math.inf if r.ttft_s is None else r.ttft_s for r in requests]
        tpots = [math.inf if r.tpot_s is None else r.tpot_s for r in requests]
        return cls(ttfts_s=tuple(ttfts), tpots_s=tuple(tpots))

    def attainment(self, slo: SLO) -> float:
        """The share of requests with both latencies within the SLO."""
        pairs = zip(self.ttfts_s, self.tpots_s, strict=True)
        return sum(ttft <= slo.ttft_s and tpot <= slo.tpot_s for ttft, tpot in pairs) / len(self.ttfts_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tape:
    """One serving engine for some time, beside rollouts or alone."""

    shares: tuple[float, ...]
    steps: tuple[int, ...]
    latencies: ServedLatencies
    serving_share: float

    def supply(self) -> SharedGpu:
        return SharedGpu(shares=self.shares, steps=self.steps)


def fleet_arrivals(
    workload: PaperWorkload, trace: Sequence[TraceRow], num_engines: int, horizon_s: int, seed: int
) -> list[ServingArrival]:
    """The traffic of the whole fleet: one stretch of the trace with its own bursts, at the fleet's rate."""
    return sample(trace, round(workload.rate_rps * num_engines * horizon_s), horizon_s, seed)


def play(
    workload: PaperWorkload,
    mode: GateMode | None,
    arrivals: Sequence[ServingArrival],
    horizon_s: int,
    seed: int,
) -> Tape:
    """One serving engine under a gate; None: without rollouts."""
    settings = GateSettings(slo=workload.pair.slo, mode=mode if mode is not None else GateMode.IDLE)
    gpu = TwinGpu(
        workload.pair,
        settings,
        arrivals,
        horizon_s=float(horizon_s),
        seed=seed,
        has_rollouts=mode is not None,
    )
    outcome = gpu.run()
    shares, steps = [0.0] * horizon_s, Counter[int]()
    for name, start_s, end_s in gpu.log:
        if name == "rollout":
            steps[int(start_s)] += 1
            for second in range(int(start_s), min(horizon_s, int(end_s) + 1)):
                shares[second] += max(0.0, min(end_s, second + 1.0) - max(start_s, float(second)))
    return Tape(
        shares=tuple(min(1.0, share) for share in shares),
        steps=tuple(steps[second] for second in range(horizon_s)),
        latencies=ServedLatencies.of(outcome.requests),
        serving_share=outcome.serving_share,
    )


def balanced(arrivals: Sequence[ServingArrival], num_engines: int, engine: int) -> list[ServingArrival]:
    """What a fleet that takes turns gives one of its engines."""
    return list(arrivals[engine::num_engines])


def autoscaled(
    workload: PaperWorkload, arrivals: Sequence[ServingArrival], num_engines: int, horizon_s: int
) -> tuple[list[Rented], list[list[ServingArrival]]]:
    """Time-sharing by whole GPUs, with a reload at each change (ServerlessLLM): what rollouts get, and each
    engine's requests.

    As many engines serve as the busiest ten seconds of the last minute needed, and the others are lent. One
    that is needed again drops its rollouts at once and serves after RELOAD_S, and so the other way round.
    """
    needed = _needed(workload, arrivals, num_engines, horizon_s)
    lent = from_levels(
        [float(second) for second in range(horizon_s)],
        [num_engines - num for num in needed],
        num_engines,
        float(horizon_s),
        RELOAD_S,
    )
    requests: list[list[ServingArrival]] = [[] for _ in range(num_engines)]
    for number, arrival in enumerate(arrivals):
        until = min(horizon_s - 1, int(arrival.at_s))
        serving = min(needed[max(0, until - int(RELOAD_S)) : until + 1])
        requests[number % serving].append(arrival)
    return lent, requests


def _needed(
    workload: PaperWorkload, arrivals: Sequence[ServingArrival], num_engines: int, horizon_s: int
) -> list[int]:
    """How many engines have to serve in each second, by what is known then."""
    counts = Counter(int(arrival.at_s) for arrival in arrivals)
    most_rps = MAX_DENSITY * workload.rate_rps
    at_once = []
    for second in range(horizon_s):
        since = max(0, second - RATE_WINDOW_S)
        recent = sum(counts[each] for each in range(since, second))
        at_once.append(recent / (second - since) / most_rps if second > since else num_engines)
    calm = int(CALM_S)
    return [
        min(num_engines, max(1, math.ceil(max(at_once[max(0, second - calm) : second + 1]))))
        for second in range(horizon_s)
    ]
