"""How far a group is against its certified timetable, and how far ahead of it one job may run.

Owns: the timetable's anchor, the earliest moment from which the group is sure to keep it. Promises, as long
as no phase exceeds its worst case: the anchor never moves to a later time, every phase starts no later than
anchor + timetable, and two iterations of a job start no further apart than its SLO allows. Never: grants
anything.

Why jobs are held back at all: phases are mostly shorter than their worst case. A job that starts iteration n
very early, and n + 1 at its certified time because the others then take theirs, would see one iteration
longer than the certificate says (two jobs of 50 s + 50 s on two rollout nodes: 150 s instead of 100). So a
job may be ahead of the timetable by what its SLO leaves over its certified longest iteration, and no more;
the timetable itself moves up with the slowest job of the group, so nobody waits for worst cases that did not
happen.
"""

from dataclasses import dataclass

from rose.scheduler.group.certificate import Certificate
from rose.scheduler.group.order import PhaseKind


@dataclass(slots=True)
class _Last:
    """What began last on a resource, or of a job, and until when it keeps the next waiting at worst.

    `turn` counts steps over all passes; -1: nothing yet.
    """

    time_s: float
    turn: int = -1


class Pace:
    """The timetable of one certified group in motion. `now` is when its first phases may start."""

    def __init__(self, certificate: Certificate, now: float) -> None:
        self._certificate = certificate
        self._order = certificate.order
        self._gone: set[str] = set()
        self._on = {key: _Last(now) for key in self._order.steps_on}
        self._of = {name: _Last(now) for name in self._order.steps_of_job}
        for name, steps in self._order.steps_of_job.items():
            if self._order.steps[steps[0]].kind is PhaseKind.TRAIN:
                self._of[name].turn = steps[0]  # its first pass begins with a rollout, later in the order
        self._lowest_anchor_s = self.anchor_s(now)

    def anchor_s(self, now: float) -> float:
        """When the timetable's first pass begins, for all that is still to start: later than now."""
        anchors = [
            max(last.time_s, now) - self._planned_s(self._following(self._order.steps_on[key], last.turn))
            for key, last in self._on.items()
            if not self._gone.issuperset(self._order.steps[step].job for step in self._order.steps_on[key])
        ]
        anchors += [
            max(last.time_s, now)
            - self._planned_s(self._following(self._order.steps_of_job[name], last.turn))
            for name, last in self._of.items()
            if name not in self._gone
        ]
        return max(anchors, default=float("-inf"))

    def delay_s(self, now: float) -> float:
        """How much later than certified the group is: some phase, or a job between two, exceeded its worst
        case. Above zero, the certificate no longer holds: profile again, certify again or move a job."""
        return max(0.0, self.anchor_s(now) - self._lowest_anchor_s)

    def not_before_s(self, turn: int, now: float) -> float:
        """When a step may start. Only rollouts, which begin an iteration, ever wait."""
        step = self._order.steps[turn % len(self._order.steps)]
        if step.kind is PhaseKind.TRAIN:
            return float("-inf")
        return self.anchor_s(now) + self._planned_s(turn) - self._certificate.bounds[step.job].lead_s

    def start(self, turn: int, now: float) -> None:
        """A phase began; it may take what the certificate was made with."""
        self._lowest_anchor_s = min(self._lowest_anchor_s, self.anchor_s(now))
        self._note(turn, now + self._certificate.durations_s[turn % len(self._order.steps)])

    def end(self, turn: int, now: float) -> None:
        """It ended, or was given up."""
        self._note(turn, now)

    def free(self, turn: int, resource: int, now: float) -> None:
        """A tail was moved aside: the next on this resource waits no longer."""
        if self._on[resource].turn == turn:
            self._on[resource].time_s = now

    def ready(self, turn: int, now: float) -> None:
        """A job asks for this step: late, if that is after the worst case of what it did before."""
        job = self._order.steps[turn % len(self._order.steps)].job
        steps = self._order.steps_of_job[job]
        last = self._of[job]
        if job in self._gone or self._following(steps, last.turn) != turn:
            last.turn = max(-1, turn - 1)
            last.time_s = now
        self._gone.discard(job)
        last.time_s = max(last.time_s, now)

    def leave(self, job: str) -> None:
        """The job is gone: nothing waits for it, until it is ready again."""
        self._gone.add(job)

    def _note(self, turn: int, time_s: float) -> None:
        step = self._order.steps[turn % len(self._order.steps)]
        for key in step.resources:
            if self._on[key].turn <= turn:  # a resource that a tail freed may be further
                self._on[key] = _Last(time_s, turn)
        self._of[step.job] = _Last(time_s + self._certificate.syncs_s[turn % len(self._order.steps)], turn)

    def _following(self, steps: tuple[int, ...], turn: int) -> int:
        """The next turn in a chain of steps, without those of jobs that are gone."""
        cycle, index = divmod(turn, len(self._order.steps))
        while True:
            for step in steps:
                if step > index and self._order.steps[step].job not in self._gone:
                    return cycle * len(self._order.steps) + step
            cycle, index = cycle + 1, -1

    def _planned_s(self, turn: int) -> float:
        cycle, step = divmod(turn, len(self._order.steps))
        return self._certificate.starts_s[step] + cycle * self._certificate.cycle_s
