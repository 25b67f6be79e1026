"""Placing turns by cost beats the paper's rule, which beats turn-wise and pinned placement. SIMULATED.

The router's own placement objects run in a simulator of multi-turn rollouts (benchmarks/sim/rollout: engines,
traffic, trajectories; the parameters and their fit are in scenario.py). The time of a phase is the moment its
last trajectory ends. 32B is simulated at half of its size (2 dedicated and 8 serving engines of 4 GPUs, 512
trajectories): the same load per engine.

  speedup[POLICY,MODEL]     phase time of pinned placement over that of POLICY (ROSE Table 3 beside it)
  scaling[N]                8B under the paper's rule: without serving GPUs over with N (beside it Figure 14)
  cost_over_paper[MODEL]    phase time under `paper` over that under `cost`: the median over the seeds
  cost_over_paper[sweep]    the smallest such median over MODEL and serving's mean share of its GPUs
  cost_over_paper[MODEL,busy=B]   the sweep itself
  cost_with_wrong_share[8B] the same where workers claim a whole GPU whatever serving takes
  prefix_hit_gap[POLICY,MODEL]   percentage points of prompt tokens that were computed before in the same
                            trajectory and prefilled again: evicted, out of lease, or on another worker
  prefix_hit_gap[POLICY,MODEL,no key]   the same where clients send no session key

    python benchmarks/bench_routing.py --json routing.json
"""

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from lib.harness import run_benchmark
from sim.rollout.loop import RolloutSimulation
from sim.rollout.scenario import QWEN3_8B, QWEN3_32B, Scenario

from rose.measure.figures import Figure
from rose.scheduler.rollout.turn.dataplane import POLICIES

TABLE_3 = {
    ("turnwise", "8B"): 1.11,
    ("turnwise", "32B"): 1.08,
    ("paper", "8B"): 1.16,
    ("paper", "32B"): 1.48,
}
FIGURE_14 = {4: 1.26, 8: 1.45, 16: 1.69}
TARGETS = {"8B": ">= 1.15", "32B": ">= 1.05"}
BUSY = (0.15, 0.4, 0.65)
SCENARIOS = (
    QWEN3_8B,
    replace(QWEN3_32B, num_dedicated=2, num_serving=8, num_trajectories=512),
)


def measure(args: argparse.Namespace) -> list[Figure]:
    # Other seeds than those of the fit.
    seeds = range(100 + args.seed, 100 + args.seed + (3 if args.quick else 10))
    busy = BUSY[::2] if args.quick else BUSY
    figures = []
    for scenario in SCENARIOS:
        figures += _table_3(scenario, seeds)
    figures += _figure_14(seeds)
    sweep = [_sweep(scenario, share, seeds) for scenario in SCENARIOS for share in busy]
    figures += sweep
    worst = min(figure.value for figure in sweep if figure.value is not None)
    figures.append(_figure("cost_over_paper[sweep]", [worst], ">= 0.98"))
    for scenario in SCENARIOS:
        figures += _hit_gaps(scenario, seeds)
    return [*figures, _wrong_share(QWEN3_8B, seeds)]


def _times(
    scenario: Scenario, policy: str, seeds: Sequence[int], *, claims_whole_gpus: bool = False
) -> list[float]:
    """Phase times in seconds, one per seed; a process per CPU."""
    runs = [(scenario, policy, seed, claims_whole_gpus) for seed in seeds]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(_time, *zip(*runs, strict=True)))


def _time(scenario: Scenario, policy: str, seed: int, claims_whole_gpus: bool) -> float:
    report_share = (lambda _: 1.0) if claims_whole_gpus else None
    return RolloutSimulation(scenario, POLICIES[policy](), seed, report_share).run().makespan_s


def _table_3(scenario: Scenario, seeds: Sequence[int]) -> list[Figure]:
    name = scenario.name
    times = {policy: _times(scenario, policy, seeds) for policy in ("pinned", "turnwise", "paper", "cost")}
    figures = []
    for policy in ("turnwise", "paper", "cost"):
        published = TABLE_3.get((policy, name))
        peers: dict[str, float | None] = {"ROSE Table 3": published} if published is not None else {}
        figures.append(
            _figure(f"speedup[{policy},{name}]", _ratios(times["pinned"], times[policy]), None, peers)
        )
    gains = _ratios(times["paper"], times["cost"])
    return [*figures, _figure(f"cost_over_paper[{name}]", gains, TARGETS[name])]


def _figure_14(seeds: Sequence[int]) -> list[Figure]:
    alone = _times(QWEN3_8B.with_serving(0), "paper", seeds)
    figures = []
    for num_serving, published in FIGURE_14.items():
        ratios = _ratios(alone, _times(QWEN3_8B.with_serving(num_serving), "paper", seeds))
        figures.append(_figure(f"scaling[{num_serving}]", ratios, None, {"ROSE Figure 14": published}))
    return figures


def _sweep(scenario: Scenario, mean_busy: float, seeds: Sequence[int]) -> Figure:
    loaded = scenario.with_busy(mean_busy)
    ratios = _ratios(*(_times(loaded, policy, seeds) for policy in ("paper", "cost")))
    return _figure(f"cost_over_paper[{scenario.name},busy={mean_busy}]", ratios, ">= 0.98")


def _wrong_share(scenario: Scenario, seeds: Sequence[int]) -> Figure:
    paper = _times(scenario, "paper", seeds)
    ratios = _ratios(paper, _times(scenario, "cost", seeds, claims_whole_gpus=True))
    return _figure(f"cost_with_wrong_share[{scenario.name}]", ratios, None)


def _hit_gaps(scenario: Scenario, seeds: Sequence[int]) -> list[Figure]:
    figures = []
    for policy in ("paper", "cost"):
        for suffix, has_keys in (("", True), (",no key", False)):
            runs = [(scenario, policy, seed, has_keys) for seed in seeds]
            with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                shares = list(pool.map(_hit_shares, *zip(*runs, strict=True)))
            gaps = [100.0 * (ideal - hit) for hit, ideal in shares]
            figures.append(
                Figure(
                    name=f"prefix_hit_gap[{policy},{scenario.name}{suffix}]",
                    value=statistics.median(gaps),
                    unit="points",
                    target="<= 2",
                    kind="simulated",
                    peers={"ideal, %": 100.0 * statistics.median(ideal for _, ideal in shares)},
                    spread=(min(gaps), max(gaps)),
                )
            )
    return figures


def _hit_shares(scenario: Scenario, policy: str, seed: int, has_keys: bool) -> tuple[float, float]:
    """Returns the shares of all prompt tokens that were found cached, and that could have been."""
    outcome = RolloutSimulation(scenario, POLICIES[policy](), seed, has_keys=has_keys).run()
    return outcome.hit_share, outcome.ideal_hit_share


def _ratios(slower: Sequence[float], faster: Sequence[float]) -> list[float]:
    """Seed by seed: both ran the same trajectories under the same traffic."""
    return [before / after for before, after in zip(slower, faster, strict=True)]


def _figure(
    name: str, ratios: Sequence[float], target: str | None, peers: dict[str, float | None] | None = None
) -> Figure:
    return Figure(
        name=name,
        value=statistics.median(ratios),
        unit="x",
        target=target,
        kind="simulated",
        peers=peers if peers is not None else {},
        spread=(min(ratios), max(ratios)),
    )


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure))
