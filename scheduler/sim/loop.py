"""The simulation's event loop: jobs arrive, wait, take others' places, end, drift and fail under one policy.

Owns simulated time, the bill, and the verdicts on SLOs. The production policy decides everything and sees
what the scheduler would see. The same input gives the same result.

Jobs take the worst-case time that their group promises. With `keeps_ends` they leave after the trace's
duration whatever their slowdown, as in the paper. Without it slow jobs stay longer, which shows only in the
total dollars.
"""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from rose.errors import PoolsFull
from rose.scheduler.cluster.candidates import CandidateKind
from rose.scheduler.cluster.groups import PAUSE_S, Cluster, Rearrangement
from rose.scheduler.cluster.policies import ClusterPolicy
from rose.scheduler.cluster.pools import Pools
from rose.scheduler.cluster.preemption import Preemption
from rose.scheduler.cluster.residents import Resident
from rose.scheduler.group.cycle import EPSILON, promised_s
from rose.scheduler.group.model import Job, SloKind
from rose.scheduler.sim.progress import OnEnd
from rose.scheduler.sim.waiting import Queue, Waiting
from rose.scheduler.sim.workloads import Submission

_ROUNDING = 1e-6
"""The relative rounding of sums over thousands of iterations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """At `time_s`, a job's phases take `factor` times what they took at first: drift."""

    time_s: float
    name: str
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """At `time_s` a job crashes, and comes back as a new arrival after `away_s`."""

    time_s: float
    name: str
    away_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leaves:
    """A running job has ended the iteration after which it gives its place to another."""

    name: str
    by: str


@dataclass(slots=True, kw_only=True)
class _Run:
    """What a job has received so far."""

    submission: Submission
    waited_s: float = 0.0
    placed_s: float = 0.0
    """When it was placed last."""
    worst: float = 0.0
    """Longest promised iteration over the solo one."""
    elapsed_s: float = 0.0
    """Iterations and pauses, where the job has to be slowed to count: work times slowdown."""
    work_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    """A simulation's result. Dollars pay for nodes from the first arrival to the last end."""

    dollars: float
    duration_s: float
    num_jobs: int
    num_attained: int
    num_moves: int
    kinds: dict[CandidateKind, int] = field(default_factory=dict)
    violated: tuple[str, ...] = ()
    peak_dollars_per_hour: float = 0.0
    mean_attainment: float = 1.0
    """Jobs whose iterations kept the SLO on average, pauses included."""
    num_preemptions: int = 0
    waited_s: dict[int, float] = field(default_factory=dict)
    """The mean time in the queue of the jobs of each priority."""

    @property
    def dollars_per_hour(self) -> float:
        return self.dollars / (self.duration_s / 3600)

    @property
    def attainment(self) -> float:
        return self.num_attained / self.num_jobs


class Simulation:
    """One run of a policy over submissions."""

    def __init__(
        self,
        submitted: Sequence[Submission],
        policy: ClusterPolicy,
        pools: Pools | None = None,
        *,
        keeps_ends: bool = False,
        pause_s: float = PAUSE_S,
        changes: Sequence[Drift] = (),
        failures: Sequence[Failure] = (),
        progress: OnEnd | None = None,
        preemption: Preemption | None = None,
    ) -> None:
        self.cluster = Cluster(pools or Pools(), keeps_ends=keeps_ends, pause_s=pause_s)
        self._policy = policy
        self._progress = progress
        self._runs = {one.job.name: _Run(submission=one) for one in submitted}
        self._order = itertools.count()
        self._events: list[tuple[float, int, object]] = []
        self._now_s = 0.0
        self._dollars = 0.0
        self._peak = 0.0
        self._num_moves = 0
        self._kinds = dict.fromkeys(CandidateKind, 0)
        self._num_preemptions = 0
        self._ended: set[str] = set()
        self._rules = preemption if preemption is not None else Preemption()
        self._queue = Queue(submitted, self.cluster, policy, self._rules)
        self._has_banks = any(one.job.slo_kind is SloKind.LIFETIME for one in submitted)
        for one in submitted:
            self._at(one.arrival_s, one)
        for change in changes:
            self._at(change.time_s, change)
        for failure in failures:
            self._at(failure.time_s, failure)

    def run(self) -> SimulationResult:
        """Plays all events until the last job has ended."""
        first_s = self._events[0][0]
        while len(self._ended) < len(self._runs):
            event = self._next()
            if isinstance(event, Submission):
                self._arrive(event)
            elif isinstance(event, Drift):
                self._change(event)
            elif isinstance(event, Failure):
                self._fail(event)
            elif isinstance(event, _Leaves):
                self._give_way(event)
            else:
                assert isinstance(event, str)
                self._leave(event)
            is_last = not self._events or self._events[0][0] > self._now_s
            if is_last and not self._queue.takeovers:  # a move could take the room that a job waits for
                self._rearrange()
        violated = tuple(name for name, run in self._runs.items() if not _is_attained(run))
        return SimulationResult(
            dollars=self._dollars,
            duration_s=self._now_s - first_s,
            num_jobs=len(self._runs),
            num_attained=len(self._runs) - len(violated),
            num_moves=self._num_moves,
            kinds=self._kinds,
            violated=violated,
            peak_dollars_per_hour=self._peak,
            mean_attainment=sum(map(_is_mean_attained, self._runs.values())) / len(self._runs),
            num_preemptions=self._num_preemptions,
            waited_s=mean_waits_s((run.submission, run.waited_s) for run in self._runs.values()),
        )

    # Time -----------------------------------------------------------------------------------------------

    def _at(self, time_s: float, event: object) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event))

    def _next(self) -> object:
        """The next event: the earliest end of a job, or what is planned before."""
        ends = self.cluster.residents.values()
        leaver = min(ends, key=lambda resident: resident.end_s, default=None)
        if leaver is not None and (not self._events or leaver.end_s <= self._events[0][0]):
            self._advance(leaver.end_s)
            return leaver.job.name
        if not self._events:
            names = ", ".join(self._queue.waiting)
            raise PoolsFull(f"the pools have too few nodes for {names}, even when nothing else runs")
        time_s, _, event = heapq.heappop(self._events)
        self._advance(time_s)
        return event

    def _advance(self, now_s: float) -> None:
        cost = self.cluster.dollars_per_hour
        self._peak = max(self._peak, cost)
        self._dollars += cost * (now_s - self._now_s) / 3600
        for name, resident in self.cluster.residents.items():
            later = resident.at(now_s)
            done_s = resident.at(self._now_s).work_s - later.work_s
            run = self._runs[name]
            run.work_s += done_s
            run.elapsed_s += done_s * resident.slowdown
            if done_s > 0:
                run.worst = max(run.worst, resident.slowdown)
        self._now_s = now_s

    # Events ---------------------------------------------------------------------------------------------

    def _arrive(self, one: Submission) -> None:
        self._place(one.job, one.work_s)

    def _place(self, job: Job, work_s: float, resident: Resident | None = None) -> None:
        self._queue.add(job, work_s, self._now_s, resident)
        ordered = self._queue.ordered()
        number = next(number for number, each in enumerate(ordered) if each.job.name == job.name)
        self._try(ordered[number], ordered[:number])

    def _try(self, each: Waiting, ahead: Sequence[Waiting]) -> bool:
        """Places a waiting job; else others may be told to give it their places."""
        self._refresh()
        job = each.job
        candidate = self._queue.find(each, ahead, self._now_s)
        if candidate is None:
            for victim in self._queue.take_over(each, ahead, self._now_s):
                self._at(self._iteration_end_s(victim), _Leaves(name=victim, by=job.name))
            return False
        self.cluster.submit(job, self._now_s, each.work_s)
        if each.resident is not None:
            later_s = self._now_s + self.cluster.pause_s  # it starts again, which takes as long as a move
            self.cluster.residents[job.name] = replace(each.resident, since_s=later_s)
        self._kinds[candidate.kind] += 1
        self.cluster.apply(Rearrangement(groups=(candidate.group,)), self._now_s)
        self._queue.placed(job.name)
        run = self._runs[job.name]
        run.waited_s, run.placed_s = run.waited_s + self._now_s - each.since_s, self._now_s
        return True

    def _iteration_end_s(self, name: str) -> float:
        """When a running job ends the first iteration after which it may leave, at its present pace."""
        resident = self.cluster.residents[name].at(self._now_s)
        solo_s, ran_s = resident.job.solo_s, self._now_s - self._runs[name].placed_s
        done_s = self._runs[name].submission.work_s - resident.work_s
        left_s = (solo_s - done_s % solo_s) * resident.slowdown
        must_run_s = max(0.0, self._rules.min_run_s - ran_s - left_s)
        return (
            self._now_s
            + left_s
            + math.ceil(must_run_s / (solo_s * resident.slowdown)) * solo_s * resident.slowdown
        )

    def _give_way(self, leaves: _Leaves) -> None:
        """A job goes back to the queue, unless the other no longer needs its place."""
        if (
            leaves.name not in self._queue.takeovers.get(leaves.by, ())
            or leaves.name not in self.cluster.residents
        ):
            return
        resident = self.cluster.residents[leaves.name].at(self._now_s)
        self.cluster.remove(leaves.name, self._now_s)
        self._num_preemptions += 1
        self._queue.left(leaves.name, leaves.by)
        self._queue.add(resident.job, resident.work_s, self._now_s, resident)
        self._try_all()

    def _try_all(self) -> None:
        left = self._queue.ordered()
        ahead: list[Waiting] = []
        while left:
            each = left.pop(0)
            if not self._try(each, ahead):
                ahead.append(each)

    def _leave(self, name: str) -> None:
        self.cluster.remove(name, self._now_s)
        self._ended.add(name)
        if self._progress is not None:
            self._progress(len(self._ended), len(self._runs))
        self._try_all()

    def _rearrange(self) -> None:
        left = self._policy.max_moves
        while left > 0:
            self._refresh()
            change = self._policy.rearrange(self.cluster, self._now_s, left)
            if change is None:
                return
            self.cluster.apply(change, self._now_s)
            left -= max(1, len(change.moved))
            for name in change.moved:
                self._pause(name)

    def _pause(self, name: str) -> None:
        self._num_moves += 1
        self._runs[name].elapsed_s += self.cluster.pause_s

    def _refresh(self) -> None:
        if self._has_banks:
            self.cluster.refresh(self._now_s)

    def _change(self, change: Drift) -> None:
        """A job's times change. If its group then exceeds a limit, the job is placed again."""
        if change.name not in self.cluster.residents:
            return
        given = self._runs[change.name].submission.job
        current = self.cluster.residents[change.name].job
        job = replace(
            current,
            rollout_s=given.rollout_s * change.factor,
            train_s=given.train_s * change.factor,
        )
        group = self.cluster.change(job, self._now_s)
        promises = promised_s(group)
        is_over = any(
            promise > self.cluster.limit_s(member.job) * (1 + EPSILON)
            for member, promise in zip(group.members, promises, strict=True)
        )
        if len(group.members) > 1 and is_over:
            self._resubmit(job)

    def _resubmit(self, job: Job) -> None:
        resident = self.cluster.residents[job.name].at(self._now_s)
        self.cluster.remove(job.name, self._now_s)
        self._place(job, resident.work_s, resident.paused(self.cluster.pause_s))
        self._pause(job.name)

    def _fail(self, failure: Failure) -> None:
        if failure.name not in self.cluster.residents:
            return
        resident = self.cluster.residents[failure.name].at(self._now_s)
        self.cluster.remove(failure.name, self._now_s)
        again = Submission(job=resident.job, arrival_s=self._now_s + failure.away_s, work_s=resident.work_s)
        self._at(again.arrival_s, again)


def mean_waits_s(waits: Iterable[tuple[Submission, float]]) -> dict[int, float]:
    """Returns the mean of the waits of each priority, the highest first."""
    by_priority = defaultdict[int, list[float]](list)
    for one, waited_s in waits:
        by_priority[one.priority].append(waited_s)
    return {
        each: sum(by_priority[each]) / len(by_priority[each]) for each in sorted(by_priority, reverse=True)
    }


def _is_attained(run: _Run) -> bool:
    """No iteration beyond the SLO (unless it is the lifetime's), nor all of them with their pauses."""
    job = run.submission.job
    each = job.slo_kind is SloKind.LIFETIME or run.worst <= job.slo * (1 + _ROUNDING)
    return each and _is_mean_attained(run)


def _is_mean_attained(run: _Run) -> bool:
    return run.elapsed_s <= run.submission.job.slo * (1 + _ROUNDING) * run.work_s
