"""Two running pipelines on one device: decides which of them computes now, with which share.

Owns the way from two unknown pipelines to the shipped policy. At first one iteration runs after the other,
which gives each pipeline's profile and the serial throughput. Then every pair of sub-stages that meets runs
side by side until it is measured, unless a table was given. Then the plan (plan.py) decides between
look-ahead and serial. Serial is also chosen when a pipeline reports no steps, when one does not yield, and
when sharing was measured to be slower than serial. A rollout on several engines has the device to itself
until its last responses continue on one of them. Pure: takes `now`; an executor carries the shares out.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rose.scheduler.gpu.live import Live
from rose.scheduler.gpu.lookahead import ALONE, Action, first_of
from rose.scheduler.gpu.measured import MeasuredSlowdowns
from rose.scheduler.gpu.merge import Merge
from rose.scheduler.gpu.plan import MIN_GAIN, Multiplexing, WindowPlan, choose
from rose.scheduler.gpu.slowdown import Share, SlowdownTable, Split
from rose.scheduler.gpu.substages import Iteration, Steps, SubStageKind, spread

SOLO_ITERATIONS = 2
"""The iterations of each pipeline alone: one to warm up, and one that is its profile."""
TRIAL_ITERATIONS = 2
"""The most iterations of each pipeline until the plan is made, with the pairs that have met."""
PLANNED_ITERATIONS = 10
"""The iterations of both together until the plan is made again, with all measurements."""
YIELD_S = 30.0
"""A pipeline that takes longer from one step to the next counts as one that can't be paused."""
NUM_DECISIONS = 200


class Mode(StrEnum):
    """How the pair runs."""

    PROFILE = "profile"
    TRIAL = "trial"
    SHARED = "shared"
    SERIAL = "serial"
    ALONE = "alone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What runs from ``time_s`` on. A share is None if its pipeline pauses, or has nothing to compute.
    ``note``: what was decided beside that."""

    time_s: float
    mode: Mode
    kinds: tuple[SubStageKind | None, SubStageKind | None]
    shares: tuple[Share | None, Share | None]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReport:
    """How far a rollout on several engines is. By engine: ``logs``, the steps since the last report, and
    ``num_running``, the responses that it has. ``num_done``: of all ``num_samples``. ``num_tokens``: of the
    longest that still runs; None if they must not move. ``lengths``: of all responses, when all are done."""

    logs: Sequence[Sequence[Steps]]
    num_running: Sequence[int]
    num_samples: int
    num_done: int
    num_tokens: int | None = None
    lengths: Sequence[int] = ()

    @property
    def is_tail(self) -> bool:
        """Whether the responses that are not done may move, and all of them are in an engine: none is still
        to be sent, or waits for a tool."""
        return bool(self.num_tokens) and sum(self.num_running) >= self.num_samples - self.num_done


class Pairing:
    """The state of one pair. Every call may change ``shares``; ``epoch`` counts the changes.

    ``table``: slowdowns of this hardware; None measures them. ``levels``: the shares of compute into which
    the device can be split. ``num_workers``: the engines of each pipeline's rollouts, 1 for rollouts in its
    process. Several divide the device among them, and are as many for both pipelines.
    """

    def __init__(
        self,
        names: tuple[str, str],
        hardware: str,
        levels: Sequence[float],
        *,
        num_workers: tuple[int, int] = (1, 1),
        table: SlowdownTable | None = None,
        is_serial: bool = False,
    ) -> None:
        self.names = names
        self.num_workers = max(num_workers)
        self.pipelines = (Live(num_workers[0]), Live(num_workers[1]))
        self.mode = Mode.SERIAL if is_serial else Mode.PROFILE
        self.why = "it was asked for" if is_serial else "each pipeline's iterations alone are its profile"
        self.plan: WindowPlan | None = None
        self.together: tuple[Mode, str] | None = None
        """The mode in which the two ran when the first one ended, and its reason."""
        self.shares: tuple[Share | None, Share | None] = (None, None)
        self.epoch = 0
        self.merged: tuple[int, int] | None = None
        """The pipeline whose rollout continues on one worker, and that worker. The other one has the rest."""
        self.num_merges = 0
        self._offered: tuple[int, Merge] | None = None
        """The pipeline whose rollout was told where to go on, and has not moved yet."""
        self.decisions: deque[Decision] = deque(maxlen=NUM_DECISIONS)
        self._measured = MeasuredSlowdowns(hardware, levels)
        self._given = table
        self._policy: Multiplexing | None = None
        self._turn = 0
        self._key: object = None
        self._kinds: tuple[SubStageKind | None, SubStageKind | None] = (None, None)
        self._to_pause: list[tuple[int, float] | None] = [None, None]
        """For each pipeline that was asked to pause and has not paused yet: the epoch and the time of the
        request."""
        self._since_s: float | None = None
        self._until_s = self._alone_s = 0.0
        self._num_planned = 0

    @property
    def table(self) -> SlowdownTable:
        """The given slowdowns, or those measured until now."""
        return self._given if self._given is not None else self._measured.table()

    @property
    def gain(self) -> float | None:
        """The throughput since the profile over that of serial: the seconds alone of the completed
        iterations, over the seconds in which both ran. None before the first iteration is completed.
        """
        if self._since_s is None or self._until_s <= self._since_s or not self._alone_s:
            return None
        return self._alone_s / (self._until_s - self._since_s)

    def asks(self, index: int, phase: int, now: float) -> None:
        """A pipeline asks for a phase. It may begin when it has a share, and waits for the other one until
        then."""
        self.pipelines[index].asks(phase, now)
        self._unmerge(index)
        self._decide(now)
        if self.shares[index] is None:
            self.pipelines[index].disturbed()

    def granted(self, index: int, now: float) -> None:
        """The executor has let a pipeline begin its phase."""
        live = self.pipelines[index]
        live.granted(now)
        if not self._is_alone(index):
            live.disturbed()

    def stepped(self, index: int, tokens: int, num_running: int, seconds: float, epoch: int) -> None:
        """A step that began under the shares of ``epoch`` is done. The executor calls obeys() after a
        report's last step."""
        live, share, beside = self.pipelines[index], self.shares[index], self._kinds[1 - index]
        is_current = epoch == self.epoch and share is not None
        alone_s = live.step(tokens, num_running, seconds, is_alone=is_current and self._is_alone(index))
        kind, is_beside = self._kinds[index], self.shares[1 - index] is not None
        is_split = is_current and is_beside and self.merged is None  # behind a merge it has other cores
        if is_split and kind is not None and beside is not None and alone_s:
            assert share is not None
            self._measured.add(kind, beside, share.compute, seconds, alone_s)

    def _is_alone(self, index: int) -> bool:
        """Whether nothing runs beside a pipeline: the other one has no share, and is not about to pause."""
        return self.shares[1 - index] is None and self._to_pause[1 - index] is None

    def obeys(self, index: int, epoch: int, now: float) -> None:
        """A pipeline has done what ``epoch`` asked, and all of its steps have been reported."""
        asked = self._to_pause[index]
        if asked is not None and epoch >= asked[0]:
            self._to_pause[index] = None
        self._decide(now)

    def reported(self, index: int, report: RolloutReport) -> int | None:
        """A rollout on several engines has come further. Returns the worker on which all that still runs
        should go on, or None. Nothing changes before `moved`."""
        live, other = self.pipelines[index], self.pipelines[1 - index]
        live.computed(report.logs)
        if report.lengths:
            live.learn(report.lengths)
        if self.merged is not None or not live.can_merge:
            return None
        self._offered = None
        if self.mode is Mode.SHARED and self._policy is not None and report.is_tail:
            assert live.past is not None and report.num_tokens is not None
            tails = live.tails(report.num_running, report.num_tokens, report.num_samples)
            merge = self._policy.merge(tails, live.past, other.left_s(), is_elastic=True)
            self._offered = (index, merge) if merge is not None else None
        return self._offered[1].target if self._offered is not None else None

    def moved(self, index: int, workers: Sequence[int], now: float) -> str | None:
        """A pipeline's rollout continues on these workers alone. Returns why that is refused, or None."""
        name, offered = self.names[index], self._offered
        if offered is None or offered[0] != index or list(workers) != [offered[1].target]:
            return f"{name} was not told that its rollout should continue on workers {list(workers)} alone"
        merge = offered[1]
        self.pipelines[index].merged()
        self.merged, self._offered = (index, merge.target), None
        self.num_merges += 1
        self._decide(now)
        note = f"the tail of {name} continues on worker {merge.target} alone: saves {merge.gain_s:.1f} s"
        self.decisions.append(
            Decision(time_s=now, mode=self.mode, kinds=self._kinds, shares=self.shares, note=note)
        )
        return None

    def released(self, index: int, now: float) -> None:
        """A pipeline's phase is over."""
        self.pipelines[index].released(now)
        self._unmerge(index)
        self._decide(now)

    def _unmerge(self, index: int) -> None:
        """Ends the merge of a pipeline's rollout, and withdraws one that was offered."""
        if self.merged is not None and self.merged[0] == index:
            self.merged = None
        if self._offered is not None and self._offered[0] == index:
            self._offered = None

    def completed(self, index: int, now: float) -> None:
        """A pipeline's iteration is over."""
        alone_s, other = self.pipelines[index].completed(now), self.pipelines[1 - index]
        if self._since_s is not None and not other.is_over:
            self._alone_s, self._until_s = self._alone_s + alone_s, now
        self._num_planned += 1
        if not other.is_over:
            self._turn = 1 - index
        self._follow(now)
        self._decide(now)

    def ended(self, index: int, now: float) -> None:
        """A pipeline's process has ended: the other one has the device from now on."""
        self.pipelines[index].ended()
        self._unmerge(index)
        if not self.pipelines[1 - index].is_over:
            self.together = (self.mode, self.why)
            self._to(Mode.ALONE, f"{self.names[index]} has ended")
        self._turn = 1 - index
        self._decide(now)

    def tick(self, now: float) -> None:
        """Goes to serial if a pipeline was asked to pause more than YIELD_S ago and goes on."""
        late = [index for index, asked in enumerate(self._to_pause) if asked and now - asked[1] > YIELD_S]
        if late and self.mode in (Mode.TRIAL, Mode.SHARED):
            name = self.names[late[0]]
            self._to(Mode.SERIAL, f"{name} takes over {YIELD_S:.0f} s from one progress.step to the next")
            self._turn = late[0]
            self._decide(now)

    def _to(self, mode: Mode, why: str) -> None:
        self.mode, self.why = mode, why

    def _follow(self, now: float) -> None:
        """Goes from profile to trial, to the plan, and to the next plan."""
        num_done = min(live.num_done for live in self.pipelines)
        if self.mode is Mode.PROFILE and num_done >= SOLO_ITERATIONS:
            for name, live in zip(self.names, self.pipelines, strict=True):
                if (lacks := live.lacks) is not None:
                    self._to(Mode.SERIAL, f"{name} {lacks}")
                    return
            self._since_s = now
            self._to(Mode.TRIAL, "pairs of sub-stages are measured side by side")
            if self._given is not None:
                self._make_plan()
        elif self.mode is Mode.TRIAL and num_done >= SOLO_ITERATIONS + TRIAL_ITERATIONS:
            self._make_plan()
        elif self.mode is Mode.SHARED and self._num_planned >= PLANNED_ITERATIONS:
            self._make_plan()
            if self.gain is not None and self.gain < 1:
                self._to(Mode.SERIAL, f"sharing was measured at {self.gain:.2f} times the serial throughput")

    def _make_plan(self) -> None:
        one, two = (live.past for live in self.pipelines)
        assert one is not None and two is not None
        table = self.table
        self.plan, self._num_planned = choose((self._on_workers(one), self._on_workers(two)), table), 0
        gains = " and ".join(f"{gain:.2f} (window of {w})" for w, gain in self.plan.gains.items())
        why = f"sharing is predicted to give {gains} times the serial throughput"
        if self.plan.window is None:
            self._to(Mode.SERIAL, f"{why}; at least {MIN_GAIN} is wanted")
            return
        self._policy = Multiplexing(table, self.plan.window)
        self._to(Mode.SHARED, why)

    def _on_workers(self, graph: Iteration) -> Iteration:
        return graph if graph.num_workers == self.num_workers else spread(graph, self.num_workers)

    def _decide(self, now: float) -> None:
        """Decides again if another sub-stage is ready than before, or a trial has ended."""
        one, two = self.pipelines
        if self.pipelines[self._turn].is_between and self.pipelines[1 - self._turn].is_ready:
            self._turn = 1 - self._turn
        kinds = (one.kind, two.kind)
        trial = self._trial(kinds)
        key = (self.mode, self._turn, kinds, one.ready(), two.ready(), trial, self.merged)
        if key == self._key:
            return
        self._key = key
        on_engines = [index for index, live in enumerate((one, two)) if live.holds and live.is_exclusive]
        if on_engines:
            action = self._beside_engines(on_engines[0])
        elif self.mode not in (Mode.TRIAL, Mode.SHARED):
            action = ALONE[self._turn]
        elif not (one.is_ready and two.is_ready):
            action = ALONE[0 if one.is_ready else 1]
        elif one.is_exclusive or two.is_exclusive:
            action = ALONE[first_of(one.claim, two.claim)]
        elif trial is not None:
            action = Action(shares=(trial.first, trial.second), rates=(1.0, 1.0))
        else:
            action = self._chosen()
        shares = tuple(
            share if live.is_ready else None
            for share, live in zip(action.shares, self.pipelines, strict=True)
        )
        self._apply((shares[0], shares[1]), kinds, now)

    def _beside_engines(self, index: int) -> Action:
        """Returns what runs beside a rollout on engines: nothing, or behind a merge what is no such rollout.

        The engine keeps its memory, so the bound of its pool stays as it was.
        """
        other = self.pipelines[1 - index]
        if self.merged is None or not other.is_ready or other.is_exclusive:
            return ALONE[index]
        freed = 1 - 1 / self.num_workers
        shares = Share(compute=1 - freed), Share(compute=freed, memory=freed)
        return Action(shares=(shares[index], shares[1 - index]), rates=(1.0, 1.0))

    def _trial(self, kinds: tuple[SubStageKind | None, SubStageKind | None]) -> Split | None:
        """Returns a split to measure, or None. After the plan, it measures pairs that were too short
        before."""
        if self._given is not None or self.mode not in (Mode.TRIAL, Mode.SHARED):
            return None
        if any(live.is_exclusive for live in self.pipelines):
            return None
        one, two = kinds
        return self._measured.to_try(one, two) if one is not None and two is not None else None

    def _chosen(self) -> Action:
        one, two = self.pipelines
        policy = self._policy if self._policy is not None else Multiplexing(self.table, 1)
        return policy.decide((one.upcoming(), two.upcoming()), first_of(one.claim, two.claim))

    def _apply(
        self,
        shares: tuple[Share | None, Share | None],
        kinds: tuple[SubStageKind | None, SubStageKind | None],
        now: float,
    ) -> None:
        if (shares, kinds) == (self.shares, self._kinds):
            return
        before, self.shares, self._kinds = self.shares, shares, kinds
        self.epoch += 1
        for index, live in enumerate(self.pipelines):
            if not live.holds or shares[index] is not None:
                self._to_pause[index] = None
            elif before[index] is not None:
                self._to_pause[index] = (self.epoch, now)
            if live.holds and (shares[index] is None or shares[1 - index] is not None):
                live.disturbed()
        self.decisions.append(Decision(time_s=now, mode=self.mode, kinds=kinds, shares=shares))
