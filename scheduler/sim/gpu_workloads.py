"""What `rose sched simulate --level gpu` plays unless it is given a file: JigsawRL's workloads on a modelled
GPU.

Owns the drawn step logs of rollouts, and the modelled slowdowns. Stage shares are the paper's (Table 1, §5.2)
where it prints them; lengths and the others are assumed, as marked. The same seed gives the same logs.
"""

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

from rose.scheduler.gpu.slowdown import (
    COMPUTE_LEVELS,
    MEMORY_LEVELS,
    WHOLE,
    Share,
    SlowdownTable,
)
from rose.scheduler.gpu.substages import DecodeCost, Iteration, Steps, SubStageKind, iteration

MAX_TOKENS = 8192
NUM_SAMPLES = 256
"""A global batch of 64 in groups of 4 (JigsawRL §5.1)."""
PREFILL_CHUNK = 2048
HARDWARE = "modelled H100"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineWorkload:
    """A pipeline of the paper. Shares are of the iteration alone; a tool's is within the rollout's."""

    name: str
    train: float
    reference: float
    median_tokens: float
    spread: float
    step_s: float
    turns: int = 1
    tool: float = 0.0
    prompt_tokens: int = 256

    @property
    def cost(self) -> DecodeCost:
        return DecodeCost(step_s=self.step_s, sample_s=self.step_s / 200, prefill_token_s=self.step_s / 400)

    def lengths(self, chance: random.Random) -> list[int]:
        """Draws the tokens of one turn of every sample: lognormal, cut at the limit."""
        limit = MAX_TOKENS // self.turns
        drawn = (self.median_tokens * chance.lognormvariate(0, self.spread) for _ in range(NUM_SAMPLES))
        return [max(8, min(limit, round(each))) for each in drawn]


_SMALL, _4B, _8B = 0.004, 0.008, 0.011
WORKLOADS = (
    PipelineWorkload(
        name="0.6B GSM8K", train=0.197, reference=0.142, median_tokens=350, spread=0.9, step_s=_SMALL
    ),  # Table 1
    PipelineWorkload(
        name="0.6B MATH", train=0.17, reference=0.11, median_tokens=1100, spread=0.7, step_s=_SMALL
    ),
    PipelineWorkload(
        name="4B GSM8K", train=0.291, reference=0.187, median_tokens=400, spread=0.8, step_s=_4B
    ),  # Table 1
    PipelineWorkload(name="4B MATH", train=0.25, reference=0.14, median_tokens=1200, spread=0.7, step_s=_4B),
    PipelineWorkload(
        name="4B-Instruct GSM8K", train=0.28, reference=0.17, median_tokens=220, spread=1.0, step_s=_4B
    ),
    PipelineWorkload(
        name="8B-Instruct GSM8K", train=0.30, reference=0.137, median_tokens=220, spread=0.8, step_s=_8B
    ),
    PipelineWorkload(
        name="4B AIME, multi-turn",
        train=0.19,
        reference=0.099,
        median_tokens=700,
        spread=0.7,
        step_s=_4B,
        turns=3,
    ),  # §5.2: rollout 71.1%
    PipelineWorkload(
        name="8B AIME, multi-turn",
        train=0.28,
        reference=0.157,
        median_tokens=450,
        spread=0.6,
        step_s=_8B,
        turns=3,
    ),  # §5.2: rollout 56.3%
    PipelineWorkload(
        name="4B Search-R1, tool",
        train=0.246,
        reference=0.166,
        median_tokens=180,
        spread=0.6,
        step_s=_4B,
        turns=2,
        tool=0.197,
    ),  # Table 1
)
"""Figure 12's kinds of pipelines and models on 8 GPUs."""


def draw(
    workload: PipelineWorkload,
    num_iterations: int,
    num_workers: int,
    chance: random.Random,
    num_rollout_workers: int | None = None,
) -> list[Iteration]:
    """Returns iterations with lengths of their own; reference and training take what the shares say of the
    mean rollout on all workers.

    `num_rollout_workers`: the first of the workers alone run rollouts, the others the rest.
    """
    batches = [[workload.lengths(chance) for _ in range(workload.turns)] for _ in range(num_iterations)]
    rollouts = [_logs(workload, batch, num_workers) for batch in batches]
    rollout = 1 - workload.train - workload.reference
    plain_s = [max(_seconds(log) for log in logs) for logs in rollouts]
    whole_s = sum(plain_s) / len(plain_s) / (rollout - workload.tool)
    rest = 1.0
    if num_rollout_workers is not None:
        rest = num_workers / (num_workers - num_rollout_workers)
        rollouts = [_logs(workload, batch, num_rollout_workers) for batch in batches]
    found = []
    for logs in rollouts:
        logs = [_with_tools(log, workload.tool * whole_s) for log in logs]
        logs += [[]] * (num_workers - len(logs))
        found.append(
            iteration(
                logs,
                reference_s=workload.reference * whole_s * rest,
                train_s=workload.train * whole_s * rest,
                cost=workload.cost,
            )
        )
    return found


def _seconds(log: Sequence[Steps]) -> float:
    return sum(steps.seconds * steps.count for steps in log)


def _with_tools(log: Sequence[Steps], tool_s: float) -> list[Steps]:
    """Replaces the pauses between turns, each drawn as 1 s, by tool times that add up to `tool_s`."""
    num_pauses = sum(steps.idle_s > 0 for steps in log)
    return [
        Steps(
            tokens=steps.tokens,
            num_running=steps.num_running,
            seconds=steps.seconds,
            count=steps.count,
            idle_s=tool_s / num_pauses if steps.idle_s > 0 else 0.0,
        )
        for steps in log
    ]


def _logs(workload: PipelineWorkload, batch: Sequence[Sequence[int]], num_workers: int) -> list[list[Steps]]:
    """The step logs of a rollout, its samples dealt out in order. Tools are called once all samples of a
    worker wait for them; turns without tools follow each other sample by sample."""
    logs = []
    for worker in range(num_workers):
        samples = [[turn[sample] for turn in batch] for sample in range(worker, len(batch[0]), num_workers)]
        if workload.tool > 0:
            log: list[Steps] = []
            for number in range(workload.turns):
                turn_log = _engine(workload, [[turns[number]] for turns in samples])
                if number > 0:
                    turn_log[0] = Steps(
                        tokens=turn_log[0].tokens,
                        num_running=turn_log[0].num_running,
                        seconds=turn_log[0].seconds,
                        count=turn_log[0].count,
                        idle_s=1.0,
                    )
                log += turn_log
            logs.append(log)
        else:
            logs.append(_engine(workload, samples))
    return logs


def _engine(workload: PipelineWorkload, samples: Sequence[Sequence[int]]) -> list[Steps]:
    """An engine with chunked prefill: what waits is prefilled beside the decodes, then all decode until the
    next sample ends its turn. A next turn prefills the prompt again, and the answer so far is cached."""
    cost, log = workload.cost, list[Steps]()
    waiting = workload.prompt_tokens * len(samples)
    reached = 0
    running: list[tuple[int, int, int]] = [(turns[0], k, 0) for k, turns in enumerate(samples)]
    heapq.heapify(running)
    while running:
        base_s = cost.step_s + cost.sample_s * len(running)
        while waiting > 0:
            chunk = min(waiting, PREFILL_CHUNK)
            seconds = base_s + chunk * cost.prefill_token_s
            log.append(Steps(tokens=chunk + len(running), num_running=len(running), seconds=seconds))
            waiting -= chunk
        count = running[0][0] - reached
        if count > 0:
            log.append(Steps(tokens=len(running), num_running=len(running), seconds=base_s, count=count))
        reached = running[0][0]
        while running and running[0][0] == reached:
            _, sample, turn = heapq.heappop(running)
            if turn + 1 < len(samples[sample]):
                heapq.heappush(running, (reached + samples[sample][turn + 1], sample, turn + 1))
                waiting += workload.prompt_tokens
    return log


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelledGpu:
    """Slowdowns of a GPU as JigsawRL's Figures 7 to 9 describe it in words and ends; between them, a model.

    A kind's part `parallel` scales with its SMs (training at a quarter of them: 2.7 times). Beside another
    kind both contend: for caches and power by `compute`, for bandwidth by `bandwidth` (two trainings at a
    half each: 2.19 times). Memory below 80% costs `memory` at 40% (rollouts of a large model: 1.43 times).
    """

    def slowdown(self, kind: SubStageKind, beside: SubStageKind | None, share: Share) -> float:
        if beside is None and share == WHOLE:
            return 1.0
        parallel, compute, bandwidth, memory = _DEMANDS[kind]
        alone = 1 - parallel + parallel / max(share.compute, 0.05)
        alone *= 1 + memory * max(0.0, 0.8 - share.memory) / 0.4
        if beside is None:
            return alone
        _, other_compute, other_bandwidth, _ = _DEMANDS[beside]
        return alone * (1 + 0.347 * compute * other_compute + 0.3 * bandwidth * other_bandwidth)


_DEMANDS = {
    SubStageKind.ROLLOUT_SMALL: (0.03, 0.05, 0.5, 0.05),
    SubStageKind.ROLLOUT_MEDIUM: (0.35, 0.45, 0.6, 0.15),
    SubStageKind.ROLLOUT_LARGE: (0.5, 0.85, 0.4, 0.43),
    SubStageKind.REFERENCE: (0.55, 0.9, 0.3, 0.1),
    SubStageKind.TRAIN: (0.57, 1.0, 0.4, 0.25),
}


def profiled(gpu: ModelledGpu, chance: random.Random, error: float = 0.03) -> SlowdownTable:
    """Returns the table that profiling the GPU would give on the paper's grid, with errors of measuring."""
    kinds = tuple(_DEMANDS)
    return SlowdownTable(
        hardware=HARDWARE,
        entries={
            (kind, beside): tuple(
                tuple(
                    gpu.slowdown(kind, beside, Share(compute=part, memory=room)) * chance.gauss(1, error)
                    for room in MEMORY_LEVELS
                )
                for part in COMPUTE_LEVELS
            )
            for kind in kinds
            for beside in kinds
        },
    )
