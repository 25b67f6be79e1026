"""How far a pipeline is in its iterations, and what a policy may know of what is to come.

Owns the position in the graph. Policies are told what to expect by the last iteration's graph alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from rose.scheduler.gpu.lookahead import Claim, Next
from rose.scheduler.gpu.merge import WorkerTail, expected_left
from rose.scheduler.gpu.substages import Iteration, SubStage, SubStageKind

MAX_WINDOW = 5
ENDED_S = 1e-9
"""Less is rounding."""
LATE = 0.05
"""A sub-stage that is longer than in the last iteration is expected to take so much of that time more."""


@dataclass(slots=True)
class At:
    """Where a worker is in its chain."""

    chain: Sequence[SubStage]
    index: int = 0
    done_s: float = 0.0
    expected_s: float = 0.0
    """What a sub-stage that the last iteration did not have is expected to take."""

    @property
    def head(self) -> SubStage | None:
        """What is ready, or runs; None at the end of the chain."""
        return self.chain[self.index] if self.index < len(self.chain) else None

    @property
    def left_s(self) -> float:
        return self.head.seconds - self.done_s if self.head is not None else math.inf

    @property
    def all_left_s(self) -> float:
        """The seconds that are left of the whole chain."""
        return sum(each.seconds for each in self.chain[self.index :]) - self.done_s


@dataclass(slots=True)
class PipelineProgress:
    """One pipeline in progress. `graphs[0]` is history; the others are played."""

    graphs: Sequence[Iteration]
    number: int = 1
    phase: int = 0
    began_s: float = 0.0
    before_s: float = -math.inf
    """When the iteration before began."""
    latencies_s: list[float] = field(default_factory=list)
    workers: list[At] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.enter(0)

    @property
    def graph(self) -> Iteration:
        return self.graphs[self.number]

    @property
    def is_elastic(self) -> bool:
        return self.graph.phases[self.phase].is_elastic

    @property
    def claim(self) -> Claim:
        is_exclusive = self.graph.phases[self.phase].is_exclusive
        return Claim(began_s=self.began_s, before_s=self.before_s, is_exclusive=is_exclusive)

    def enter(self, phase: int) -> None:
        self.phase = phase
        self.workers = [At(chain=chain) for chain in self.graph.phases[phase].chains]

    def pass_barrier(self, now_s: float) -> bool:
        """Goes to the next phase if all workers are through; returns whether it did."""
        if any(worker.head is not None for worker in self.workers):
            return False
        if self.phase + 1 < len(self.graph.phases):
            self.enter(self.phase + 1)
            return True
        self.latencies_s.append(now_s - self.began_s)
        self.before_s, self.began_s, self.number = self.began_s, now_s, self.number + 1
        if self.number < len(self.graphs):
            self.enter(0)
        return True

    def begun_s(self) -> float:
        """Returns how much of the present iteration's time alone is behind it, by the worker with most to
        do."""
        if self.number == len(self.graphs):
            return 0.0
        before_s = sum(phase.seconds for phase in self.graph.phases[: self.phase])
        left_s = max(at.all_left_s for at in self.workers)
        return before_s + max(0.0, self.graph.phases[self.phase].seconds - left_s)

    def ready(self, worker: int) -> tuple[int, int, int]:
        """Returns which sub-stage of which iteration is ready on a worker; the chain's length at its end."""
        return self.number, self.phase, self.workers[worker].index

    def upcoming(self, worker: int) -> list[Next]:
        """Returns what is expected on a worker, by the last iteration's graph."""
        at, past = self.workers[worker], self.graphs[self.number - 1]
        if at.head is None:
            return []
        chains = [phase.chains[worker] for phase in past.phases]
        chain = chains[self.phase]
        known = chain[at.index] if at.index < len(chain) else None
        usual_s = known.seconds if known is not None and known.kind is at.head.kind else at.expected_s
        found = [
            Next(kind=at.head.kind, seconds=max(usual_s - at.done_s, LATE * max(usual_s, at.done_s), ENDED_S))
        ]
        rest = [*chain[at.index + 1 :], *(s for c in chains[self.phase + 1 :] for s in c), *chains[0]]
        return [*found, *(Next(kind=each.kind, seconds=each.seconds) for each in rest)][:MAX_WINDOW]

    def tail(self, worker: int, slowdown: float, beside_slowdown: float) -> WorkerTail:
        """Returns a worker's last samples, with the lengths that the last iteration lets expect."""
        at = self.workers[worker]
        assert at.head is not None
        reached = self.graph.cost.reached(at.head.left, at.done_s)
        num_running = sum(tokens > reached for tokens in at.head.left)
        past = self.graphs[self.number - 1].tails()
        return WorkerTail(
            worker=worker,
            left=expected_left(past, reached, num_running) if num_running else (),
            tokens=num_running * (at.head.context_tokens + reached),
            slowdown=slowdown,
            beside_slowdown=beside_slowdown,
        )

    def merge(self, tails: Sequence[WorkerTail], target: int) -> None:
        """All samples of the tails continue on `target`, which prefills those of the others again."""
        cost, left = self.graph.cost, list[int]()
        for tail in tails:
            at = self.workers[tail.worker]
            assert at.head is not None
            reached = cost.reached(at.head.left, at.done_s)
            left += [tokens - reached for tokens in at.head.left if tokens > reached]
            at.index, at.done_s = len(at.chain), 0.0
        moved_s = cost.prefill_token_s * sum(tail.tokens for tail in tails if tail.worker != target)
        merged = SubStage(kind=SubStageKind.ROLLOUT_SMALL, seconds=cost.seconds(sorted(left)) + moved_s)
        at = self.workers[target]
        at.chain = (*at.chain, merged)
        at.expected_s = cost.seconds(sorted(tokens for tail in tails for tokens in tail.left)) + moved_s

    def to_halving_s(self, at: At) -> float:
        """Until half as many samples run on a worker: when merging is considered again."""
        head, cost = at.head, self.graph.cost
        num_left = len(head.left) if head is not None else 0
        while head is not None and num_left > 1:
            num_left //= 2
            ends = head.left[len(head.left) - num_left - 1]
            reached_s = cost.seconds([min(tokens, ends) for tokens in head.left])
            if reached_s > at.done_s + ENDED_S:
                return reached_s - at.done_s
        return math.inf
