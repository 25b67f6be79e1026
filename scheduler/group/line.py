"""Every job's place in a group's cyclic order, and how far each node is in it: who is next on which node.

Owns the places, what each job requests and has freed, and the nodes' queues and guests. When a job waits for
a node, the node passes over steps that are over, were given up, or belong to an absent job. No step comes out
of order. Pure: keeps `until_s` without reading it; knows no epochs and no pace.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from rose.scheduler.group.model import Phase
from rose.scheduler.group.order import CyclicOrder, Step


@dataclass(slots=True, kw_only=True)
class BookState:
    """What the next scheduler needs. It holds no times: every present job gets a whole lease again."""

    epoch: int = 0
    positions: dict[str, int] = field(default_factory=dict)
    present: list[str] = field(default_factory=list)
    freed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    queues: dict[int, tuple[int, list[str]]] = field(default_factory=dict)
    """For each resource, how far it is, and its guests."""


@dataclass(slots=True)
class LinePlace:
    """A job's place. `position` counts the job's own steps from the start, over all hyper-cycles."""

    name: str
    position: int
    wants: Phase | None = None
    """The phase that it waits for; None also while it holds a permit."""
    freed: tuple[int, ...] = ()
    """The resources of its permit that its tail has left."""
    until_s: float | None = None
    """When the job counts as absent; None if it is absent."""


@dataclass(slots=True)
class _Queue:
    """A resource's steps, and how far it is."""

    steps: tuple[int, ...]
    jobs: frozenset[str]
    count: int = 0
    guests: list[str] = field(default_factory=list)


class Line:
    """The places of all jobs in one order."""

    def __init__(self, order: CyclicOrder) -> None:
        self.order = order
        self.places = {name: LinePlace(name, 0) for name in order.steps_of_job}
        self._queues = {
            key: _Queue(steps, frozenset(order.steps[step].job for step in steps))
            for key, steps in order.steps_on.items()
        }
        ranks = {index: rank for steps in order.steps_of_job.values() for rank, index in enumerate(steps)}
        self._rank_of_step = tuple(ranks[index] for index in range(len(order.steps)))

    def state(self, epoch: int) -> BookState:
        """Returns what `restore` needs, with the book's epoch."""
        places = self.places.values()
        return BookState(
            epoch=epoch,
            positions={place.name: place.position for place in places},
            present=[place.name for place in places if place.until_s is not None],
            freed={place.name: place.freed for place in places if place.freed},
            queues={key: (queue.count, list(queue.guests)) for key, queue in self._queues.items()},
        )

    def restore(self, state: BookState, until_s: float) -> None:
        """Restores the `state` of a line of the same order. Present jobs stay so until ``until_s``."""
        for key, (count, guests) in state.queues.items():
            self._queues[key].count, self._queues[key].guests = count, guests
        for name, position in state.positions.items():
            place = self.places[name]
            place.position, place.freed = position, state.freed.get(name, ())
            place.until_s = until_s if name in state.present else None

    def place(self, job: str) -> LinePlace:
        """Raises: ValueError for an unknown job."""
        place = self.places.get(job)
        if place is None:
            raise ValueError(f"job {job} is not in this group's order ({', '.join(self.places)})")
        return place

    def step_of(self, place: LinePlace) -> Step:
        """Returns the job's present or next step."""
        steps = self.order.steps_of_job[place.name]
        return self.order.steps[steps[place.position % len(steps)]]

    def number_of(self, place: LinePlace) -> int:
        """Returns the number of that step, counted over all hyper-cycles and jobs."""
        return self._number_at(place.name, place.position)

    def go_behind(self, place: LinePlace, number: int) -> int:
        """Moves a job at its first rollout to its first one after a step. Returns that rollout's number."""
        steps = self.order.steps_of_job[place.name]
        rollouts = [rank for rank, step in enumerate(steps) if self.order.steps[step].kind is Phase.ROLLOUT]
        positions = (
            cycle * len(steps) + rank
            for cycle in itertools.count(max(0, number) // len(self.order.steps))
            for rank in rollouts
        )
        place.position = next(each for each in positions if self._number_at(place.name, each) > number)
        return self.number_of(place)

    def sequence(self) -> list[str]:
        """Returns the jobs in their order from here on, absent ones last."""

        def begins(name: str) -> tuple[bool, int]:
            place = self.places[name]
            rollout = place.position - (self.step_of(place).kind is Phase.TRAIN)
            return place.until_s is None, self._number_at(name, rollout)

        return sorted(self.places, key=begins)

    def resources(self) -> Sequence[int]:
        """Returns all resources that have a queue."""
        return tuple(self._queues)

    def next_on(self, key: int) -> LinePlace | None:
        """Returns who is next on a resource, past steps that are over or empty; None if nobody asks."""
        queue = self._queues[key]
        if not any(self._waits_for(self.places[name], key) for name in queue.jobs):
            return None  # empty steps stay, in case their job returns before anyone needs the node
        while True:
            place, position = self._following(queue)
            if place.until_s is None:
                place.position = max(place.position, position + 1)
            if place.position == position and key in place.freed:
                queue.guests.append(place.name)
            elif place.position <= position:
                break
            queue.count += 1
        return place if place.position == position else None

    def is_first(self, place: LinePlace) -> bool:
        """Returns whether the job requests its next step and is first in line on all resources of the
        step."""
        step = self.step_of(place)
        if place.wants is not step.kind:
            return False
        queues = [self._queues[key] for key in step.resources]
        return all(self._following(queue) == (place, place.position) for queue in queues)

    def guests_of(self, place: LinePlace) -> tuple[str, ...]:
        """Returns the jobs whose tails still run on resources of its step."""
        keys = self.step_of(place).resources
        guests = [name for key in keys for name in self._queues[key].guests if name != place.name]
        return tuple(dict.fromkeys(guests))

    def end(self, place: LinePlace) -> None:
        """Ends the job's step, and its tail."""
        for queue in self._queues.values():
            if place.name in queue.guests:
                queue.guests.remove(place.name)
        place.position += 1
        place.freed = ()

    def _number_at(self, name: str, position: int) -> int:
        cycle, rank = divmod(position, len(self.order.steps_of_job[name]))
        return cycle * len(self.order.steps) + self.order.steps_of_job[name][rank]

    def _following(self, queue: _Queue) -> tuple[LinePlace, int]:
        """Returns whose step is next on a resource, and at which position of that job."""
        cycle, slot = divmod(queue.count, len(queue.steps))
        index = queue.steps[slot]
        name = self.order.steps[index].job
        return self.places[name], cycle * len(self.order.steps_of_job[name]) + self._rank_of_step[index]

    def _waits_for(self, place: LinePlace, key: int) -> bool:
        return place.wants is not None and key in self.step_of(place).resources
