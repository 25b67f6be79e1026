"""Two RL pipelines that share their GPUs do at least 1.56 times what they do one after the other.

Part `simulated`: the shipped policy and player (scheduler/gpu); GPUs, rollouts and stage times are models
(scheduler/sim/gpu_workloads.py). Stage shares are JigsawRL's where it prints them; the policy plans with a
profiled table (errors of 3%) and the last iteration, and is played on the model and lengths that it has not
seen. Two pipelines of the same kind on 8 GPUs, as in the paper; for each seed six iterations, or two.

  jigsaw_throughput[WORKLOAD]     aggregate over one iteration after the other, median over the seeds
                                  (Figure 12). Beside it the baselines (benchmarks/sim/gpu) and ablations:
                                  windows of 1 and 3 alone (the plan takes the better one), a window of 3 with
                                  the paper's cost, without merging (Figure 20), without merging and balancing
  jigsaw_throughput[mean]         over the workloads; [least]: of all runs; [Fig. 19]: 4 GPUs
  jigsaw_latency[mean]            an iteration over the same one alone (Figure 14); [least]
  jigsaw_over[BASELINE]           mean over the workloads (Figure 12)
  lookahead_gain, merge_gain      the shipped policy over the ablation: mean, and least
  lookahead_ms[W]                 measured: one decision on random chains and tables without dominated splits
                                  (part `decision`)

Part `real`, measured: two tiny pipelines that decode with a KV cache and train on this machine's cores
(benchmarks/measure/tiny_pipeline.py), under `rose sched multiplex` and its `--serial`. Each round has both
runs of every pair, in turn the one or the other first. Both runs include the start of the shared one, in
which each pipeline's iterations are its profile.

  real_pair_throughput[complementary]  one decodes on one core while the other decodes or trains: serial over
                                  multiplexed seconds for the same iterations, median of the rounds. Beside
                                  it, the gain after the profile, as the scheduler measured it
  real_pair_throughput[saturating]     training alone fills the cores: no gain is to be had, and none is lost
  real_pair_throughput[memory]    as complementary, in float64, with microbatches that follow the share of
                                  memory: half as many rows while both run
  real_rewards_differ             iterations whose rewards or weights are not the same bits as in the serial
                                  run, of all runs; of `memory` the rewards alone, as its gradients are summed
                                  in other parts
  real_decode_threads             a rollout of all iterations with a thread on each core over one with one
                                  thread: above 1, decoding gains nothing from more cores

Part `merge`, measured in the same way, with real engines and a router (lib/cluster/merging_pair.py):

  real_merge_throughput   one has a rollout engine on each half of the cores, with a long response on each of
                          them, and the other decodes in its process: serial over multiplexed seconds. Beside
                          it, the gain after the profile, the predicted one, and the merges in a run
  real_merge_differ       iterations in which a response's tokens, a reward or a weight differ from the serial
                          run's

    python benchmarks/bench_jigsaw.py --json jigsaw.json
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from lib.cluster.merging_pair import MergingPair, MergingRun
from lib.cluster.real_pair import MeasuredPair, run_pair
from lib.harness import median_figure, run_benchmark
from sim.gpu.baselines import Disaggregated, LongestChain, RolloutOnly, TimeMultiplexing

from rose.measure.figures import Figure
from rose.scheduler.gpu.lookahead import LookAhead, Next
from rose.scheduler.gpu.plan import Multiplexing, choose
from rose.scheduler.gpu.player import PairPolicy, PairResult, Player
from rose.scheduler.gpu.slowdown import COMPUTE_LEVELS, MEMORY_LEVELS, SlowdownTable
from rose.scheduler.gpu.substages import Iteration, SubStageKind
from rose.scheduler.sim.gpu_workloads import WORKLOADS, ModelledGpu, PipelineWorkload, draw, profiled

NUM_WORKERS = 8
POOLS = (2, 3, 4, 5, 6)
"""Rollout workers of time multiplexing; its best counts."""
GPU = ModelledGpu()
PARTS = ("simulated", "decision", "real", "merge")
PAIRS = {
    "complementary": ("--width", "256", "--layers", "4"),
    "saturating": (
        *("--max-tokens", "8", "--samples", "256", "--microbatch", "256"),
        *("--epochs", "12", "--decode-threads", "2"),
    ),
    "memory": ("--elastic", "--double"),
}
"""Options of the pipelines. Decoding a few samples is one core's work; a long training is all cores'. An
iteration takes about a second, so that the scheduler, which runs on the same cores, takes little of it."""
ITERATIONS = 16
MERGE_ITERATIONS = (8, 16)
"""Of the job with engines, and of the other one, whose iterations are about half as long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Gains over serial of one workload and seed."""

    ours: float
    latency: float
    gains: dict[str, float]


def measure(args: argparse.Namespace) -> list[Figure]:
    figures = _simulated(args) if "simulated" in args.parts else []
    if "decision" in args.parts:
        figures += [_decision_ms(window, args) for window in (1, 2, 3)]
    if "real" in args.parts:
        figures += _real(args)
    if "merge" in args.parts:
        figures += _merge(args)
    return figures


def _simulated(args: argparse.Namespace) -> list[Figure]:
    seeds = range(args.seed, args.seed + (1 if args.quick else 3))
    num_iterations = 2 if args.quick else 6
    runs = {
        workload.name: [_run(workload, seed, num_iterations, NUM_WORKERS) for seed in seeds]
        for workload in WORKLOADS
    }
    figures = [_workload_figure(name, found) for name, found in runs.items()]
    figures += _overall([run for found in runs.values() for run in found])
    named = next(each for each in WORKLOADS if each.name == "4B GSM8K")
    small = [_run(named, seed, num_iterations, 4) for seed in seeds]
    over = statistics.median(run.ours / run.gains["rollouts only"] for run in small)
    peers: dict[str, float | None] = {
        "paper (MFU)": 1.7,
        "over rollouts only": over,
        "paper, over rollouts only": 1.5,
    }
    figures.append(_figure("jigsaw_throughput[Fig. 19]", [run.ours for run in small], ">= 1.7", peers))
    return figures


def _real(args: argparse.Namespace) -> list[Figure]:
    rounds, iterations = (1, ITERATIONS // 2) if args.quick else (3, ITERATIONS)
    found: dict[str, list[tuple[MeasuredPair, MeasuredPair]]] = {name: [] for name in PAIRS}
    for number in range(args.rounds or rounds):
        for name, options in PAIRS.items():
            found[name].append(_both(options, iterations, serial_first=number % 2 == 0))
    figures, differ = [], 0
    for name, runs in found.items():
        ratios = [serial.elapsed_s / shared.elapsed_s for serial, shared in runs]
        gains = [shared.gain for _, shared in runs]
        peers: dict[str, float | None] = {"after the profile": _median(gains)}
        peers |= {"serial s": statistics.median(serial.elapsed_s for serial, _ in runs)}
        target = ">= 1.2" if name == "complementary" else ">= 0.97" if name == "saturating" else None
        figures.append(
            median_figure(f"real_pair_throughput[{name}]", ratios, "x", target=target, peers=peers)
        )
        fields = ("reward",) if name == "memory" else ("reward", "tokens", "state")
        differ += sum(_num_different(serial, shared, fields) for serial, shared in runs)
    threads = _decode_threads(max(2, iterations // 4))
    return [
        *figures,
        Figure(name="real_rewards_differ", value=differ, unit="iterations", target="= 0"),
        Figure(name="real_decode_threads", value=threads, unit="x"),
    ]


def _merge(args: argparse.Namespace) -> list[Figure]:
    """The whole run counts, with the start in which nothing is merged."""
    found: list[tuple[MergingRun, MergingRun]] = []
    with MergingPair() as pair:
        for number in range(args.rounds or (1 if args.quick else 3)):
            flags = (["--serial"], []) if number % 2 == 0 else ([], ["--serial"])
            first, second = (pair.run(MERGE_ITERATIONS, *each) for each in flags)
            found.append((first, second) if number % 2 == 0 else (second, first))
    ratios = [serial.elapsed_s / merged.elapsed_s for serial, merged in found]
    peers: dict[str, float | None] = {
        "after the profile": _median([merged.gain for _, merged in found]),
        "predicted": _median([merged.predicted_gain for _, merged in found]),
        "merges": _median([float(merged.num_merges) for _, merged in found]),
        "serial s": _median([serial.elapsed_s for serial, _ in found]),
    }
    differ = sum(
        one != two
        for serial, merged in found
        for own, other in zip(serial.results, merged.results, strict=True)
        for one, two in zip_longest(own, other)
    )
    return [
        median_figure("real_merge_throughput", ratios, "x", target=">= 1.0", peers=peers),
        Figure(name="real_merge_differ", value=differ, unit="iterations", target="= 0"),
    ]


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _both(
    options: Sequence[str], iterations: int, *, serial_first: bool
) -> tuple[MeasuredPair, MeasuredPair]:
    """Runs a pair one after the other and side by side; returns these two."""
    if serial_first:
        serial = run_pair(options, iterations, "--serial")
        return serial, run_pair(options, iterations)
    shared = run_pair(options, iterations)
    return run_pair(options, iterations, "--serial"), shared


def _num_different(one: MeasuredPair, two: MeasuredPair, fields: Sequence[str]) -> int:
    """Counts iterations of which one of these fields differs, or which one run lacks."""
    lines = [zip_longest(a, b) for a, b in zip(one.rewards, two.rewards, strict=True)]
    pairs = [(_fields(a, fields), _fields(b, fields)) for pair in lines for a, b in pair]
    return sum(a != b for a, b in pairs)


def _fields(line: str | None, names: Sequence[str]) -> list[object]:
    found = json.loads(line) if line is not None else {}
    return [found.get(name) for name in names]


def _decode_threads(iterations: int) -> float:
    """The serial seconds of rollouts on all cores' threads over those on one; training is a single step."""
    options = (*PAIRS["complementary"], "--microbatch", "1", "--train-samples", "1")
    cores = len(os.sched_getaffinity(0))
    many, one = (
        run_pair((*options, "--decode-threads", str(threads)), iterations, "--serial").elapsed_s
        for threads in (cores, 1)
    )
    return many / one


def _run(workload: PipelineWorkload, seed: int, num_iterations: int, num_workers: int) -> _Run:
    table = profiled(GPU, random.Random(seed))
    graphs = _draw(workload, seed, num_iterations, num_workers)
    plan = choose((graphs[0][0], graphs[1][0]), table)

    def play(window: int, *, merges: bool = True, is_balanced: bool = True) -> PairResult:
        policy = Multiplexing(table, window, merges=merges, is_balanced=is_balanced)
        return Player(graphs, GPU, policy).play()

    windows = {window: play(window) for window in plan.gains}
    used = plan.window if plan.window is not None else 1
    return _Run(
        ours=windows[plan.window].gain if plan.window is not None else 1.0,
        latency=windows[plan.window].slowdown if plan.window is not None else 2.0,
        gains={
            "rollouts only": Player(graphs, GPU, RolloutOnly()).play().gain,
            "time multiplexing": _time_multiplexing(workload, seed, graphs),
            **{f"window {window}": result.gain for window, result in windows.items()},
            "longest chain": Player(graphs, GPU, LongestChain(table, 3)).play().gain,
            "no merging": play(used, merges=False).gain,
            "no merging, no balance": play(used, merges=False, is_balanced=False).gain,
        },
    )


def _draw(
    workload: PipelineWorkload,
    seed: int,
    num_iterations: int,
    num_workers: int,
    rollout_workers: int | None = None,
) -> list[list[Iteration]]:
    """The same lengths for every way to share."""
    chance = random.Random(seed)
    return [draw(workload, 1 + num_iterations, num_workers, chance, rollout_workers) for _ in range(2)]


def _time_multiplexing(workload: PipelineWorkload, seed: int, graphs: Sequence[Sequence[Iteration]]) -> float:
    """The best division into pools, over serial on all workers."""
    num_workers, num_iterations = graphs[0][0].num_workers, len(graphs[0]) - 1
    found = []
    for rollout_workers in (count for count in POOLS if count < num_workers):
        apart = _draw(workload, seed, num_iterations, num_workers, rollout_workers)
        policy: PairPolicy = TimeMultiplexing()
        gain = Player(apart, Disaggregated(), policy).play().gain
        alone_s = sum(graph.seconds for each in graphs for graph in each[1:])
        found.append(gain * alone_s / sum(graph.seconds for each in apart for graph in each[1:]))
    return max(found)


def _workload_figure(name: str, runs: Sequence[_Run]) -> Figure:
    peers: dict[str, float | None] = {"latency": statistics.median(run.latency for run in runs)}
    for each in runs[0].gains:
        peers[each] = statistics.median(run.gains[each] for run in runs)
    return _figure(f"jigsaw_throughput[{name}]", [run.ours for run in runs], ">= 1.0", peers)


def _overall(runs: Sequence[_Run]) -> list[Figure]:
    ours = [run.ours for run in runs]
    latencies = [run.latency for run in runs]
    figures = [
        _mean("jigsaw_throughput[mean]", ours, ">= 1.56", {"paper": 1.56, "paper, best": 1.95}),
        Figure(name="jigsaw_throughput[least]", value=min(ours), unit="x", target=">= 1.0", kind="simulated"),
        _mean("jigsaw_latency[mean]", latencies, "<= 1.48", {"paper": 1.48, "paper, least": 1.14}),
    ]
    for name, paper in (("rollouts only", 1.23), ("time multiplexing", 1.27)):
        ratios = [run.ours / run.gains[name] for run in runs]
        figures.append(_mean(f"jigsaw_over[{name}]", ratios, f">= {paper}", {"paper": paper}))
    for figure, name in (
        ("lookahead_gain[over window 1]", "window 1"),
        ("lookahead_gain[over window 3]", "window 3"),
        ("lookahead_gain[over longest chain]", "longest chain"),
        ("merge_gain[merging]", "no merging"),
        ("merge_gain[merging and balance]", "no merging, no balance"),
    ):
        figures.append(_mean(figure, [run.ours / run.gains[name] for run in runs], ">= 1.0", {}))
    return figures


def _decision_ms(window: int, args: argparse.Namespace) -> Figure:
    """Times decisions in which every split is a candidate: slowdowns fall with each share."""
    chance = random.Random(args.seed)
    kinds = [kind for kind in SubStageKind if kind is not SubStageKind.TOOL]
    entries = {}
    for kind in kinds:
        for beside in kinds:
            steep, room = chance.uniform(0.05, 0.6), chance.uniform(0.01, 0.3)
            entries[kind, beside] = tuple(
                tuple(1 + steep / compute + room / memory for memory in MEMORY_LEVELS)
                for compute in COMPUTE_LEVELS
            )
    policy = LookAhead(SlowdownTable(hardware="random", entries=entries), window)  # type: ignore[arg-type]
    times_ms = []
    for number in range(60 if args.quick else 300):
        upcoming = tuple(
            [Next(kind=chance.choice(kinds), seconds=chance.uniform(1, 100)) for _ in range(5)]
            for _ in range(2)
        )
        began_s = time.perf_counter()
        policy.decide((upcoming[0], upcoming[1]), number % 2)
        times_ms.append((time.perf_counter() - began_s) * 1e3)
    target = "<= 2" if window == 3 else None
    peers: dict[str, float | None] = {"99th percentile": sorted(times_ms)[int(len(times_ms) * 0.99)]}
    return median_figure(f"lookahead_ms[W={window}]", times_ms, "ms", target=target, peers=peers)


def _mean(name: str, values: Sequence[float], target: str, peers: dict[str, float | None]) -> Figure:
    return Figure(
        name=name,
        value=statistics.fmean(values),
        unit="x",
        target=target,
        kind="simulated",
        peers=peers,
        spread=(min(values), max(values)),
    )


def _figure(name: str, values: Sequence[float], target: str, peers: dict[str, float | None]) -> Figure:
    """Returns the median of repeats, which have no spread where there is but one."""
    figure = replace(_mean(name, values, target, peers), value=statistics.median(values))
    return figure if len(values) > 1 else replace(figure, spread=None)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, help="of the real pairs; default: 3, with --quick 1")


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, _add_arguments))
