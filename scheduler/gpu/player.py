"""Plays iterations of co-located pipelines under a policy: what each GPU runs when, and how long it takes.

Owns simulated time and the pipelines' progress. The policy sees the last iteration's graph, the kinds that
run, and their progress, but never what is still to come. The same player predicts a policy's gain (the
table's slowdowns, the last iteration again) and simulates it (a modelled GPU, drawn lengths).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rose.scheduler.gpu.lookahead import ALONE, Action, Next, first_of
from rose.scheduler.gpu.merge import Merge, WorkerTail, balanced
from rose.scheduler.gpu.progress import ENDED_S, PipelineProgress
from rose.scheduler.gpu.slowdown import WHOLE, Slowdowns
from rose.scheduler.gpu.substages import Iteration, SubStage, SubStageKind


class PairPolicy(Protocol):
    """What decides about one pair of pipelines."""

    @property
    def is_balanced(self) -> bool:
        """Whether workers that are slowed get less of an elastic phase's batch."""

    def decide(self, upcoming: tuple[Sequence[Next], Sequence[Next]], first: int) -> Action:
        """Returns what a worker runs; see LookAhead."""

    def merge(
        self, tails: Sequence[WorkerTail], pipeline: Iteration, beside_s: float, is_elastic: bool
    ) -> Merge | None:
        """Returns where a pipeline's tails go on together, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayerEvent:
    """A decision: what a worker runs from now on, or that a pipeline's tails go to a worker."""

    time_s: float
    worker: int
    kinds: tuple[SubStageKind | None, SubStageKind | None]
    action: Action | None = None
    merged: int | None = None
    """The pipeline whose tails continue on this worker."""
    gain_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PairResult:
    """`latencies_s` and `alone_s`: of every completed iteration, by pipeline."""

    elapsed_s: float
    latencies_s: tuple[tuple[float, ...], ...]
    alone_s: tuple[tuple[float, ...], ...]
    begun_s: tuple[float, ...]
    """What the iterations in progress at the end had done, in seconds of their time alone."""
    events: tuple[PlayerEvent, ...]

    @property
    def gain(self) -> float:
        """The pipelines' aggregate throughput over running one iteration after the other."""
        return (sum(map(sum, self.alone_s)) + sum(self.begun_s)) / self.elapsed_s

    @property
    def slowdown(self) -> float:
        """The mean latency of an iteration over its latency alone."""
        ratios = [
            latency / alone
            for latencies, alones in zip(self.latencies_s, self.alone_s, strict=True)
            for latency, alone in zip(latencies, alones, strict=True)
        ]
        return sum(ratios) / len(ratios)


class Player:
    """One play of one pipeline, or of two on the same workers. `truth` must know every pair that the policy
    lets run together."""

    def __init__(self, graphs: Sequence[Sequence[Iteration]], truth: Slowdowns, policy: PairPolicy) -> None:
        numbers = {graph.num_workers for each in graphs for graph in each}
        if not 1 <= len(graphs) <= 2 or len(numbers) != 1 or min(map(len, graphs)) < 2:
            raise ValueError(
                "expected one or two pipelines with a past and a next iteration, all on the same workers; "
                f"got {[len(each) for each in graphs]} iterations on {sorted(numbers)} workers"
            )
        self._runs = [PipelineProgress(graphs=each) for each in graphs]
        self._truth = truth
        self._policy = policy
        self._now_s = 0.0
        self._actions = dict.fromkeys(range(numbers.pop()), ALONE[0])
        self._seen: dict[int, object] = {}
        self._events: list[PlayerEvent] = []

    def play(self) -> PairResult:
        """Plays until the first pipeline has completed its iterations."""
        while all(run.number < len(run.graphs) for run in self._runs):
            self._decide()
            self._advance()
        return PairResult(
            elapsed_s=self._now_s,
            latencies_s=tuple(tuple(run.latencies_s) for run in self._runs),
            alone_s=tuple(
                tuple(graph.seconds for graph in run.graphs[1 : 1 + len(run.latencies_s)])
                for run in self._runs
            ),
            begun_s=tuple(run.begun_s() for run in self._runs),
            events=tuple(self._events),
        )

    def _heads(self, worker: int) -> tuple[SubStage | None, SubStage | None]:
        heads = [run.workers[worker].head for run in self._runs]
        return heads[0], heads[1] if len(heads) > 1 else None

    def _kinds(self, worker: int) -> tuple[SubStageKind | None, SubStageKind | None]:
        one, two = self._heads(worker)
        return one.kind if one is not None else None, two.kind if two is not None else None

    def _decide(self) -> None:
        self._choose_actions()
        for index in range(len(self._runs)):
            if self._consider_merge(index):
                self._choose_actions()

    def _choose_actions(self) -> None:
        """Decides about workers where another sub-stage is ready than before."""
        for worker in self._actions:
            ready = [run.ready(worker) for run in self._runs]
            if self._seen.get(worker) != ready:
                self._seen[worker] = ready
                self._actions[worker] = self._action(worker)
                kinds = self._kinds(worker)
                self._events.append(
                    PlayerEvent(time_s=self._now_s, worker=worker, kinds=kinds, action=self._actions[worker])
                )

    def _action(self, worker: int) -> Action:
        one, two = self._heads(worker)
        claims = [run.claim for run in self._runs]
        first = first_of(claims[0], claims[-1])
        num_exclusive = sum(each.is_exclusive for each in claims)
        if len(claims) == num_exclusive == 2:  # the second one needs all workers
            return ALONE[first]
        if one is None or two is None:
            return ALONE[0 if one is not None else 1]
        if num_exclusive:
            return ALONE[first]
        if SubStageKind.TOOL in (one.kind, two.kind):
            return Action(shares=(WHOLE, WHOLE), rates=(1.0, 1.0))
        return self._policy.decide((self._runs[0].upcoming(worker), self._runs[1].upcoming(worker)), first)

    def _rate(self, worker: int, index: int) -> float:
        """How fast a pipeline's head continues on a worker; 0 if it pauses, or waits at a barrier."""
        heads, action = self._heads(worker), self._actions[worker]
        head, share = heads[index], action.shares[index]
        if head is None or head.kind is SubStageKind.TOOL:
            return 0.0 if head is None else 1.0
        if share is None:
            return 0.0
        beside = heads[1 - index] if action.is_shared else None
        kind = beside.kind if beside is not None and beside.kind is not SubStageKind.TOOL else None
        slowdown = self._truth.slowdown(head.kind, kind, share)
        assert slowdown is not None, f"{head.kind} beside {kind} has no slowdown"
        return 1 / slowdown

    def _rates(self, index: int) -> list[float]:
        run = self._runs[index]
        own = [self._rate(worker, index) for worker in self._actions]
        if not run.is_elastic:
            return own
        parts = [run.graph.num_samples / len(own)] * len(own)
        running = [worker for worker, rate in enumerate(own) if rate > 0]
        if self._policy.is_balanced and running:
            shares = balanced([1 / own[worker] for worker in running], run.graph.num_samples)
            parts = [0.0] * len(own)
            for worker, share in zip(running, shares, strict=True):
                parts[worker] = share
        usual = run.graph.num_samples / len(own)
        together = min(rate * usual / part for rate, part in zip(own, parts, strict=True) if part > 0)
        return [together] * len(own)

    def _advance(self) -> None:
        heads = [
            (run, at, rate)
            for index, run in enumerate(self._runs)
            for at, rate in zip(run.workers, self._rates(index), strict=True)
            if at.head is not None and rate > 0
        ]
        assert heads, "no pipeline goes on"
        passed_s = min(min(at.left_s, run.to_halving_s(at)) / rate for run, at, rate in heads)
        self._now_s += passed_s
        for _, at, rate in heads:
            at.done_s += passed_s * rate
            if at.left_s <= ENDED_S:
                at.index, at.done_s = at.index + 1, 0.0
        for run in self._runs:
            while run.number < len(run.graphs) and run.pass_barrier(self._now_s):
                pass

    def _consider_merge(self, index: int) -> bool:
        """Merges a pipeline's tails if all its workers are in theirs and it pays; returns whether."""
        run = self._runs[index]
        workers = [worker for worker, at in enumerate(run.workers) if at.head is not None]
        is_tail = all(at.head is None or at.head.left for at in run.workers)
        if run.is_elastic or len(self._runs) < 2 or len(workers) < 2 or not is_tail:
            return False
        other = self._runs[1 - index]
        if run.claim.is_exclusive and other.claim.is_exclusive:  # it could not begin on some workers
            return False
        tails = []
        for worker in workers:
            rate, beside_rate = self._rate(worker, index), self._rate(worker, 1 - index)
            waits = math.inf if other.workers[worker].head is not None else 1.0
            tails.append(
                run.tail(worker, 1 / rate if rate else 1.0, 1 / beside_rate if beside_rate else waits)
            )
        coming = [other.upcoming(worker) for worker in workers]
        beside_s = max((found[0].seconds for found in coming if found), default=0.0)
        merge = self._policy.merge(tails, run.graph, beside_s, other.is_elastic)
        if merge is None:
            return False
        run.merge(tails, merge.target)
        self._events.append(
            PlayerEvent(
                time_s=self._now_s,
                worker=merge.target,
                kinds=self._kinds(merge.target),
                merged=index,
                gain_s=merge.gain_s,
            )
        )
        return True
