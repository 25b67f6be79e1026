"""Whether a cyclic order keeps every job's SLO, proved by a timetable that anyone can check.

Owns certificates, and the constraints that an order and its jobs' SLOs impose. A certificate's timetable
satisfies all of them in whole microseconds, with worst-case phase times. An order without such a timetable is
refused with the job, its bound and its SLO. Callers choose the order.

The proof: steps that follow one another, on a resource or in a job, give start[v] >= start[u] + duration[u] -
passes * cycle; a job's longest iteration gives start[u] >= start[v] - limit. Such a system has a solution for
a cycle time exactly if no loop of constraints is positive (max-plus algebra; maxplus.py finds the shortest
cycle). Because every start is a maximum of earlier starts plus durations, phases that are shorter than
assumed can only make later ones earlier. So the timetable remains an upper bound (pace.py says what follows
for one iteration).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rose.errors import RoseError
from rose.scheduler.group.maxplus import NoTimetable, Precedence, shortest_cycle
from rose.scheduler.group.model import Group, Job, Phase, SloKind
from rose.scheduler.group.order import CyclicOrder

TICKS_PER_S = 1_000_000
"""Whole numbers, so that a check is exact. Durations are rounded up."""
SLO_TOLERANCE = 1e-6
"""A share of the limit: rounding must not refuse a group that meets its SLO exactly."""


class CertificateError(RoseError):
    """The order can't be certified. Names the job, the iteration it could be promised, and its SLO."""

    def __init__(self, message: str, *, job: str, bound_s: float, limit_s: float) -> None:
        super().__init__(message)
        self.job = job
        self.bound_s = bound_s
        self.limit_s = limit_s


@dataclass(frozen=True, slots=True, kw_only=True)
class JobBound:
    """What a job is promised: `longest_s` from one rollout's start to the next, `mean_s` over whole passes.

    `limit_s` is what its SLO allows each iteration to take; `alone_s` is one alone on the group's nodes.
    """

    slo_kind: SloKind
    num_iterations: int
    mean_s: float
    longest_s: float
    limit_s: float
    alone_s: float
    lead_s: float
    """How far the job may run ahead of the timetable without one iteration becoming longer than allowed."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """A timetable of one pass through an order, repeated every cycle."""

    order: CyclicOrder
    starts_ticks: tuple[int, ...]
    cycle_ticks: int
    constraints: tuple[Precedence, ...]
    bounds: Mapping[str, JobBound]
    durations_s: tuple[float, ...]
    gaps_s: tuple[float, ...]
    """The time from the end of each step until the same job's next step may start."""

    @cached_property
    def cycle_s(self) -> float:
        """The length of one pass."""
        return self.cycle_ticks / TICKS_PER_S

    @cached_property
    def starts_s(self) -> tuple[float, ...]:
        """The start of every step, from the beginning of a pass."""
        return tuple(ticks / TICKS_PER_S for ticks in self.starts_ticks)

    @property
    def progress(self) -> float:
        """The jobs' speeds relative to running alone, summed: the number of jobs if nobody ever waits."""
        return sum(bound.alone_s / bound.mean_s for bound in self.bounds.values())

    def check(self) -> None:
        """Proves the timetable in whole numbers, however it was found. Raises: AssertionError."""
        for each in self.constraints:
            earliest = self.starts_ticks[each.before] + each.ticks - each.passes * self.cycle_ticks
            assert self.starts_ticks[each.after] >= earliest, f"{each} does not hold"


def certify(group: Group, order: CyclicOrder, limits_s: Mapping[str, float] | None = None) -> Certificate:
    """Returns the shortest timetable of this order in which every member meets its SLO.

    limits_s: what is left of the SLOs of jobs that have used some; the other jobs have all of theirs.
    Infinite: no SLO.

    Raises: CertificateError; ValueError for an order of other jobs.
    """
    jobs = {member.job.name: member.job for member in group.members}
    if jobs.keys() != order.steps_of_job.keys():
        raise ValueError(
            f"group {group.name} has {', '.join(jobs)}, the order {', '.join(order.steps_of_job)}"
        )
    durations_s = tuple(_duration_s(group, jobs[step.job], step.kind) for step in order.steps)
    gaps_s = tuple(jobs[step.job].after_s(step.kind) for step in order.steps)
    precedence, at_least = _precedence(order, durations_s, gaps_s)
    limits = {name: limit_s(job) for name, job in jobs.items()} | dict(limits_s or {})
    slo = [
        edge
        for name in jobs
        if math.isfinite(limits[name])
        for edge in _slo(order, name, _limit_ticks(order, limits[name]))
    ]

    def issue(starts: list[int], cycle: int) -> Certificate:
        return Certificate(
            order=order,
            starts_ticks=tuple(starts),
            cycle_ticks=cycle,
            constraints=(*precedence, *slo),
            bounds={
                name: _bound(group, order, job, limits[name], starts, cycle) for name, job in jobs.items()
            },
            durations_s=durations_s,
            gaps_s=gaps_s,
        )

    try:
        cycle, starts = shortest_cycle(len(order.steps), [*precedence, *slo], at_least)
    except NoTimetable:
        cycle, starts = shortest_cycle(len(order.steps), precedence, at_least)
        raise _refusal(group, jobs, issue(starts, cycle)) from None
    return issue(starts, cycle)


def shortest_s(group: Group, order: CyclicOrder) -> float:
    """Returns the shortest pass through this order, whatever SLOs its members have."""
    jobs = {member.job.name: member.job for member in group.members}
    durations_s = [_duration_s(group, jobs[step.job], step.kind) for step in order.steps]
    gaps_s = [jobs[step.job].after_s(step.kind) for step in order.steps]
    return shortest_cycle(len(order.steps), *_precedence(order, durations_s, gaps_s))[0] / TICKS_PER_S


def limit_s(job: Job) -> float:
    """Returns the longest iteration that a job's SLO allows before any of it is used."""
    return job.slo * job.solo_s


def _duration_s(group: Group, job: Job, kind: Phase) -> float:
    return job.rollout_s if kind is Phase.ROLLOUT else job.train_s_on(group.num_train_nodes)


def _ticks(seconds: float) -> int:
    # What is below a picosecond is the float's own rounding, not time.
    return math.ceil(round(seconds * TICKS_PER_S, 6))


def _limit_ticks(order: CyclicOrder, seconds: float) -> int:
    # Each step was rounded up by less than a tick.
    return math.floor(seconds * (1 + SLO_TOLERANCE) * TICKS_PER_S) + len(order.steps)


def _precedence(
    order: CyclicOrder, durations_s: Sequence[float], gaps_s: Sequence[float]
) -> tuple[list[Precedence], int]:
    """What follows what, and the work in one pass of the busiest resource or job: no pass is shorter."""
    ticks = [_ticks(duration) for duration in durations_s]
    after = [_ticks(each + gap) for each, gap in zip(durations_s, gaps_s, strict=True)]
    chains = [(steps, ticks) for steps in order.steps_on.values()]
    chains += [(steps, after) for steps in order.steps_of_job.values()]
    at_least = max(sum(lengths[step] for step in steps) for steps, lengths in chains)
    constraints = [
        Precedence(before=before, after=following, ticks=lengths[before], passes=int(following <= before))
        for steps, lengths in chains
        for before, following in zip(steps, (*steps[1:], steps[0]), strict=True)
    ]
    return constraints, at_least


def _slo(order: CyclicOrder, job: str, limit: int) -> Iterator[Precedence]:
    """Every iteration keeps the limit, whatever the SLO is of: its last ones may be part of a pass."""
    rollouts = _rollouts(order, job)
    for before, following in zip(rollouts, (*rollouts[1:], rollouts[0]), strict=True):
        yield Precedence(before=following, after=before, ticks=-limit, passes=-int(following <= before))


def _rollouts(order: CyclicOrder, job: str) -> list[int]:
    return [index for index in order.steps_of_job[job] if order.steps[index].kind is Phase.ROLLOUT]


def _bound(
    group: Group, order: CyclicOrder, job: Job, allowed_s: float, starts: list[int], cycle: int
) -> JobBound:
    times = [starts[index] for index in _rollouts(order, job.name)]
    longest = max(
        following - time for time, following in zip(times, (*times[1:], times[0] + cycle), strict=True)
    )
    is_free = job.slo_kind is SloKind.LIFETIME or math.isinf(allowed_s)
    lead_s = math.inf if is_free else max(0, _limit_ticks(order, allowed_s) - longest) / TICKS_PER_S
    return JobBound(
        slo_kind=job.slo_kind,
        num_iterations=len(times),
        mean_s=cycle / len(times) / TICKS_PER_S,
        longest_s=longest / TICKS_PER_S,
        limit_s=allowed_s,
        alone_s=group.solo_s(job),
        lead_s=lead_s,
    )


def _refusal(group: Group, jobs: Mapping[str, Job], found: Certificate) -> CertificateError:
    """The job that is furthest from its SLO in the shortest cycle without SLOs."""

    def excess(name: str) -> float:
        bound = found.bounds[name]
        return bound.longest_s / bound.limit_s if bound.limit_s > 0 else math.inf

    worst = max(jobs, key=excess)
    limit, promised = found.bounds[worst].limit_s, found.bounds[worst].longest_s
    whole = limit_s(jobs[worst])
    said = "its SLO is" if limit == whole else f"what is left of its SLO of {whole:.6g} s is"
    return CertificateError(
        f"group {group.name}: job {worst} could be promised an iteration of {promised:.6g} s, {said} "
        f"{limit:.6g} s ({jobs[worst].slo:g} x {jobs[worst].solo_s:.6g} s alone): move it, or loosen its SLO",
        job=worst,
        bound_s=promised,
        limit_s=limit,
    )
