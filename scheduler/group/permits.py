"""Permits: who may use which nodes of a group now, granted in the group's cyclic order, as leases.

Owns: every job's place in the order, its permit or its waiting request, and their leases. Promises: no node
has two holders, save a tail that its own job moved aside; grants follow the order, whatever order requests
come in; a job that dies holds nobody up for longer than a lease; every grant has a larger epoch than all
before. Never: reads a clock, does I/O, or knows how long a phase takes (`Pace` does).

    book = PermitBook(certificate.order, lease_s=2.0)
    book.request("a", PhaseKind.ROLLOUT, now)      # repeat it to renew it
    permit = book.permit_of("a")                   # nodes, epoch
    book.heartbeat("a", permit.epoch, now)         # several times per lease, also during the warm-start copy
    book.release("a", permit.epoch, now)           # offloaded: the next one in order gets the nodes
    granted = book.advance(now)                    # after every call above, and at book.next_wake_s(now)

`advance` is the only method that grants and expires. A holder that comes back late finds its epoch void:
`heartbeat` and `release` raise `StalePermit`, and a node that remembers the largest epoch it served must
refuse to load anything for a smaller one. Between two phases (weights' transfer, its own code) a job has
`between_s` to ask for the next; after that its turn is passed over, and it gets its next one when it asks
again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rose.errors import RoseError
from rose.scheduler.group.order import CyclicOrder, PhaseKind
from rose.scheduler.group.pace import ROUNDING_S, Pace


class StalePermit(RoseError):
    """The message's epoch is not that of the job's permit: it expired, was released, or was granted anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    """One phase may run on these resources until its lease ends.

    `guests` are jobs whose tails still run on some GPUs of these nodes: what a guest keeps is not free yet.
    `turn` counts the steps of the order from the start: it grows along every resource.
    """

    job: str
    kind: PhaseKind
    resources: tuple[int, ...]
    epoch: int
    turn: int
    granted_s: float
    expires_s: float
    guests: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class BookState:
    """What the next scheduler needs, without times: whoever was present gets a whole lease again."""

    epoch: int = 0
    positions: dict[str, int] = field(default_factory=dict)
    present: list[str] = field(default_factory=list)
    freed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    queues: dict[int, tuple[int, list[str]]] = field(default_factory=dict)
    """By resource, how far it is, and its guests."""


@dataclass(slots=True)
class _Place:
    """Where a job is. `position` counts its own steps from the start, over all hyper-cycles."""

    name: str
    position: int
    wants: PhaseKind | None = None
    permit: Permit | None = None
    freed: tuple[int, ...] = ()
    until_s: float | None = None
    """When it counts as gone; None: it does already."""


@dataclass(slots=True)
class _Queue:
    """A resource's steps, and how far it is."""

    steps: tuple[int, ...]
    jobs: frozenset[str]
    count: int = 0
    guests: list[str] = field(default_factory=list)


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
        self._places = {name: _Place(name, 0) for name in order.steps_of_job}
        self._queues = {
            key: _Queue(steps, frozenset(order.steps[step].job for step in steps))
            for key, steps in order.steps_on.items()
        }
        ranks = {index: rank for steps in order.steps_of_job.values() for rank, index in enumerate(steps)}
        self._rank_of_step = tuple(ranks[index] for index in range(len(order.steps)))

    def sequence(self) -> list[str]:
        """The jobs by the iteration that they are in: the order from here on, those that are gone last."""

        def begins(name: str) -> tuple[bool, int]:
            place = self._places[name]
            rollout = place.position - (self._kind_at(place) is PhaseKind.TRAIN)
            return place.until_s is None, self._turn_at(name, rollout)

        return sorted(self._places, key=begins)

    def take_over(self, old: "PermitBook", now: float) -> None:
        """The members of an earlier order, where they are: permits stay out. On a new book only.

        This order must have those of them that are not gone as `old.sequence` says, and in this pace all of
        them are gone.
        """
        self._epoch = old._epoch
        for name in old.sequence():
            was, place = old._places[name], self._places.get(name)
            if place is None or was.until_s is None:
                continue
            place.wants, place.until_s, place.freed = was.wants, was.until_s, was.freed
            if self._kind_at(place) is not old._kind_at(was):
                place.position += 1
            turn, permit = self._turn_of(place), was.permit
            if permit is not None:
                place.permit = replace(permit, turn=turn)
            if self._pace is not None and old._pace is not None:
                self._pace.take_over(old._pace, name, turn, permit.granted_s if permit is not None else None)
                for key in place.freed:
                    self._pace.free(turn, key, now)

    def state(self) -> BookState:
        """For `restore`; the permits are their owner's to keep."""
        return BookState(
            epoch=self._epoch,
            positions={name: place.position for name, place in self._places.items()},
            present=[name for name in self._places if self.is_present(name)],
            freed={name: place.freed for name, place in self._places.items() if place.freed},
            queues={key: (queue.count, list(queue.guests)) for key, queue in self._queues.items()},
        )

    def restore(self, state: BookState, held: Mapping[str, tuple[int, float]], now: float) -> None:
        """From the `state` of a book of the same order. `held`: each permit's epoch, and when it was granted.

        Jobs that waited ask again.
        """
        self._epoch = state.epoch
        for key, (count, guests) in state.queues.items():
            self._queues[key].count, self._queues[key].guests = count, guests
        for name, position in state.positions.items():
            place = self._places[name]
            place.position, place.freed = position, state.freed.get(name, ())
            place.until_s = now + self._between_s if name in state.present else None
            if name in held:
                epoch, granted_s = held[name]
                place.permit = self._permit(place, epoch, granted_s, now)

    def permit_of(self, job: str) -> Permit | None:
        """The permit that a job holds."""
        return self._place(job).permit

    def permits(self) -> tuple[Permit, ...]:
        """All that are held, by epoch."""
        held = (place.permit for place in self._places.values())
        return tuple(sorted((permit for permit in held if permit is not None), key=lambda each: each.epoch))

    def freed_by(self, job: str) -> tuple[int, ...]:
        """What the job's permit names and its tail has left."""
        return self._place(job).freed

    def is_present(self, job: str) -> bool:
        """Whether the order waits for this job's turn."""
        return self._place(job).until_s is not None

    def request(self, job: str, kind: PhaseKind, now: float) -> None:
        """The job is ready for its next phase of this kind; repeating it renews the request's lease, and is
        needed of a job that joins.

        A turn of the other kind that comes first is given up: a job that restarts asks for a rollout wherever
        it was. Raises: ValueError for an unknown job, or one that holds a permit.
        """
        place = self._place(job)
        if place.permit is not None:
            raise ValueError(
                f"job {job} holds a {place.permit.kind} permit (epoch {place.permit.epoch}): release it first"
            )
        if place.wants is not kind:
            if self._kind_at(place) is not kind:
                place.position += 1
            passes = self._pace.ready(self._turn_of(place), now) if self._pace is not None else 0
            if passes is None:
                return
            place.wants = kind
            place.position += passes * len(self.order.steps_of_job[job])
        place.until_s = now + self._lease_s

    def heartbeat(self, job: str, epoch: int, now: float) -> Permit:
        """Renews the permit's lease. Raises: StalePermit."""
        place = self._holder(job, epoch)
        assert place.permit is not None
        place.until_s = now + self._lease_s
        place.permit = replace(place.permit, expires_s=place.until_s)
        return place.permit

    def begin_tail(self, job: str, epoch: int, resources: Sequence[int], now: float) -> None:
        """The rollout's last requests were moved aside: these resources may go to the next in order.

        The permit stays until its release. On freed resources the tail is the next holder's guest.
        Raises: StalePermit; ValueError for a training phase or resources that are not held.
        """
        place = self._holder(job, epoch)
        assert place.permit is not None
        foreign = [each for each in resources if each not in place.permit.resources]
        if place.permit.kind is not PhaseKind.ROLLOUT or foreign:
            held = f"{place.permit.kind} on {place.permit.resources}"
            raise ValueError(f"job {job} holds {held}: a tail can't free {foreign}")
        place.freed = tuple(dict.fromkeys((*place.freed, *resources)))
        if self._pace is not None:
            for key in resources:
                self._pace.free(place.permit.turn, key, now)
        place.until_s = now + self._lease_s
        place.permit = replace(place.permit, expires_s=place.until_s)

    def release(self, job: str, epoch: int, now: float) -> None:
        """The phase is done and its memory offloaded. Raises: StalePermit."""
        place = self._holder(job, epoch)
        self._end(place, now)
        place.until_s = now + self._between_s

    def leave(self, job: str, now: float) -> None:
        """The job ended, was killed or is moved: its permit is void, its turns stay empty.

        Nobody else may take them: only a new certificate gives a new order. Jobs are let in again by
        `request`.
        """
        place = self._place(job)
        if place.permit is not None:
            self._end(place, now)
        place.wants = None
        place.until_s = None
        if self._pace is not None:
            self._pace.leave(job)

    def advance(self, now: float) -> tuple[Permit, ...]:
        """Ends the leases that ran out, then grants all that the order allows; the new permits."""
        for place in self._places.values():
            if place.until_s is not None and place.until_s <= now:
                self.leave(place.name, now)
        granted: list[Permit] = []
        moved = True
        while moved:
            moved = False
            for key, queue in self._queues.items():
                following = self._move(key, queue)
                if following is not None and self._may_start(following, now):
                    granted.append(self._grant(following, now))
                    moved = True
        return tuple(granted)

    def next_wake_s(self, now: float) -> float | None:
        """When `advance` may have something to do without another message; None: never."""
        times = [place.until_s for place in self._places.values() if place.until_s is not None]
        if self._pace is not None:
            times += [
                self._pace.not_before_s(self._turn_of(place), now)
                for place in self._places.values()
                if self._is_first(place)
            ]
        return min(times, default=None)

    def check_integrity(self) -> None:
        """Raises AssertionError where a promise of this module is broken."""
        holders: dict[int, str] = {}
        for permit in self.permits():
            place = self._place(permit.job)
            assert permit.epoch <= self._epoch and place.until_s is not None and place.wants is None
            for key in permit.resources:
                if key not in place.freed:
                    assert key not in holders, f"{permit.job} and {holders[key]} both hold {key}"
                    holders[key] = permit.job

    def _place(self, job: str) -> _Place:
        place = self._places.get(job)
        if place is None:
            raise ValueError(f"job {job} is not in this group's order ({', '.join(self._places)})")
        return place

    def _holder(self, job: str, epoch: int) -> _Place:
        place = self._place(job)
        if place.permit is None or place.permit.epoch != epoch:
            held = "none" if place.permit is None else f"epoch {place.permit.epoch}"
            raise StalePermit(f"job {job}: epoch {epoch} is void, the permit held is {held}")
        return place

    def _kind_at(self, place: _Place) -> PhaseKind:
        return self.order.steps[self._step_at(place)].kind

    def _step_at(self, place: _Place) -> int:
        steps = self.order.steps_of_job[place.name]
        return steps[place.position % len(steps)]

    def _turn_of(self, place: _Place) -> int:
        return self._turn_at(place.name, place.position)

    def _turn_at(self, name: str, position: int) -> int:
        cycle, rank = divmod(position, len(self.order.steps_of_job[name]))
        return cycle * len(self.order.steps) + self.order.steps_of_job[name][rank]

    def _next_on(self, queue: _Queue) -> tuple[_Place, int]:
        """Whose turn it is on a resource, and at which position of that job."""
        cycle, slot = divmod(queue.count, len(queue.steps))
        index = queue.steps[slot]
        name = self.order.steps[index].job
        return self._places[name], cycle * len(self.order.steps_of_job[name]) + self._rank_of_step[index]

    def _move(self, key: int, queue: _Queue) -> _Place | None:
        """Moves a resource past turns that are over or empty; who is next there, if it has no permit yet."""
        if not any(self._waits_for(self._places[name], key) for name in queue.jobs):
            return None  # empty turns stay where they are, in case their job returns before anyone needs them
        while True:
            place, position = self._next_on(queue)
            if place.until_s is None:
                place.position = max(place.position, position + 1)
            if place.position == position and key in place.freed:
                queue.guests.append(place.name)
            elif place.position <= position:
                break
            queue.count += 1
        return place if place.position == position and place.permit is None else None

    def _waits_for(self, place: _Place, key: int) -> bool:
        return place.wants is not None and key in self.order.steps[self._step_at(place)].resources

    def _is_first(self, place: _Place) -> bool:
        """Whether it asks for its next step and is the next in order on all that the step holds."""
        if place.wants is None or place.permit is not None or place.wants is not self._kind_at(place):
            return False
        queues = [self._queues[key] for key in self.order.steps[self._step_at(place)].resources]
        return all(self._next_on(queue) == (place, place.position) for queue in queues)

    def _may_start(self, place: _Place, now: float) -> bool:
        if not self._is_first(place):
            return False
        if self._pace is None:
            return True
        return self._pace.not_before_s(self._turn_of(place), now) <= now + ROUNDING_S

    def _grant(self, place: _Place, now: float) -> Permit:
        self._epoch += 1
        place.wants = None
        place.until_s = now + self._lease_s
        place.permit = self._permit(place, self._epoch, now, now)
        if self._pace is not None:
            self._pace.start(place.permit.turn, now)
        return place.permit

    def _permit(self, place: _Place, epoch: int, granted_s: float, now: float) -> Permit:
        step = self.order.steps[self._step_at(place)]
        guests = [name for key in step.resources for name in self._queues[key].guests if name != place.name]
        return Permit(
            job=place.name,
            kind=step.kind,
            resources=step.resources,
            epoch=epoch,
            turn=self._turn_of(place),
            granted_s=granted_s,
            expires_s=now + self._lease_s,
            guests=tuple(dict.fromkeys(guests)),
        )

    def _end(self, place: _Place, now: float) -> None:
        if self._pace is not None:
            self._pace.end(self._turn_of(place), now)
        for queue in self._queues.values():
            if place.name in queue.guests:
                queue.guests.remove(place.name)
        place.position += 1
        place.permit = None
        place.freed = ()
