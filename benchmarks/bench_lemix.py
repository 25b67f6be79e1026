"""Serving and fine-tuning on the same nodes keeps the SLOs of separate nodes and does more. SIMULATED.

The shipped node policy (scheduler/node) plays 1,000 tasks on 4 nodes of 2 stages in scheduler/sim, of which a
share is training; the baselines are beside it (benchmarks/sim/node). Passes take what LeMix Table II says for
Llama-8B, as a + b tokens + c tokens^2, with 5% of noise that the policy does not know. The SLO is five
forward passes of mean length to the first token. Arrivals are Poisson (`poisson`) or a stretch of the Azure
conversation trace at another rate (`azure` has prompts alone, as the paper's inference tasks; `azure-decode`
has the trace's generated tokens, too).

lemix_decision_ms: what the policy computes for a request (measured here; all else is simulated).
lemix_slo_vs_best[WORK]: attainment minus the larger one of SEPARATE's and that of LeMix as printed, at the
worst grid point. lemix_throughput_kept[WORK]: throughput over SEPARATE's at the worst point;
lemix_throughput[WORK]: at the best. lemix_slo[WORK,RATE,SHARE]: the grid, with the baselines beside it.
nodes[RATE,SHARE]: nodes that did more than 2% of the work (Figure 8). loss[SHARE]: by an assumed learning
curve (Figure 10). ablation[WITHOUT] (Figure 17): without a profile (one that is three times too fast,
scaled by what passes took), without giving way, and without memory checks where a node has memory for 8,000
tokens.

    python benchmarks/bench_lemix.py --trace AzureLLMInferenceTrace_conv.csv --json lemix.json
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lib.harness import run_benchmark
from sim.node.baselines import (
    LUF_DECISION_S,
    LeastUtilized,
    Printed,
    RoundRobin,
    Separate,
    SeparateDynamic,
    corrected_score,
)
from sim.node.loss import mean_loss_separate, mean_loss_shared

from rose.measure.figures import Figure, percentile
from rose.scheduler.node.memory import WaitOrDrop
from rose.scheduler.node.model import NodeProfile, Task, paper_profile
from rose.scheduler.node.policy import NodePolicy, Rules
from rose.scheduler.sim.node_results import Conditions, NodeResult, TaskPolicy
from rose.scheduler.sim.node_tasks import MEAN_TOKENS, generated_tasks, trace_tasks
from rose.scheduler.sim.nodes import NodeSimulation
from rose.scheduler.sim.requests import TraceRow, load_trace
from rose.types import Assignment

NUM_NODES, NUM_TASKS = 4, 1000
MODEL = "llama-8b"
TRACE_TOKENS = 1155.0
"""Mean prompt of the Azure conversation trace."""
PARTS = ("decision", "poisson", "azure", "azure-decode", "nodes", "loss", "ablation")
RATES = {
    "poisson": (10.0, 20.0, 40.0, 60.0, 100.0, 150.0),
    "azure": (10.0, 20.0, 40.0, 60.0, 100.0, 150.0),
    "azure-decode": (5.0, 10.0, 20.0, 40.0),
}
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9)
PRESSED_TOKENS = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledTasks:
    """Tasks and the profile that fits them."""

    tasks: Sequence[Task]
    profile: NodeProfile
    mean_tokens: float
    share: float
    seed: int

    @property
    def slo_s(self) -> float:
        return 5 * self.profile.forward_s(self.mean_tokens)


Setup = Callable[[ProfiledTasks], tuple[TaskPolicy, Conditions]]


def _ours(work: ProfiledTasks) -> tuple[TaskPolicy, Conditions]:
    rules = Rules(slo_s=work.slo_s)
    return NodePolicy(work.profile, NUM_NODES, rules), Conditions(give_way_s=rules.give_way_s)


SYSTEMS: dict[str, Setup] = {
    "ours": _ours,
    "separate": lambda work: (Separate(NUM_NODES, work.share), Conditions()),
    "printed": lambda work: (
        Printed(NUM_NODES, work.profile, work.mean_tokens, work.slo_s),
        Conditions(),
    ),
    "eq3 corrected": lambda work: (
        Printed(NUM_NODES, work.profile, work.mean_tokens, work.slo_s, corrected_score),
        Conditions(),
    ),
    "separate dynamic": lambda work: (SeparateDynamic(NUM_NODES, work.share), Conditions()),
    "mix-rr": lambda work: (RoundRobin(NUM_NODES), Conditions()),
    "mix-luf": lambda work: (
        LeastUtilized(NUM_NODES, work.profile),
        Conditions(decision_s=LUF_DECISION_S),
    ),
}
NEEDED = ("ours", "separate", "printed")


def measure(args: argparse.Namespace) -> list[Figure]:
    trace = load_trace(args.trace) if args.trace is not None else []
    figures = _decision(args.seed, 200 if args.quick else NUM_TASKS) if "decision" in args.parts else []
    for kind in ("poisson", "azure", "azure-decode"):
        if kind in args.parts and (kind == "poisson" or trace):
            figures += _grid(kind, trace, args)
    if "nodes" in args.parts:
        figures += [_nodes(rate, share, args.seed) for rate in (2.0, 10.0, 40.0) for share in (0.1, 0.5, 0.9)]
    if "loss" in args.parts:
        figures += [_loss(share, args.seed) for share in SHARES]
    if "ablation" in args.parts:
        figures += _ablations(args.seed)
    return figures


def _work(kind: str, rate: float, share: float, seed: int, trace: Sequence[TraceRow] = ()) -> ProfiledTasks:
    if kind == "poisson":
        tasks, mean = generated_tasks(NUM_TASKS, rate, share, seed), float(MEAN_TOKENS)
    else:
        tasks, mean = trace_tasks(trace, NUM_TASKS, rate, share, seed), TRACE_TOKENS
    if kind == "azure":
        tasks = [replace(task, output_tokens=1) for task in tasks]
    return ProfiledTasks(
        tasks=tasks, profile=paper_profile(MODEL, mean), mean_tokens=mean, share=share, seed=seed
    )


def _play(work: ProfiledTasks, setup: Setup, truth: NodeProfile | None = None) -> NodeResult:
    policy, conditions = setup(work)
    profile = truth if truth is not None else work.profile
    return NodeSimulation(work.tasks, policy, profile, NUM_NODES, conditions, work.seed).run()


# The grid ---------------------------------------------------------------------------------------------------


def _grid(kind: str, trace: Sequence[TraceRow], args: argparse.Namespace) -> list[Figure]:
    rates: Sequence[float] = RATES[kind]
    shares: Sequence[float] = SHARES
    if args.quick:
        rates, shares = rates[2:4], (0.1, 0.5, 0.9)
    seeds = range(args.seed, args.seed + (args.seeds if args.seeds is not None else 1 if args.quick else 3))
    names = NEEDED if args.quick or kind == "azure-decode" else tuple(SYSTEMS)
    points, leads, kept = [], [], []
    for rate in rates:
        for share in shares:
            attained: dict[str, list[float]] = {name: [] for name in names}
            done: dict[str, list[float]] = {name: [] for name in names}
            for seed in seeds:
                work = _work(kind, rate, share, seed, trace)
                for name in names:
                    result = _play(work, SYSTEMS[name])
                    attained[name].append(result.attainment(work.slo_s))
                    done[name].append(result.throughput)
            means = {name: statistics.fmean(values) for name, values in attained.items()}
            speeds = {name: statistics.fmean(values) for name, values in done.items()}
            leads.append(means["ours"] - max(means["separate"], means["printed"]))
            kept.append(speeds["ours"] / speeds["separate"])
            points.append(_point(kind, rate, share, means, attained["ours"], speeds))
    return [*_summary(kind, leads, kept), *points]


def _point(
    kind: str,
    rate: float,
    share: float,
    means: dict[str, float],
    ours: Sequence[float],
    speeds: dict[str, float],
) -> Figure:
    peers: dict[str, float | None] = {name: value for name, value in means.items() if name != "ours"}
    peers |= {f"tasks/s {name}": value for name, value in speeds.items()}
    return Figure(
        name=f"lemix_slo[{kind},{rate:g}/s,{share:.0%}]",
        value=means["ours"],
        unit="share",
        kind="simulated",
        peers=peers,
        spread=(min(ours), max(ours)),
    )


def _summary(kind: str, leads: Sequence[float], kept: Sequence[float]) -> list[Figure]:
    return [
        _simulated(
            f"lemix_slo_vs_best[{kind}]",
            min(leads),
            "share more",
            ">= 0",
            {
                "points": float(len(leads)),
                "points below": float(sum(lead < 0 for lead in leads)),
                "best": max(leads),
            },
        ),
        _simulated(f"lemix_throughput_kept[{kind}]", min(kept), "x SEPARATE", ">= 1", {}),
        _simulated(
            f"lemix_throughput[{kind}]",
            max(kept),
            "x SEPARATE",
            ">= 1.6" if kind == "azure" else None,
            {"median": statistics.median(kept), "paper": 3.53},
        ),
    ]


# Time to decide ---------------------------------------------------------------------------------------------


class _Timed(NodePolicy):
    """The shipped policy, with the CPU time of what each task costs it."""

    def __init__(self, profile: NodeProfile, num_nodes: int, rules: Rules) -> None:
        super().__init__(profile, num_nodes, rules)
        self.request_s: list[float] = []
        self.training_s: list[float] = []

    def place(self, task: Task, now: float) -> Assignment | None:
        begun_s = time.thread_time()
        assignment = super().place(task, now)
        (self.training_s if task.is_training else self.request_s).append(time.thread_time() - begun_s)
        return assignment

    def pull(self, node: int, now: float) -> Task | None:
        begun_s = time.thread_time()
        task = super().pull(node, now)
        if task is not None:
            self.training_s.append(time.thread_time() - begun_s)
        return task


def _decision(seed: int, num_tasks: int) -> list[Figure]:
    profile = paper_profile(MODEL, MEAN_TOKENS)
    rules = Rules(slo_s=5 * profile.forward_s(MEAN_TOKENS))
    policy = _Timed(profile, NUM_NODES, rules)
    tasks = generated_tasks(num_tasks, 50.0, 0.5, seed)
    conditions = Conditions(give_way_s=rules.give_way_s)
    NodeSimulation(tasks, policy, profile, NUM_NODES, conditions, seed).run()
    peers: dict[str, float | None] = {
        "p99": 1e3 * (percentile(policy.request_s, 99) or 0.0),
        "paper": 0.154,
        "a training task's": 1e3 * statistics.median(policy.training_s),
    }
    return [
        Figure(
            name="lemix_decision_ms",
            value=1e3 * statistics.median(policy.request_s),
            unit="ms",
            target="<= 0.05",
            peers=peers,
        )
    ]


# Nodes, loss, ablations -------------------------------------------------------------------------------------


def _nodes(rate: float, share: float, seed: int) -> Figure:
    work = _work("poisson", rate, share, seed)
    counts = {}
    for name in ("ours", "mix-rr", "eq3 corrected"):
        busy_s = _play(work, SYSTEMS[name]).busy_s
        counts[name] = float(sum(each > 0.02 * sum(busy_s) for each in busy_s))
    peers: dict[str, float | None] = {name: count for name, count in counts.items() if name != "ours"}
    return _simulated(f"nodes[{rate:g}/s,{share:.0%}]", counts["ours"], "nodes of 4", None, peers)


def _loss(share: float, seed: int) -> Figure:
    work = _work("poisson", 40.0, share, seed)
    ours, naive = (mean_loss_shared(_play(work, SYSTEMS[name])) for name in ("ours", "mix-rr"))
    separate = mean_loss_separate(_play(work, SYSTEMS["separate"]))
    value = ours / separate if ours is not None and separate else None
    peers: dict[str, float | None] = {"ours": ours, "separate": separate, "mix-rr": naive, "paper": 0.61}
    return _simulated(f"loss[{share:.0%}]", value, "x SEPARATE", None, peers)


def _ablations(seed: int) -> list[Figure]:
    work = _work("poisson", 60.0, 0.5, seed)
    wrong = replace(work, profile=work.profile.scaled(1 / 3))
    patient = Rules(slo_s=work.slo_s, give_way_s=1e9)

    def unprofiled(_: ProfiledTasks) -> tuple[TaskPolicy, Conditions]:
        rules = Rules(slo_s=work.slo_s)
        return NodePolicy(wrong.profile, NUM_NODES, rules), Conditions(give_way_s=rules.give_way_s)

    def patiently(_: ProfiledTasks) -> tuple[TaskPolicy, Conditions]:
        return NodePolicy(work.profile, NUM_NODES, patient), Conditions()

    results = {
        "nothing": _play(work, _ours),
        "profile": _play(work, unprofiled),
        "giving way": _play(work, patiently),
    }
    figures = [_ablation(name, result, work.slo_s) for name, result in results.items()]
    return figures + _memory_ablation(seed)


def _memory_ablation(seed: int) -> list[Figure]:
    """Requests that generate 100 tokens each, in memory for 8,000 tokens a node."""
    work = _work("poisson", 40.0, 0.5, seed)
    stages = [
        replace(
            stage,
            free_bytes=PRESSED_TOKENS * stage.kv_token_bytes,
            activation_token_bytes=stage.kv_token_bytes,
        )
        for stage in work.profile.stages
    ]
    tasks = [replace(task, output_tokens=1 if task.is_training else 100) for task in work.tasks]
    pressed = replace(work, tasks=tasks, profile=replace(work.profile, stages=tuple(stages)))
    figures = []
    for name, memory in (("nothing, little memory", WaitOrDrop(max_wait_s=0.2)), ("memory", None)):

        def setup(work: ProfiledTasks, memory: WaitOrDrop | None = memory) -> tuple[TaskPolicy, Conditions]:
            policy, conditions = _ours(work)
            return policy, replace(conditions, memory=memory)

        figures.append(_ablation(name, _play(pressed, setup), work.slo_s))
    return figures


def _ablation(name: str, result: NodeResult, slo_s: float) -> Figure:
    peers: dict[str, float | None] = {"tasks/s": result.throughput, "offloads": float(result.num_offloads)}
    return _simulated(f"ablation[without {name}]", result.attainment(slo_s), "attainment", None, peers)


def _simulated(
    name: str, value: float | None, unit: str, target: str | None, peers: dict[str, float | None]
) -> Figure:
    return Figure(name=name, value=value, unit=unit, target=target, kind="simulated", peers=peers)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, metavar="CSV", help="Azure's; without it no `azure` parts")
    parser.add_argument("--seeds", type=int, metavar="N", help="instead of 3, or 1 with --quick")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, _add_arguments))
