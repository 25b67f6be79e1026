"""`rose sched simulate --level gpu`: how two pipelines would share their GPUs, and why.

With a file: the engines' own logs and a measured table; all figures are predictions. Without one: one of
JigsawRL's workloads on a modelled GPU; figures are simulated.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rose.arguments import CommandParser, positive_int
from rose.config import load_yaml
from rose.scheduler.gpu.plan import MIN_GAIN, PREDICTED_ITERATIONS, Multiplexing, WindowPlan, choose
from rose.scheduler.gpu.player import PairResult, Player, PlayerEvent
from rose.scheduler.gpu.slowdown import Slowdowns, SlowdownTable
from rose.scheduler.gpu.substages import Iteration, SubStageKind
from rose.scheduler.sim.gpu_spec import MEASURE, GpuSpec, load_iteration, load_table
from rose.scheduler.sim.gpu_workloads import WORKLOADS, ModelledGpu, draw, profiled

NUM_WORKERS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What is played: `graphs[k][0]` is the history that the plan is made from."""

    names: tuple[str, str]
    graphs: tuple[Sequence[Iteration], Sequence[Iteration]]
    table: SlowdownTable
    truth: Slowdowns
    kind: str
    least_memory: Sequence[Mapping[SubStageKind, float]] = ({}, {})


def simulate_pair(argv: Sequence[str]) -> int:
    """Prints the plan for two pipelines, what it gives, and the decisions on one worker."""
    names = [each.name for each in WORKLOADS]
    parser = CommandParser(
        "rose sched simulate --level gpu",
        "Says how two RL pipelines would share their GPUs, and why. Neither runs.",
        "rose sched simulate --level gpu pair.yaml",
    )
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="PAIR.yaml",
        help="two pipelines, as their engines' logs show them (default: two of --workload)",
    )
    parser.add_argument(
        "--workload",
        choices=names,
        default=names[2],
        metavar="NAME",
        help=f"the workload of both pipelines without a file: {'; '.join(names)} (default: %(default)s)",
    )
    parser.add_argument(
        "--iterations",
        type=positive_int,
        default=6,
        help="iterations of each pipeline, if there is no file (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of the random numbers, if there is no file (default: %(default)s)",
    )
    parser.add_argument(
        "--worker", type=int, default=0, help="the worker whose decisions are shown (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args(list(argv))
    if arguments.file is not None:
        case = _from_file(arguments.file)
    else:
        case = _drawn(arguments.workload, arguments.iterations, arguments.seed)
    num_workers = case.graphs[0][0].num_workers
    if not 0 <= arguments.worker < num_workers:
        parser.error(f"--worker {arguments.worker}: there are workers 0 to {num_workers - 1}")
    plan = choose((case.graphs[0][0], case.graphs[1][0]), case.table, case.least_memory)
    result = None
    if plan.window is not None:
        policy = Multiplexing(case.table, plan.window, case.least_memory)
        result = Player(case.graphs, case.truth, policy).play()
    if arguments.json:
        print(json.dumps(_report(case, plan, result), indent=2))
    else:
        print("\n".join([*_lines(case, plan, result), *_decisions(case, result, arguments.worker)]))
    return 0


def _from_file(path: Path) -> _Case:
    spec = load_yaml(path, GpuSpec)
    table = SlowdownTable(hardware=spec.hardware, entries={})
    if spec.slowdown is not None:
        table = load_table(path.parent / spec.slowdown, spec.hardware)
    one, two = (load_iteration(each, path) for each in spec.pipelines)
    return _Case(
        names=(spec.pipelines[0].name, spec.pipelines[1].name),
        graphs=([one] * (1 + PREDICTED_ITERATIONS), [two] * (1 + PREDICTED_ITERATIONS)),
        table=table,
        truth=table,
        kind="predicted",
        least_memory=[each.least_memory for each in spec.pipelines],
    )


def _drawn(name: str, num_iterations: int, seed: int) -> _Case:
    chance = random.Random(seed)
    workload = next(each for each in WORKLOADS if each.name == name)
    gpu = ModelledGpu()
    table = profiled(gpu, chance)
    one, two = (draw(workload, 1 + num_iterations, NUM_WORKERS, chance) for _ in range(2))
    names = (f"{name} (a)", f"{name} (b)")
    return _Case(names=names, graphs=(one, two), table=table, truth=gpu, kind="simulated")


def _report(case: _Case, plan: WindowPlan, result: PairResult | None) -> dict[str, object]:
    return {
        "kind": case.kind,
        "hardware": case.table.hardware,
        "pipelines": case.names,
        "alone_s": [round(graphs[0].seconds, 2) for graphs in case.graphs],
        "window": plan.window,
        "predicted_gains": {str(window): round(gain, 3) for window, gain in plan.gains.items()},
        "gain": round(result.gain, 3) if result is not None else 1.0,
        "slowdown": round(result.slowdown, 3) if result is not None else 2.0,
        "merges": _num_merges(result),
    }


def _num_merges(result: PairResult | None) -> int:
    return sum(event.merged is not None for event in result.events) if result is not None else 0


def _lines(case: _Case, plan: WindowPlan, result: PairResult | None) -> Iterator[str]:
    alone = [f"{graphs[0].seconds:.1f} s" for graphs in case.graphs]
    yield (
        f"{case.names[0]} and {case.names[1]} on {case.graphs[0][0].num_workers} workers, "
        f"{case.table.hardware}; an iteration alone: {alone[0]} and {alone[1]}"
    )
    gains = ", ".join(f"{gain:.2f} with a window of {window}" for window, gain in plan.gains.items())
    if result is None:
        why = f"sharing is predicted to give {gains} times that throughput, {MIN_GAIN} is wanted"
        if not case.table.entries:
            why = f"there is no slowdown table for this hardware; {MEASURE}"
        yield f"plan: one iteration after the other, because {why}"
        return
    yield f"plan: shared, with a window of {plan.window}; the predicted throughput is {gains} (serial: 1)"
    yield (
        f"{case.kind}: {result.gain:.2f} times the serial throughput, an iteration takes "
        f"{result.slowdown:.2f} times as long as alone, {_num_merges(result)} merges of tails"
    )


def _decisions(case: _Case, result: PairResult | None, worker: int) -> Iterator[str]:
    """What the worker runs until both have completed an iteration, and the merges on all workers."""
    if result is None:
        return
    until_s = max(latencies[0] if latencies else result.elapsed_s for latencies in result.latencies_s)
    yield f"worker {worker}:"
    for event in result.events:
        if event.time_s <= until_s and (event.worker == worker or event.merged is not None):
            yield f"  {event.time_s:8.1f} s  {_decision(case, event)}"


def _decision(case: _Case, event: PlayerEvent) -> str:
    if event.merged is not None:
        return (
            f"the tail of {case.names[event.merged]} continues on worker {event.worker} alone: "
            f"saves {event.gain_s:.1f} s"
        )
    assert event.action is not None
    parts = []
    for name, kind, share in zip(case.names, event.kinds, event.action.shares, strict=True):
        if kind is None:
            parts.append(f"{name} waits for its other workers")
        elif kind is SubStageKind.TOOL:
            parts.append(f"{name} waits for tools")
        elif share is None:
            parts.append(f"{name} {kind} pauses")
        elif event.action.is_shared and None not in event.kinds and SubStageKind.TOOL not in event.kinds:
            parts.append(f"{name} {kind} {share.compute:.0%} of compute, {share.memory:.0%} of memory")
        else:
            parts.append(f"{name} {kind} alone")
    return "; ".join(parts)
