"""Permits: who may use which nodes of a group now, granted in the group's cyclic order, as leases.

Owns every job's permit or waiting request, their leases and their epochs; `Line` owns the places in the
order. No node has two holders, except for a tail that its own job moved aside. Permits follow the order,
whatever order requests come in. A job that dies holds nobody up for longer than a lease. Epochs of permits
only grow. Pure; `Pace` knows how long phases take.

    book = PermitBook(certificate.order, lease_s=2.0)
    book.request("a", Phase.ROLLOUT, now)      # repeat it to renew it
    permit = book.permit_of("a")                   # nodes, epoch
    book.heartbeat("a", permit.epoch, now)         # several times per lease, also during the warm-start copy
    book.release("a", permit.epoch, now)           # offloaded: the next one in order gets the nodes
    granted = book.advance(now)                    # after every call above, and at book.next_wake_s(now)

`advance` is the only method that grants and expires. For a holder that comes back late, `heartbeat` and
`release` raise `StalePermit`, and a node must refuse to load anything for an epoch smaller than the largest
that it served. Between two phases a job has `between_s` to ask for the next. After that its step is passed
over, and it gets its next step when it asks again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rose.errors import RoseError
from rose.scheduler.group.line import BookState, Line, LinePlace
from rose.scheduler.group.model import Phase
from rose.scheduler.group.order import CyclicOrder
from rose.scheduler.group.pace import ROUNDING_S, Pace


class StalePermit(RoseError):
    """The call's epoch is not that of the job's permit, which expired, was released or was replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """One phase may run on these resources until its lease ends.

    `guests` are jobs whose tails still run on some GPUs of these nodes: what a guest keeps is not free yet.
    `step_number` counts the steps of the order from the start: it grows along every resource.
    """

    job: str
    kind: Phase
    resources: tuple[int, ...]
    epoch: int
    step_number: int
    granted_s: float
    expires_s: float
    guests: tuple[str, ...] = ()


class PermitBook:
    """The permits of one group. Not thread-safe: its owner calls it from one thread.

    Without `pace`, a job may run ahead of its timetable as far as the order lets it.
    """

    def __init__(
        self,
        order: CyclicOrder,
        *,
        lease_s: float,
        between_s: float | None = None,
        pace: Pace | None = None,
    ) -> None:
        if lease_s <= 0:
            raise ValueError(f"lease_s must be positive, got {lease_s:g}")
        self.order = order
        self._lease_s = lease_s
        self._between_s = between_s if between_s is not None else lease_s
        self._epoch = 0
        self._pace = pace
        self._line = Line(order)
        self._permits: dict[str, Permit] = {}

    def sequence(self) -> list[str]:
        """Returns the jobs in their order from here on, absent ones last."""
        return self._line.sequence()

    def take_over(self, old: "PermitBook", now: float, behind: int = -1) -> None:
        """The members of an earlier order, where they are: permits stay out. On a new book only.

        behind: the step after which they go on in this order.
        Each takes its first iteration after those before it in `old.sequence`. All others take theirs after
        the permits that are out: whoever holds a node is first in line there. In this pace all members are
        gone.
        """
        self._epoch = old._epoch
        last = held = behind
        for name in old.sequence():
            was, place = old._line.place(name), self._line.places.get(name)
            if place is None or was.until_s is None:
                continue
            place.wants, place.until_s, place.freed = was.wants, was.until_s, was.freed
            last = self._line.go_behind(place, last)
            if self._line.step_of(place).kind is not old._line.step_of(was).kind:
                place.position += 1
            number, permit = self._line.number_of(place), old._permits.get(name)
            if permit is not None:
                self._permits[name] = replace(permit, step_number=number)
                held = max(held, number)
            if self._pace is not None and old._pace is not None:
                self._pace.take_over(
                    old._pace, name, number, permit.granted_s if permit is not None else None
                )
                for key in place.freed:
                    self._pace.free(number, key, now)
        for place in self._line.places.values():
            if place.until_s is None:
                self._line.go_behind(place, held)

    def late_s(self, now: float) -> float:
        """Returns by how much an iteration in progress would become too long; not above 0: none would."""
        return self._pace.late_s(now) if self._pace is not None else 0.0

    def state(self) -> BookState:
        """Returns what `restore` needs. The owner keeps the permits."""
        return self._line.state(self._epoch)

    def restore(self, state: BookState, held: Mapping[str, tuple[int, float]], now: float) -> None:
        """From the `state` of a book of the same order. `held`: each permit's epoch, and when it was granted.

        Jobs that waited ask again.
        """
        self._epoch = state.epoch
        self._line.restore(state, now + self._between_s)
        for name, (epoch, granted_s) in held.items():
            self._permits[name] = self._permit(self._line.place(name), epoch, granted_s, now)

    def permit_of(self, job: str) -> Permit | None:
        """Returns the permit that a job holds, or None."""
        return self._permits.get(self._line.place(job).name)

    def permits(self) -> tuple[Permit, ...]:
        """Returns all permits that are held, by epoch."""
        return tuple(sorted(self._permits.values(), key=lambda each: each.epoch))

    def freed_by(self, job: str) -> tuple[int, ...]:
        """Returns the resources of the job's permit that its tail has left."""
        return self._line.place(job).freed

    def is_waiting(self, job: str) -> bool:
        """Returns whether the job's request has a place in the order."""
        return self._line.place(job).wants is not None

    def is_present(self, job: str) -> bool:
        """Returns whether the order waits for this job."""
        return self._line.place(job).until_s is not None

    def request(self, job: str, kind: Phase, now: float) -> None:
        """The job is ready for its next phase of this kind. Repeating the call renews the request's lease,
        which a job that joins must do.

        A step of the other kind that comes first is given up: a job that restarts asks for a rollout wherever
        it was. Raises: ValueError for an unknown job, or one that holds a permit.
        """
        place, permit = self._line.place(job), self._permits.get(job)
        if permit is not None:
            raise ValueError(
                f"job {job} holds a {permit.kind} permit (epoch {permit.epoch}): release it first"
            )
        if place.wants is not kind:
            if self._line.step_of(place).kind is not kind:
                place.position += 1
            passes = self._pace.ready(self._line.number_of(place), now) if self._pace is not None else 0
            if passes is None:
                return
            place.wants = kind
            place.position += passes * len(self.order.steps_of_job[job])
        place.until_s = now + self._lease_s

    def heartbeat(self, job: str, epoch: int, now: float) -> Permit:
        """Renews the permit's lease. Raises: StalePermit."""
        return self._renewed(self._held(job, epoch), now)

    def begin_tail(self, job: str, epoch: int, resources: Sequence[int], now: float) -> None:
        """The rollout's last requests were moved aside: these resources may go to the next in order.

        The permit stays until its release. On freed resources the tail is the next holder's guest.
        Raises: StalePermit; ValueError for a training phase or resources that are not held.
        """
        permit, place = self._held(job, epoch), self._line.place(job)
        foreign = [each for each in resources if each not in permit.resources]
        if permit.kind is not Phase.ROLLOUT or foreign:
            held = f"{permit.kind} on {permit.resources}"
            raise ValueError(f"job {job} holds {held}: a tail can't free {foreign}")
        place.freed = tuple(dict.fromkeys((*place.freed, *resources)))
        if self._pace is not None:
            for key in resources:
                self._pace.free(permit.step_number, key, now)
        self._renewed(permit, now)

    def release(self, job: str, epoch: int, now: float) -> None:
        """The phase is done and its memory offloaded. Raises: StalePermit."""
        place = self._line.place(self._held(job, epoch).job)
        self._end(place, now)
        place.until_s = now + self._between_s

    def leave(self, job: str, now: float) -> None:
        """The job ended, was killed or is moved: its permit is void, and its steps stay empty.

        No other job may use them: only a new certificate gives a new order. A job returns with `request`.
        """
        place = self._line.place(job)
        if job in self._permits:
            self._end(place, now)
        place.wants = None
        place.until_s = None
        if self._pace is not None:
            self._pace.leave(job)

    def advance(self, now: float) -> tuple[Permit, ...]:
        """Ends the leases that ran out, then issues and returns all permits that the order allows."""
        for place in self._line.places.values():
            if place.until_s is not None and place.until_s <= now:
                self.leave(place.name, now)
        granted: list[Permit] = []
        moved = True
        while moved:
            moved = False
            for key in self._line.resources():
                following = self._line.next_on(key)
                if following is not None and self._may_start(following, now):
                    granted.append(self._grant(following, now))
                    moved = True
        return tuple(granted)

    def next_wake_s(self, now: float) -> float | None:
        """Returns when `advance` may have something to do without another call; None: never."""
        times = [place.until_s for place in self._line.places.values() if place.until_s is not None]
        if self._pace is not None:
            times += [
                self._pace.not_before_s(self._line.number_of(place), now)
                for place in self._line.places.values()
                if self._line.is_first(place)
            ]
        return min(times, default=None)

    def check_integrity(self) -> None:
        """Raises: AssertionError if a promise of this module is broken."""
        holders: dict[int, str] = {}
        for permit in self.permits():
            place = self._line.place(permit.job)
            assert permit.epoch <= self._epoch and place.until_s is not None and place.wants is None
            for key in permit.resources:
                if key not in place.freed:
                    assert key not in holders, f"{permit.job} and {holders[key]} both hold {key}"
                    holders[key] = permit.job

    def _held(self, job: str, epoch: int) -> Permit:
        permit = self.permit_of(job)
        if permit is None or permit.epoch != epoch:
            held = "none" if permit is None else f"epoch {permit.epoch}"
            raise StalePermit(f"job {job}: epoch {epoch} is void, the permit held is {held}")
        return permit

    def _renewed(self, permit: Permit, now: float) -> Permit:
        until_s = self._line.place(permit.job).until_s = now + self._lease_s
        renewed = self._permits[permit.job] = replace(permit, expires_s=until_s)
        return renewed

    def _may_start(self, place: LinePlace, now: float) -> bool:
        if not self._line.is_first(place):
            return False
        if self._pace is None:
            return True
        return self._pace.not_before_s(self._line.number_of(place), now) <= now + ROUNDING_S

    def _grant(self, place: LinePlace, now: float) -> Permit:
        self._epoch += 1
        place.wants = None
        place.until_s = now + self._lease_s
        permit = self._permits[place.name] = self._permit(place, self._epoch, now, now)
        if self._pace is not None:
            self._pace.start(permit.step_number, now)
        return permit

    def _permit(self, place: LinePlace, epoch: int, granted_s: float, now: float) -> Permit:
        step = self._line.step_of(place)
        return Permit(
            job=place.name,
            kind=step.kind,
            resources=step.resources,
            epoch=epoch,
            step_number=self._line.number_of(place),
            granted_s=granted_s,
            expires_s=now + self._lease_s,
            guests=self._line.guests_of(place),
        )

    def _end(self, place: LinePlace, now: float) -> None:
        if self._pace is not None:
            self._pace.end(self._line.number_of(place), now)
        self._line.end(place)
        del self._permits[place.name]
