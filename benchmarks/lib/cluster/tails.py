"""The measured part of bench_tail: two jobs' processes under `rose sched serve`, with and without moves.

Owns: the groups and their jobs' plans. Promises: both runs of a pair have the same lengths, programs and
certificate; they differ in one key of the jobs' files (`tail`). Never: reads a figure off the model.
"""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from lib.cluster.rig import ClusterRig
from lib.harness import median_figure
from rose.measure.figures import Figure
from rose.scheduler.group.tail import RolloutSpeed

BENCHMARKS = Path(__file__).resolve().parents[2]
JOB = ("env", f"PYTHONPATH={BENCHMARKS}:{BENCHMARKS.parent}", sys.executable, "-m", "lib.cluster.length_job")
SCALE = 1 / 50
"""Phases are this much shorter than real ones, and still long beside the 0.1 s in which the scheduler
chooses a threshold."""
SLO = 2.5
SLACK = 1.05
"""The files' worst cases are this much above the model's: for what processes take between two phases."""
RUN_S = 170.0
NUM_REQUESTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RealGroup:
    """Two equal jobs by the rollout nodes of each; one training node.

    `share`: training, over a rollout whose responses are all as long as may be.
    """

    title: str
    nodes: tuple[tuple[int, ...], tuple[int, ...]]
    share: float
    target: str

    @property
    def num_rollout_nodes(self) -> int:
        return len({node for each in self.nodes for node in each})


def node_speed(gpu: RolloutSpeed, num_nodes: int) -> RolloutSpeed:
    """Returns the speed of nodes of eight such GPUs, at this benchmark's scale."""
    return replace(
        gpu,
        num_workers=num_nodes,
        step_s=gpu.step_s * SCALE,
        request_s=gpu.request_s / 8 * SCALE,
        prefill_tokens_per_s=gpu.prefill_tokens_per_s * 8 / SCALE,
        pause_s=gpu.pause_s * SCALE,
    )


class RealPair:
    """One group with one seed."""

    def __init__(
        self,
        group: RealGroup,
        gpu: RolloutSpeed,
        draw: Callable[[random.Random], list[int]],
        seed: int,
        num_iterations: int,
    ) -> None:
        """draw: one iteration's response lengths. num_iterations: measured, after one with nothing known."""
        rng = random.Random(seed)
        self._group = group
        self._num_iterations = 1 + num_iterations
        self._speeds = [node_speed(gpu, len(nodes)) for nodes in group.nodes]
        self._lengths = [[draw(rng) for _ in range(self._num_iterations)] for _ in group.nodes]
        self._train_s = group.share * self._speeds[0].worst_s(NUM_REQUESTS)

    def run(self, has_tails: bool) -> tuple[float, int]:
        """Returns the seconds that the measured iterations take, and how many tails were moved."""
        with ClusterRig(self._group.num_rollout_nodes, 1) as rig:
            for number, name in enumerate("ab"):
                rig.submit_spec(self._spec(rig, number, name, has_tails))
            rig.wait_done({"a", "b"}, RUN_S)
            phases = [each for each in rig.phases() if each.iteration > 0]
            num_moves = sum(note["what"] == "move" for note in rig.notes())
        return max(each.end_s for each in phases) - min(each.begin_s for each in phases), num_moves

    def _spec(self, rig: ClusterRig, number: int, name: str, has_tails: bool) -> dict[str, object]:
        speed, nodes = self._speeds[number], self._group.nodes[number]
        plan = rig.path / f"{name}.json"
        content = {"speed": speed, "lengths": self._lengths[number], "train_s": self._train_s}
        plan.write_bytes(msgspec.json.encode(content))
        keys = ("step_s", "request_s", "prompt_tokens", "prefill_tokens_per_s", "pause_s")
        return {
            "name": name,
            "command": [*JOB, str(rig.log), str(plan)],
            "group": "main",
            "rollout_nodes": list(nodes),
            "phases": {
                "rollout": {"seconds": speed.worst_s(NUM_REQUESTS) * SLACK, "nodes": len(nodes)},
                "train": {"seconds": self._train_s * SLACK},
            },
            "iterations": self._num_iterations,
            "max_tokens": speed.max_tokens,
            "slo": SLO,
            "tail": {key: getattr(speed, key) for key in keys} if has_tails else None,
        }


def measured_gain(
    group: RealGroup,
    gpu: RolloutSpeed,
    draw: Callable[[random.Random], list[int]],
    seeds: range,
    num_iterations: int,
) -> Figure:
    """Without moves over with moves, one after the other for each seed."""
    gains, shares = [], []
    for seed in seeds:
        pair = RealPair(group, gpu, draw, seed, num_iterations)
        off_s, _ = pair.run(has_tails=False)
        on_s, num_moves = pair.run(has_tails=True)
        gains.append(off_s / on_s)
        shares.append(num_moves / (2 * num_iterations))
    moved = sum(shares) / len(shares)
    return median_figure(
        f"tail_gain[measured: {group.title}]", gains, "x", target=group.target, peers={"share moved": moved}
    )
