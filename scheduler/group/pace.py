"""How far a group is against its certified timetable, and how far ahead of it one job may run.

Owns the timetable's anchor: the earliest time from which the group is sure to keep the timetable. As long as
no phase exceeds its worst case, the anchor never moves to a later time, and every phase starts no later than
anchor + timetable. Two iterations of a job then start no further apart than its SLO allows. Pure; all of its
state is in `PaceState`.

Jobs are held back because phases are mostly shorter than their worst case. If a job started iteration n very
early, and n + 1 only at its certified time, the first would be longer than the certificate says (two jobs of
50 s + 50 s on two rollout nodes: 150 s instead of 100). So a job may be ahead of the timetable by at most
what its SLO leaves over its certified longest iteration. The timetable itself moves up with the slowest job
of the group, so no job waits for worst cases that did not happen.

A job that joins or returns would move the anchor to a later time if its turn came while the others are ahead.
So it takes the first pass in which none of the others is late for its own next iteration. When a job joins,
the timetable is a new one, and the group may be late in it from the start. Then the new job is let in only
when each of the others has begun an iteration in it. One case remains. An iteration that is in progress while
the timetable changes was begun for the old one, and its successor's place in the new timetable can be later
than in the old (`late_s`). If SLOs leave no slack and no place suits all jobs, this iteration may be longer
than its SLO allows, once.
"""

import math
from dataclasses import dataclass, field

from rose.scheduler.group.certificate import Certificate
from rose.scheduler.group.model import Phase

MAX_PASSES_LATER = 2
"""The most passes that a job waits when it joins: by then all present iterations of the others are over."""
ROUNDING_S = 1e-6
"""A timetable's own resolution."""


@dataclass(slots=True, kw_only=True)
class PaceState:
    """What the next scheduler needs. Its times are on the clock that `now` was read from."""

    on: dict[int, tuple[float, int]] = field(default_factory=dict)
    """For each resource, the time and step number of `_Last`."""
    of: dict[str, tuple[float, int]] = field(default_factory=dict)
    """The same for each job."""
    began_s: dict[str, float] = field(default_factory=dict)
    gone: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Last:
    """The step that began last on a resource or of a job, and until when the next waits for it at worst.

    `number` counts steps over all passes; -1: none yet.
    """

    time_s: float
    number: int = -1


class Pace:
    """The timetable of one certified group in motion. `now` is when its first phases may start."""

    def __init__(self, certificate: Certificate, now: float) -> None:
        self._certificate = certificate
        self._order = certificate.order
        self._gone: set[str] = set()
        self._on = {key: _Last(now) for key in self._order.steps_on}
        self._of = {name: _Last(now) for name in self._order.steps_of_job}
        for name, steps in self._order.steps_of_job.items():
            if self._order.steps[steps[0]].kind is Phase.TRAIN:
                self._of[name].number = steps[0]  # its first pass begins with a rollout, later in the order
        self._began_s: dict[str, float] = {}
        """When each job's latest rollout began."""
        self._awaited: dict[str, dict[str, float]] = {}
        """For each job that may not join yet, the iterations of others that must end first."""
        self._lowest_anchor_s = self.anchor_s(now)

    def state(self) -> PaceState:
        """Returns what `restore` needs."""
        return PaceState(
            on={key: (last.time_s, last.number) for key, last in self._on.items()},
            of={name: (last.time_s, last.number) for name, last in self._of.items()},
            began_s=dict(self._began_s),
            gone=sorted(self._gone),
        )

    def restore(self, state: PaceState, later_s: float) -> None:
        """Restores the `state` of a pace with the same certificate, and adds `later_s` to its times."""
        self._on = {key: _Last(time_s + later_s, number) for key, (time_s, number) in state.on.items()}
        self._of = {name: _Last(time_s + later_s, number) for name, (time_s, number) in state.of.items()}
        self._began_s = {name: time_s + later_s for name, time_s in state.began_s.items()}
        self._gone = set(state.gone)

    def take_over(self, old: "Pace", job: str, number: int, started_s: float | None) -> None:
        """A member of an earlier order began this step at `started_s`; None: the step is its next one."""
        ready_s = old._of[job].time_s if started_s is None else started_s
        self._gone.discard(job)
        self._of[job] = _Last(ready_s, max(-1, number - 1))
        if started_s is not None:
            self._note(number, started_s + self._certificate.durations_s[number % len(self._order.steps)])
        if job in old._began_s:
            self._began_s[job] = old._began_s[job]

    def anchor_s(self, now: float) -> float:
        """Returns when the timetable's first pass begins, such that every later step can keep it."""
        anchors = [
            max(last.time_s, now) - self._planned_s(self._following(self._order.steps_on[key], last.number))
            for key, last in self._on.items()
            if not self._gone.issuperset(self._order.steps[step].job for step in self._order.steps_on[key])
        ]
        anchors += [
            max(last.time_s, now)
            - self._planned_s(self._following(self._order.steps_of_job[name], last.number))
            for name, last in self._of.items()
            if name not in self._gone
        ]
        return max(anchors, default=float("-inf"))

    def delay_s(self, now: float) -> float:
        """Returns how much later than certified the group is: some phase, or a job between two, exceeded its
        worst case. Above zero, the certificate no longer holds: profile again, certify again or move a
        job."""
        return max(0.0, self.anchor_s(now) - self._lowest_anchor_s)

    def not_before_s(self, number: int, now: float) -> float:
        """Returns when a step may start. Only rollouts, which begin an iteration, ever wait.

        No rollout waits so long that its job's present iteration becomes too long.
        """
        step = self._order.steps[number % len(self._order.steps)]
        if step.kind is Phase.TRAIN:
            return float("-inf")
        earliest_s = self.anchor_s(now) + self._planned_s(number) - self._certificate.bounds[step.job].lead_s
        return min(earliest_s, self._due_s(step.job))

    def start(self, number: int, now: float) -> None:
        """A phase began. It may take its certified time."""
        self._lowest_anchor_s = min(self._lowest_anchor_s, self.anchor_s(now))
        step = self._order.steps[number % len(self._order.steps)]
        if step.kind is Phase.ROLLOUT:
            self._began_s[step.job] = now
        self._note(number, now + self._certificate.durations_s[number % len(self._order.steps)])

    def end(self, number: int, now: float) -> None:
        """A phase ended or was given up."""
        self._note(number, now)

    def free(self, number: int, resource: int, now: float) -> None:
        """A tail was moved aside: the next step on this resource need not wait."""
        if self._on[resource].number == number:
            self._on[resource].time_s = now

    def ready(self, number: int, now: float) -> int | None:
        """A job asks for this step. It is late if the worst case of what came before is over.

        Returns by how many passes a job that was absent must come later; 0 for all others. None: the job may
        not join yet, and must ask again.
        """
        job = self._order.steps[number % len(self._order.steps)].job
        last = self._of[job]
        if job in self._gone:
            return self._join(job, number, now)
        if self._following(self._order.steps_of_job[job], last.number) != number:
            last.number = max(-1, number - 1)
        last.time_s = now  # also where what came in between took less than its worst case
        return 0

    def _join(self, job: str, number: int, now: float) -> int | None:
        before = self._of[job]
        self._gone.discard(job)
        for passes in range(MAX_PASSES_LATER):
            self._of[job] = _Last(now, max(-1, number + passes * len(self._order.steps) - 1))
            if self.late_s(now) <= ROUNDING_S:
                self._awaited.pop(job, None)
                return passes
        others = {name: began_s for name, began_s in self._began_s.items() if name not in self._gone}
        awaited = self._awaited.setdefault(job, others)
        if any(others.get(name) == began_s for name, began_s in awaited.items()):
            self._gone.add(job)
            self._of[job] = before
            return None
        del self._awaited[job]
        self._of[job] = _Last(now, number + MAX_PASSES_LATER * len(self._order.steps) - 1)
        return MAX_PASSES_LATER

    def late_s(self, now: float) -> float:
        """Returns by how many seconds the next iteration would begin too late for the present one to be as
        long as allowed, for the job that is worst off; at most 0 if it is late for none."""
        anchor_s = self.anchor_s(now)
        late_s = (
            anchor_s + self._planned_s(self._next_rollout(job)) - self._due_s(job)
            for job in self._began_s
            if job not in self._gone
        )
        return max(late_s, default=0.0)

    def leave(self, job: str) -> None:
        """The job is absent: nothing waits for it until it is ready again."""
        self._gone.add(job)
        self._began_s.pop(job, None)

    def _due_s(self, job: str) -> float:
        """When the job's next rollout must start, so that its present iteration is as long as allowed."""
        bound = self._certificate.bounds[job]
        return self._began_s.get(job, math.inf) + bound.longest_s + bound.lead_s

    def _next_rollout(self, job: str) -> int:
        steps = self._order.steps_of_job[job]
        rollouts = tuple(step for step in steps if self._order.steps[step].kind is Phase.ROLLOUT)
        return self._following(rollouts, self._of[job].number)

    def _note(self, number: int, time_s: float) -> None:
        step = self._order.steps[number % len(self._order.steps)]
        for key in step.resources:
            if self._on[key].number <= number:  # a resource that a tail freed may be further
                self._on[key] = _Last(time_s, number)
        self._of[step.job] = _Last(time_s + self._certificate.gaps_s[number % len(self._order.steps)], number)

    def _following(self, steps: tuple[int, ...], number: int) -> int:
        """The number of the next step in a chain, without steps of absent jobs and steps given up."""
        cycle, index = divmod(number, len(self._order.steps))
        while True:
            for step in steps:
                job = self._order.steps[step].job
                following = cycle * len(self._order.steps) + step
                if step > index and job not in self._gone and following > self._of[job].number:
                    return following
            cycle, index = cycle + 1, -1

    def _planned_s(self, number: int) -> float:
        cycle, step = divmod(number, len(self._order.steps))
        return self._certificate.starts_s[step] + cycle * self._certificate.cycle_s
