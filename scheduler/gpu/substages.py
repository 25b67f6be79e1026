"""Sub-stages: what an RL pipeline asks of a GPU, finer than rollout and training.

Owns the kinds of sub-stages, the graph of an iteration, and its making from an engine's own step log. Source:
JigsawRL §4.1. A graph describes the latest iteration, because iterations resemble their predecessors.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

import numpy as np

STABLE_STEPS = 10
"""A sub-stage changes after this many steps in another bucket (JigsawRL §4.1, L_w)."""
MIN_IDLE_S = 2.0
"""vLLM's log has whole seconds: a shorter pause between two steps can't be told from none."""


class SubStageKind(StrEnum):
    """What a sub-stage does. Rollouts are told apart by the tokens of a forward step."""

    ROLLOUT_SMALL = "rollout-small"
    """Fewer than 128 tokens: decoding, bound by memory bandwidth."""
    ROLLOUT_MEDIUM = "rollout-medium"
    ROLLOUT_LARGE = "rollout-large"
    """1,024 tokens and more: prefill, bound by compute."""
    REFERENCE = "reference"
    TRAIN = "train"
    TOOL = "tool"
    """The engine waits for tools; no GPU computes."""

    @property
    def is_rollout(self) -> bool:
        return self in (SubStageKind.ROLLOUT_SMALL, SubStageKind.ROLLOUT_MEDIUM, SubStageKind.ROLLOUT_LARGE)


BUCKETS = (
    (1024, SubStageKind.ROLLOUT_LARGE),
    (128, SubStageKind.ROLLOUT_MEDIUM),
    (0, SubStageKind.ROLLOUT_SMALL),
)
"""The least tokens of a step of each kind (JigsawRL §4.1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Equal forward steps of an engine, one after the other."""

    tokens: int
    """Computed by each step: prefilled ones, and one for each decoding request."""
    num_running: int
    """Decoding requests."""
    seconds: float
    """The length of each step."""
    count: int = 1
    idle_s: float = 0.0
    """How long the engine had nothing to compute before the first of them."""

    @property
    def kind(self) -> SubStageKind:
        return next(kind for least, kind in BUCKETS if self.tokens >= least)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCost:
    """What an engine's steps take: a decode step of n requests `step_s + n * sample_s`."""

    step_s: float
    sample_s: float
    prefill_token_s: float

    def seconds(self, left: Sequence[int]) -> float:
        """Returns how long samples decode that have this many tokens left each, in ascending order."""
        total, reached = 0.0, 0
        for index, tokens in enumerate(left):
            total += (tokens - reached) * (self.step_s + (len(left) - index) * self.sample_s)
            reached = tokens
        return total

    def reached(self, left: Sequence[int], seconds: float) -> int:
        """Returns how many tokens each sample that still runs has decoded after this many seconds."""
        reached = 0
        for index, tokens in enumerate(left):
            step_s = self.step_s + (len(left) - index) * self.sample_s
            if seconds < (tokens - reached) * step_s:
                return reached + int(seconds / step_s)
            seconds -= (tokens - reached) * step_s
            reached = tokens
        return reached


@dataclass(frozen=True, slots=True, kw_only=True)
class SubStage:
    """A part of a phase with one demand of compute and memory.

    `seconds`: alone on the whole GPU. `left`: in a rollout's last decoding, the tokens that each sample
    decodes in it, ascending. `context_tokens`: what each sample has when the sub-stage begins.
    """

    kind: SubStageKind
    seconds: float
    left: tuple[int, ...] = ()
    context_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChains:
    """One chain of sub-stages for each data-parallel worker. The next phase begins after all chains.

    `is_elastic`: the workers share one batch, so that a slow worker may be given less of it. `is_exclusive`:
    it needs all workers to begin, and then neither shares a worker nor pauses.
    """

    chains: tuple[tuple[SubStage, ...], ...]
    is_elastic: bool = False
    is_exclusive: bool = False

    @property
    def seconds(self) -> float:
        return max(sum(each.seconds for each in chain) for chain in self.chains)


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """The sub-stage graph of one iteration: chains within a phase, and a barrier behind each phase."""

    phases: tuple[PhaseChains, ...]
    cost: DecodeCost
    num_samples: int
    """The global batch, which elastic phases divide among the workers."""

    def __post_init__(self) -> None:
        numbers = {len(phase.chains) for phase in self.phases}
        if len(numbers) != 1 or 0 in numbers:
            raise ValueError(f"all phases need a chain for each worker, got {sorted(numbers)} chains")
        if self.num_samples < 1:
            raise ValueError(f"an iteration needs samples, got {self.num_samples}")

    @property
    def num_workers(self) -> int:
        return len(self.phases[0].chains)

    @property
    def seconds(self) -> float:
        """The iteration alone on its GPUs."""
        return sum(phase.seconds for phase in self.phases)

    def tails(self) -> list[int]:
        """Returns the tokens of all samples in the rollout's last decoding, ascending."""
        chains = [chain for phase in self.phases for chain in phase.chains if chain]
        return sorted(tokens for chain in chains for tokens in chain[-1].left)


def iteration(
    logs: Sequence[Sequence[Steps]], *, reference_s: float, train_s: float, cost: DecodeCost | None = None
) -> Iteration:
    """Returns the graph of an iteration from one rollout's step log for each worker.

    Stages that take 0 s are left out. Raises: ValueError if no engine made a step.
    """
    if not any(logs):
        raise ValueError("the step logs have no steps; a rollout without samples can't be scheduled")
    phases = [PhaseChains(chains=tuple(substages(log) for log in logs))]
    for kind, seconds in ((SubStageKind.REFERENCE, reference_s), (SubStageKind.TRAIN, train_s)):
        if seconds > 0:
            chain = (SubStage(kind=kind, seconds=seconds),)
            phases.append(PhaseChains(chains=(chain,) * len(logs), is_elastic=True))
    cost = cost if cost is not None else decode_cost([steps for log in logs for steps in log])
    num_samples = sum(max((steps.num_running for steps in log), default=0) for log in logs)
    return Iteration(phases=tuple(phases), cost=cost, num_samples=max(1, num_samples))


def spread(graph: Iteration, num_workers: int) -> Iteration:
    """Returns the graph of a pipeline of one process on this many workers, which share all of its batches."""
    phases = tuple(PhaseChains(chains=phase.chains * num_workers, is_elastic=True) for phase in graph.phases)
    return replace(graph, phases=phases, num_samples=graph.num_samples * num_workers)


def substages(log: Sequence[Steps]) -> tuple[SubStage, ...]:
    """Splits a rollout's steps where their bucket has changed for `STABLE_STEPS`, and where tools ran.

    A new sub-stage begins at the first of the steps that proved it.
    """
    found: list[SubStage] = []
    current: list[Steps] = []
    other: list[Steps] = []
    before_tokens = num_samples = 0

    def close() -> None:
        nonlocal current, before_tokens
        if current:
            found.append(_substage(kind, current, before_tokens // max(1, num_samples)))
            before_tokens += sum(each.tokens * each.count for each in current)
        current = []

    kind = log[0].kind if log else SubStageKind.ROLLOUT_SMALL
    for steps in log:
        num_samples = max(num_samples, steps.num_running)
        if steps.idle_s > 0:
            current, other = [*current, *other], []
            close()
            found.append(SubStage(kind=SubStageKind.TOOL, seconds=steps.idle_s))
            kind = steps.kind
        if steps.kind is kind:
            current, other = [*current, *other, steps], []
            continue
        if other and other[0].kind is not steps.kind:
            current, other = [*current, *other], []
        other.append(steps)
        if sum(each.count for each in other) >= STABLE_STEPS:
            close()
            current, other, kind = other, [], steps.kind
    current += other
    close()
    is_tail = [each is found[-1] and each.kind is SubStageKind.ROLLOUT_SMALL for each in found]
    return tuple(
        each if keeps else replace(each, left=()) for each, keeps in zip(found, is_tail, strict=True)
    )


def _substage(kind: SubStageKind, log: Sequence[Steps], context_tokens: int) -> SubStage:
    left: list[int] = []
    reached = running = 0
    for steps in log:
        left += [max(1, reached)] * (running - steps.num_running)
        running = steps.num_running
        reached += steps.count
    left += [reached] * running
    seconds = sum(steps.seconds * steps.count for steps in log)
    return SubStage(kind=kind, seconds=seconds, left=tuple(left), context_tokens=context_tokens)


def decode_cost(log: Sequence[Steps]) -> DecodeCost:
    """Fits the cost of decode steps and of prefilled tokens. One batch size alone fits a constant."""
    decodes = [steps for steps in log if steps.tokens == steps.num_running > 0]
    step_s, sample_s = (decodes[0].seconds if decodes else 0.0), 0.0
    if len({steps.num_running for steps in decodes}) > 1:
        weights = np.sqrt([steps.count for steps in decodes])
        sizes, seconds = [s.num_running for s in decodes], [s.seconds for s in decodes]
        slope, intercept = np.polyfit(sizes, seconds, 1, w=weights)
        step_s, sample_s = max(0.0, float(intercept)), max(0.0, float(slope))
    prefills = [steps for steps in log if steps.tokens > steps.num_running]
    tokens = sum((steps.tokens - steps.num_running) * steps.count for steps in prefills)
    more_s = sum(max(0.0, steps.seconds - step_s) * steps.count for steps in prefills)
    return DecodeCost(step_s=step_s, sample_s=sample_s, prefill_token_s=more_s / tokens if tokens else 0.0)


_LINE = re.compile(
    r"(?:(\d\d-\d\d \d\d:\d\d:\d\d).*)?Iteration\(\d+\): \d+ context requests, (\d+) context tokens, "
    r"(\d+) generation requests, (\d+) generation tokens, iteration elapsed time: ([\d.]+) ms(?! \(dummy\))"
)


def read_steps(lines: Iterable[str]) -> list[Steps]:
    """Reads one rollout from the log of `vllm serve --enable-logging-iteration-details`; skips other lines.

    A pause of `MIN_IDLE_S` and more between two steps counts as waiting for tools.
    """
    log: list[Steps] = []
    last: datetime | None = None
    for line in lines:
        if (found := _LINE.search(line)) is None:
            continue
        stamp, context, requests, generated, elapsed_ms = found.groups()
        now = datetime.strptime(f"2000-{stamp}", "%Y-%m-%d %H:%M:%S") if stamp else None
        seconds = float(elapsed_ms) / 1e3
        pause_s = (now - last).total_seconds() - seconds if now and last else 0.0
        log.append(
            Steps(
                tokens=int(context) + int(generated),
                num_running=int(requests),
                seconds=seconds,
                idle_s=pause_s if pause_s >= MIN_IDLE_S else 0.0,
            )
        )
        last = now
    return log
