"""A running pipeline: what it has done of its iteration, and what is to come, in seconds of a run alone.

Owns its step log, the times of its steps alone, and the graph of its last iteration. A step beside another
pipeline counts with the time of the same step alone, so the graph never holds the other one's slowdown. Pure.
"""

import statistics
from collections import defaultdict, deque
from dataclasses import replace

from rose.scheduler.gpu.lookahead import Next
from rose.scheduler.gpu.progress import PipelineProgress
from rose.scheduler.gpu.substages import Iteration, Steps, SubStageKind, iteration, substages

ROLLOUT, TRAIN = 0, 1
"""The phases of a running pipeline, for which it asks permits."""
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
    """One pipeline in progress, on one worker.

    ``phase``: the phase that it runs or waits for; None between two phases. ``past``: the graph of its last
    iteration; None before the first, or if it reports no steps.
    """

    def __init__(self) -> None:
        self.past: Iteration | None = None
        self.num_done = 0
        self.began_s = 0.0
        self.phase: int | None = None
        self.holds = False
        self.is_over = False
        self._costs = StepCosts()
        self._entered: set[int] = set()
        self._log: list[Steps] = []
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
        return "reports no steps of its rollout (progress.step)"

    def asks(self, phase: int) -> None:
        self._entered.add(phase)
        self.phase, self.holds, self._at = phase, False, None

    def granted(self, now: float) -> None:
        self.holds, self._granted_s, self._was_alone = True, now, True
        if self._is_new:
            self.began_s, self._is_new, self._is_alone = now, False, True

    def disturbed(self) -> None:
        """Notes that something ran beside it or that it paused, so its times are not those of a run alone."""
        self._was_alone = self._is_alone = False

    def step(self, tokens: int, num_running: int, seconds: float, *, is_alone: bool) -> float | None:
        """Notes a step, whose kind follows from the phase. Returns its time alone; None if that is
        unknown."""
        steps = Steps(tokens=tokens, num_running=num_running, seconds=seconds)
        kind = SubStageKind.TRAIN if self.phase == TRAIN else steps.kind
        if is_alone:
            self._costs.learn(kind, tokens, seconds)
        alone_s = self._costs.seconds(kind, tokens)
        counted_s = alone_s if alone_s is not None else seconds
        self._at = None
        if self.phase == TRAIN:
            self._train_done_s += counted_s
        elif self._log and (self._log[-1].tokens, self._log[-1].num_running) == (tokens, num_running):
            last = self._log[-1]
            mean_s = (last.seconds * last.count + counted_s) / (last.count + 1)
            self._log[-1] = replace(last, seconds=mean_s, count=last.count + 1)
        else:
            self._log.append(replace(steps, seconds=counted_s))
        return alone_s

    def released(self, now: float) -> None:
        """Notes the end of the phase."""
        if self.phase == TRAIN and (self._was_alone or self._train_s is None):
            self._train_s = now - self._granted_s
        self.phase, self.holds, self._at = None, False, None

    def completed(self, now: float) -> float:
        """Returns the seconds that the iteration takes alone; 0 if that is unknown."""
        self.num_done += 1
        self._is_new = True
        if self._log and self._train_s is not None:
            self.past = iteration([self._log], reference_s=0.0, train_s=self._train_s)
            if self._is_alone:
                self._between_s = max(0.0, now - self.began_s - self.past.seconds)
        if self.num_done == 1:  # the first iteration compiled, allocated and read files
            self._costs = StepCosts()
        has_log = bool(self._log)
        self._log, self._train_done_s, self._at = [], 0.0, None
        return self.past.seconds + self._between_s if self.past is not None and has_log else 0.0

    def ended(self) -> None:
        """Notes the end of its process."""
        self.is_over, self.phase, self.holds = True, None, False

    def _progress(self) -> PipelineProgress:
        if self._at is None:
            assert self.past is not None and self.phase is not None
            self._at = PipelineProgress(graphs=(self.past, self.past))
            self._at.enter(self.phase)
            [at] = self._at.workers
            if self.phase == TRAIN:
                at.done_s = self._train_done_s
            elif self._log:
                at.chain = substages(self._log)
                at.index, at.done_s = len(at.chain) - 1, at.chain[-1].seconds
        return self._at
