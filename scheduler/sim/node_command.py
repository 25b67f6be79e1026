"""`rose sched simulate --level node`: what the node level would decide, and why. Simulated figures."""

import json
import math
import statistics
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rose.arguments import CommandParser, count, positive_int
from rose.errors import ConfigError
from rose.scheduler.node.model import TABLE_II, NodeProfile, Task, paper_profile
from rose.scheduler.node.policy import NodePolicy, Rules
from rose.scheduler.node.profile import read_profile
from rose.scheduler.sim.node_results import Conditions, NodeResult
from rose.scheduler.sim.node_tasks import generated_tasks, trace_tasks
from rose.scheduler.sim.nodes import NodeSimulation
from rose.scheduler.sim.progress import table
from rose.scheduler.sim.requests import load_trace
from rose.types import Assignment

SLO_FORWARDS = 5
"""The SLO, in forward passes of a prompt of mean length. Source: LeMix §VI-A."""


def simulate_nodes(argv: Sequence[str]) -> int:
    """Plays requests and training tasks on nodes that share them, and prints what came of it."""
    arguments = _parser().parse_args(list(argv))
    _check(arguments)
    tasks = _tasks(arguments)
    mean = statistics.fmean(task.prompt_tokens for task in tasks)
    profile = _profile(arguments, mean)
    slo_s = arguments.slo_s if arguments.slo_s is not None else SLO_FORWARDS * profile.forward_s(mean)
    rules = Rules(slo_s=slo_s)
    policy = ExplainedPolicy(profile, arguments.nodes, rules, arguments.explain)
    conditions = Conditions(give_way_s=rules.give_way_s)
    result = NodeSimulation(tasks, policy, profile, arguments.nodes, conditions, arguments.seed).run()
    report = _report(result, profile, slo_s)
    if arguments.json:
        print(json.dumps({"kind": "simulated", "decisions": policy.lines} | report, indent=2))
    else:
        print("\n".join([*policy.lines, *_text(report)]))
    return 0


class ExplainedPolicy(NodePolicy):
    """The shipped policy, which says why it decides as it does, for its first decisions."""

    def __init__(self, profile: NodeProfile, num_nodes: int, rules: Rules, num_lines: int) -> None:
        super().__init__(profile, num_nodes, rules)
        self.lines: list[str] = []
        self._num_lines = num_lines

    def place(self, task: Task, now: float) -> Assignment | None:
        if len(self.lines) >= self._num_lines:
            return super().place(task, now)
        scores = self.scores(task, now)
        assignment = super().place(task, now)
        what = f"{now:8.3f} s  {'training' if task.is_training else 'request'} {task.number}"
        what += f" ({task.prompt_tokens} tokens)"
        if assignment is None:
            self.lines.append(f"{what}: queued for a node that has nothing else to start")
            return None
        chosen = scores[assignment.where]
        within_s = self.within_s(min(each.response_s for each in scores))
        why = f"the best score of the nodes that answer within {within_s:.3f} s"
        nodes = "; ".join(
            f"{each.node}: response {each.response_s:.3f} s, profit {each.profit_s:.3f} s, "
            f"consistency {each.consistency:.2f}, score {each.score_s:.3f}"
            for each in scores
        )
        self.lines.append(f"{what}: node {chosen.node}, {why}\n            {nodes}")
        return assignment

    def pull(self, node: int, now: float) -> Task | None:
        task = super().pull(node, now)
        if task is not None and len(self.lines) < self._num_lines:
            self.lines.append(f"{now:8.3f} s  training {task.number}: node {node} has nothing else to start")
        return task


def _parser() -> CommandParser:
    parser = CommandParser(
        "rose sched simulate --level node",
        "Plays requests and training tasks on nodes that serve and fine-tune one model. No engine and no "
        "trainer runs.",
        "rose sched simulate --level node --rate 40 --training-share 0.5 --explain 10",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="CSV", help="arrivals, in Azure's format (default: generated)"
    )
    parser.add_argument(
        "--rate", type=float, default=40.0, metavar="PER_S", help="tasks a second (default: %(default)g)"
    )
    parser.add_argument(
        "--training-share",
        type=float,
        default=0.5,
        metavar="SHARE",
        help="the part of the tasks that is training (default: %(default)g)",
    )
    parser.add_argument(
        "--tasks", type=positive_int, default=1000, metavar="N", help="tasks in all (default: %(default)s)"
    )
    parser.add_argument(
        "--nodes", type=positive_int, default=4, metavar="N", help="nodes in all (default: %(default)s)"
    )
    parser.add_argument(
        "--gpus", type=positive_int, metavar="N", help="the GPUs of a node (default: the profile's)"
    )
    parser.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="a model's times, as rose sched profile-stages measured them",
    )
    parser.add_argument(
        "--hardware",
        metavar="NAME",
        help="the simulated GPUs, as a profile names them; a profile of others is refused (default: the "
        "profile's, and with it the answer is for these)",
    )
    parser.add_argument(
        "--model",
        choices=list(TABLE_II),
        default="llama-8b",
        help="the model whose published times are used without --profile (default: %(default)s)",
    )
    parser.add_argument(
        "--slo-s", type=float, help="objective of the time to first token (default: five forward passes)"
    )
    parser.add_argument("--explain", type=count, default=0, metavar="N", help="print the first N decisions")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the random numbers (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def _check(arguments: Namespace) -> None:
    if not 0 <= arguments.training_share <= 1:
        raise ConfigError(f"--training-share {arguments.training_share}: a share is from 0 to 1")
    if not 0 < arguments.rate < math.inf:
        raise ConfigError(f"--rate {arguments.rate}: tasks per second must be above 0")
    if arguments.slo_s is not None and not 0 < arguments.slo_s < math.inf:
        raise ConfigError(f"--slo-s {arguments.slo_s}: an SLO must be above 0 s")


def _tasks(arguments: Namespace) -> list[Task]:
    if arguments.trace is None:
        return generated_tasks(arguments.tasks, arguments.rate, arguments.training_share, arguments.seed)
    trace = load_trace(arguments.trace)
    if len(trace) <= arguments.tasks:
        raise ConfigError(f"{arguments.trace}: {len(trace)} rows, so --tasks is at most {len(trace) - 1}")
    return trace_tasks(trace, arguments.tasks, arguments.rate, arguments.training_share, arguments.seed)


def _profile(arguments: Namespace, mean_tokens: float) -> NodeProfile:
    if arguments.profile is None:
        profile = paper_profile(arguments.model, mean_tokens)
        if arguments.hardware not in (None, profile.hardware):
            raise ConfigError(
                f"--hardware {arguments.hardware}: the published times are of {profile.hardware}; give a "
                "--profile of your own, made there by rose sched profile-stages"
            )
    else:
        profile = read_profile(arguments.profile, arguments.hardware)
    return profile if arguments.gpus is None else profile.on(arguments.gpus)


def _report(result: NodeResult, profile: NodeProfile, slo_s: float) -> dict[str, Any]:
    ttfts = sorted(request.ttft_s for request in result.requests if request.first_s < math.inf)
    stages = len(profile.stages)
    return {
        "profile": f"{profile.model} on {profile.hardware}, {stages} stages",
        "slo_s": round(slo_s, 4),
        "attainment": round(result.attainment(slo_s), 4),
        "requests": len(result.requests),
        "mean_ttft_s": round(statistics.fmean(ttfts), 4) if ttfts else None,
        "p99_ttft_s": round(ttfts[math.ceil(0.99 * len(ttfts)) - 1], 4) if ttfts else None,
        "training_tasks": len(result.trained),
        "tasks_per_s": round(result.throughput, 3),
        "refused": result.num_refused,
        "offloads": result.num_offloads,
        "nodes": [
            {
                "node": node,
                "requests": sum(request.node == node for request in result.requests),
                "training_tasks": sum(trained.node == node for trained in result.trained),
                "busy": round(busy_s / stages / result.duration_s, 3) if result.duration_s else 0.0,
            }
            for node, busy_s in enumerate(result.busy_s)
        ],
    }


def _text(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"simulated: {report['profile']}"
    yield from table(_facts(report))
    for each in report["nodes"]:
        yield (
            f"  node {each['node']}: {each['requests']} requests, {each['training_tasks']} training tasks, "
            f"busy {each['busy']:.0%}"
        )


def _facts(report: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "requests", f"{report['requests']}, {report['refused']} refused"
    yield "SLO kept", f"{report['attainment']:.1%} had their first token within {report['slo_s']:g} s"
    if report["mean_ttft_s"] is not None:
        yield "time to first token", f"mean {report['mean_ttft_s']:g} s, P99 {report['p99_ttft_s']:g} s"
    yield "training tasks", f"{report['training_tasks']}"
    yield "throughput", f"{report['tasks_per_s']:g} tasks/s"
    yield "KV offloads", f"{report['offloads']}"
