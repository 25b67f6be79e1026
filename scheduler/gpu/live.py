"""A running pipeline: what it has done of its iteration, and what is to come, in seconds of a run alone.

Owns its step log, the times of its steps alone, and the graph of its last iteration. A step beside another
pipeline counts with the time of the same step alone, so the graph never holds the other one's slowdown. Pure.
"""

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

from rose.scheduler.gpu.lookahead import Claim, Next
from rose.scheduler.gpu.merge import WorkerTail, expected_left
from rose.scheduler.gpu.progress import PipelineProgress
from rose.scheduler.gpu.substages import Iteration, Steps, SubStageKind, iteration, substages

ROLLOUT, TRAIN = 0, 1
"""The phases of a running pipeline, for which it asks permits."""
MAX_MERGED_IN_A_ROW = 5
"""After this many merged rollouts one runs whole, because the graph is made of a whole one."""
NUM_KEPT = 32
"""The most steps of one size that are kept. Their median is the time of such a step."""


class StepCosts:
    """The times of steps alone, by kind and tokens."""

    def __init__(self) -> None:
        self._seen: dict[SubStageKind, dict[int, deque[float]]] = defaultdict(dict)

    def learn(self, kind: SubStageKind, tokens: int, seconds: float) -> None:
        self._seen[kind].setdefault(tokens, deque(maxlen=NUM_KEPT)).append(seconds)

    def seconds(self, kind: SubStageKind, tokens: int) -> float | None:
        """Returns the median of the steps nearest in size; None if no step of the kind ran alone.

        A microbatch counts by its tokens: a share of memory divides the same batch into more of them.
        """
        sizes = self._seen.get(kind)
        if not sizes:
            return None
        nearest = min(sizes, key=lambda size: max(size, tokens) / max(1, min(size, tokens)))
        scale = tokens / nearest if kind is SubStageKind.TRAIN and nearest else 1.0
        return scale * statistics.median(sizes[nearest])


class Live:
    """One pipeline in progress.

    ``num_workers``: on this many engines its rollouts run, each on a worker of its own; 1: in its process.
    ``phase``: the phase that it runs or waits for; None between two phases. ``past``: the graph of its last
    iteration; None before the first, or if it reports no steps. The rollout of a graph is the last one that
    was not merged.
    """

    def __init__(self, num_workers: int = 1) -> None:
        self.num_workers = num_workers
        self.past: Iteration | None = None
        self.num_done = 0
        self.phase: int | None = None
        self.holds = False
        self.is_over = False
        self._asked_s = self._asked_before_s = -math.inf
        self._began_s = 0.0
        self._costs = StepCosts()
        self._entered: set[int] = set()
        self._logs: list[list[Steps]] = [[] for _ in range(num_workers)]
        self._whole_logs = self._logs
        self._has_merged = False
        self._num_merged = 0
        """The iterations since the last one whose rollout was whole."""
        self._lengths: list[int] = []
        self._train_done_s = 0.0
        self._train_s: float | None = None
        self._between_s = 0.0
        self._granted_s = 0.0
        self._was_alone = self._is_alone = True
        self._is_new = True
        self._at: PipelineProgress | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it has work now."""
        return self.phase is not None and not self.is_over

    @property
    def is_between(self) -> bool:
        """Whether it is between two iterations."""
        return self._is_new and self.phase is None

    @property
    def is_exclusive(self) -> bool:
        """Whether it is in a rollout on several engines, which compute without asking."""
        return self.num_workers > 1 and self.phase == ROLLOUT

    @property
    def can_merge(self) -> bool:
        """Whether its rollout may continue on one engine: it runs on several, an earlier one has told its
        lengths, and a whole one is not too long ago."""
        is_known = self.past is not None and bool(self._lengths)
        return self.holds and self.is_exclusive and is_known and self._num_merged < MAX_MERGED_IN_A_ROW

    @property
    def claim(self) -> Claim:
        return Claim(began_s=self._asked_s, before_s=self._asked_before_s, is_exclusive=self.is_exclusive)

    @property
    def kind(self) -> SubStageKind | None:
        """The kind of sub-stage that it runs, or is expected to run next."""
        if not self.is_ready or self.past is None:
            return None
        head = self._progress().workers[0].head
        return head.kind if head is not None else None

    def ready(self) -> tuple[int, int | None, int]:
        """Returns which sub-stage of which iteration is ready. Decisions are due when this changes."""
        index = self._progress().workers[0].index if self.is_ready and self.past is not None else 0
        return self.num_done, self.phase, index

    def upcoming(self) -> list[Next]:
        """Returns the sub-stages that are expected, by the last iteration's graph."""
        return self._progress().upcoming(0) if self.is_ready and self.past is not None else []

    @property
    def lacks(self) -> str | None:
        """Returns what its program does not do, so that it has no graph; None if it has one."""
        if self.past is not None:
            return None
        for phase, name in ((ROLLOUT, "rollout"), (TRAIN, "train")):
            if phase not in self._entered:
                return f'never enters {name} (@rose.phase("{name}"))'
        if self.num_workers > 1:
            return "reports no steps of its engines (progress.report, with OwnEngines as the working set)"
        return "reports no steps of its rollout (progress.step)"

    def asks(self, phase: int, now: float) -> None:
        if self.is_between:
            self._asked_before_s, self._asked_s = self._asked_s, now
        self._entered.add(phase)
        self.phase, self.holds, self._at = phase, False, None

    def granted(self, now: float) -> None:
        self.holds, self._granted_s, self._was_alone = True, now, True
        if self._is_new:
            self._began_s, self._is_new, self._is_alone = now, False, True

    def disturbed(self) -> None:
        """Notes that something ran beside it, or that it paused or waited: its times are not those of a run
        alone."""
        self._was_alone = self._is_alone = False

    def step(self, tokens: int, num_running: int, seconds: float, *, is_alone: bool) -> float | None:
        """Notes a step, whose kind follows from the phase. Returns its time alone; None if that is unknown.
        Returns None for a rollout on engines, whose steps `computed` takes."""
        if self.is_exclusive:
            return None
        steps = Steps(tokens=tokens, num_running=num_running, seconds=seconds)
        kind = SubStageKind.TRAIN if self.phase == TRAIN else steps.kind
        if is_alone:
            self._costs.learn(kind, tokens, seconds)
        alone_s = self._costs.seconds(kind, tokens)
        counted_s = alone_s if alone_s is not None else seconds
        self._at = None
        if self.phase == TRAIN:
            self._train_done_s += counted_s
        else:
            _add(self._logs[0], replace(steps, seconds=counted_s))
        return alone_s

    def computed(self, logs: Sequence[Sequence[Steps]]) -> None:
        """Notes what each engine has computed of the rollout. After a merge nothing is noted, because the
        workers' chains end there."""
        if self.is_exclusive and not self._has_merged:
            for own, new in zip(self._logs, logs, strict=True):
                for steps in new:
                    _add(own, steps)
            self._at = None

    def learn(self, lengths: Sequence[int]) -> None:
        """Notes the lengths of a rollout's responses."""
        self._lengths = sorted(lengths)

    def merged(self) -> None:
        """Notes that the rest of its rollout has moved to one engine."""
        self._has_merged = True

    def tails(self, num_running: Sequence[int], reached: int, num_samples: int) -> list[WorkerTail]:
        """Returns each engine's responses that still run, of which the longest has ``reached`` tokens.

        What runs beside them waits. ``num_samples``: all of the rollout.
        """
        prefilled = sum((each.tokens - each.num_running) * each.count for log in self._logs for each in log)
        tokens = reached + prefilled // max(1, num_samples)
        return [
            WorkerTail(
                worker=worker,
                left=expected_left(self._lengths, reached, running) if running else (),
                tokens=running * tokens,
                beside_slowdown=math.inf,
            )
            for worker, running in enumerate(num_running)
        ]

    def left_s(self) -> float:
        """Returns the seconds alone of what it can compute next beside a rollout on one engine."""
        upcoming = self.upcoming() if not self.is_exclusive else []
        return sum(each.seconds for each in (upcoming if self.num_workers == 1 else upcoming[:1]))

    def released(self, now: float) -> None:
        """Notes the end of the phase."""
        if self.phase == TRAIN and (self._was_alone or self._train_s is None):
            self._train_s = now - self._granted_s
        self.phase, self.holds, self._at = None, False, None

    def completed(self, now: float) -> float:
        """Returns the seconds that the iteration takes alone; 0 if that is unknown."""
        self.num_done += 1
        self._is_new = True
        has_log = any(self._logs)
        if has_log and not self._has_merged:
            self._whole_logs = self._logs
        self._num_merged = self._num_merged + 1 if self._has_merged else 0
        if has_log and self._train_s is not None and any(self._whole_logs):
            self.past = self._graph(self._train_s)
            if self._is_alone:
                self._between_s = max(0.0, now - self._began_s - self.past.seconds)
        if self.num_done == 1:  # the first iteration compiled, allocated and read files
            self._costs = StepCosts()
        self._logs = [[] for _ in self._logs]
        self._has_merged, self._train_done_s, self._at = False, 0.0, None
        return self.past.seconds + self._between_s if self.past is not None and has_log else 0.0

    def ended(self) -> None:
        """Notes the end of its process."""
        self.is_over, self.phase, self.holds = True, None, False

    def _graph(self, train_s: float) -> Iteration:
        graph = iteration(self._whole_logs, reference_s=0.0, train_s=train_s)
        rollout, *others = graph.phases
        return replace(graph, phases=(replace(rollout, is_exclusive=self.num_workers > 1), *others))

    def _progress(self) -> PipelineProgress:
        if self._at is None:
            assert self.past is not None and self.phase is not None
            self._at = PipelineProgress(graphs=(self.past, self.past))
            self._at.enter(self.phase)
            for at, log in zip(self._at.workers, self._logs, strict=True):
                if self.phase == TRAIN:
                    at.done_s = self._train_done_s
                elif log:
                    at.chain = substages(log)
                    at.index, at.done_s = len(at.chain) - 1, at.chain[-1].seconds
        return self._at


def _add(log: list[Steps], steps: Steps) -> None:
    """Adds steps to a log. Equal ones count as one entry."""
    last = log[-1] if log else None
    if last is None or (last.tokens, last.num_running) != (steps.tokens, steps.num_running):
        log.append(steps)
        return
    count = last.count + steps.count
    log[-1] = replace(
        last, seconds=(last.seconds * last.count + steps.seconds * steps.count) / count, count=count
    )
