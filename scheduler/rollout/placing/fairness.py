"""Fairness among jobs: deficit round-robin over their queues.

Owns: the queues, the deficits, Jain's index.
Promises: the waiting jobs of the highest priority go first. Among jobs of one priority, each gets service in
proportion to its weight, whatever the length of its queue and the size of its turns. A job that can't be
placed holds up no other. Order within a job is kept, also by items that come again.
Never does: know what an item is, or place it; the caller says what can be placed.
"""

import itertools
import math
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Item = TypeVar("Item")
Place = TypeVar("Place")
Kind = TypeVar("Kind", bound=Hashable)

_QUANTUM = 256.0
"""The tokens that a job of weight 1 earns per round. It is small against a turn, so that jobs alternate."""


def jain(values: Iterable[float]) -> float:
    """Returns Jain's fairness index: 1 if all values are equal, 1/n if one job gets everything."""
    given = list(values)
    squares = sum(value * value for value in given)
    return sum(given) ** 2 / (len(given) * squares) if squares else 1.0


@dataclass(slots=True)
class _Found(Generic[Item, Kind, Place]):
    """An item that can be placed. It is not frozen, because one is made for each waiting turn."""

    in_line: tuple[float, int]
    group: tuple[Kind, Hashable]
    index: int
    item: Item
    cost: float
    place: Place


@dataclass(slots=True)
class _Queue(Generic[Item, Kind]):
    deficit: float = 0.0
    entries: dict[tuple[Kind, Hashable], deque[tuple[float, int, Item, float]]] = field(default_factory=dict)
    """(since, number, item, cost) by kind and likeness. The earliest goes first; of equal ones, the lowest
    number."""

    def __len__(self) -> int:
        return sum(map(len, self.entries.values()))

    @property
    def kinds(self) -> list[Kind]:
        return list(dict.fromkeys(kind for kind, _ in self.entries))

    def first(
        self,
        place: Callable[[Item], Place | None],
        may_go: Callable[[Kind], bool],
        is_last: Callable[[Item], bool],
    ) -> _Found[Item, Kind, Place] | None:
        """Returns the first item that can be placed."""
        first: _Found[Item, Kind, Place] | None = None
        for group, entries in self.entries.items():
            if not may_go(group[0]):
                continue
            for index, (since, number, item, cost) in enumerate(entries):
                if first is not None and first.in_line < (since, number):
                    break
                if (found := place(item)) is not None:
                    first = _Found((since, number), group, index, item, cost, found)
                    break
                if is_last(item):
                    break
        return first

    def drop_if_empty(self, group: tuple[Kind, Hashable]) -> None:
        if not self.entries[group]:
            del self.entries[group]


@dataclass(slots=True)
class _Candidate(Generic[Item, Kind, Place]):
    job: str
    found: _Found[Item, Kind, Place]
    rounds: int
    position: int


def _place_in_line(entry: tuple[float, int, object, float]) -> tuple[float, int]:
    return entry[:2]


def _anything(_: object) -> bool:
    return True


def _nothing(_: object) -> bool:
    return False


def _equal(_job: str) -> int:
    return 1


class FairQueue(Generic[Item, Kind]):
    """Items of several jobs. The first job in `_queues` is the one being visited."""

    def __init__(
        self, weight_of: Callable[[str], float] = _equal, priority_of: Callable[[str], int] = _equal
    ) -> None:
        """`weight_of` returns a job's weight, more than 0, and `priority_of` its priority. They are asked at
        each decision, so that a new one holds for what is waiting."""
        self._weight_of = weight_of
        self._priority_of = priority_of
        self._queues: OrderedDict[str, _Queue[Item, Kind]] = OrderedDict()
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def lengths(self) -> dict[str, int]:
        return {job: len(queue) for job, queue in self._queues.items()}

    def length(self, job: str) -> int:
        queue = self._queues.get(job)
        return len(queue) if queue is not None else 0

    def kinds(self) -> dict[str, list[Kind]]:
        """Returns the kinds of items that each job is waiting with."""
        return {job: queue.kinds for job, queue in self._queues.items()}

    def of_kind(self, kind: Kind) -> list[Item]:
        """Returns all jobs' items of one kind."""
        return [
            item
            for queue in self._queues.values()
            for (other, _), entries in queue.entries.items()
            if other == kind
            for _, _, item, _ in entries
        ]

    def push(
        self,
        job: str,
        item: Item,
        *,
        kind: Kind,
        cost: float,
        since: float = math.inf,
        likeness: Hashable = None,
    ) -> None:
        """Queues an item; `cost` is in tokens. `since`: the time at which it first came, for one that comes
        again: it goes ahead of the job's items that came later. `kind`, `likeness`: see take()."""
        queue = self._queues.setdefault(job, _Queue())
        entries = queue.entries.setdefault((kind, likeness), deque())
        insort(entries, (since, next(self._numbers), item, cost), key=_place_in_line)

    def remove(self, job: str, item: Item) -> None:
        """Takes an item out, if it is still there."""
        if (queue := self._queues.get(job)) is None:
            return
        for group, entries in queue.entries.items():
            for index, entry in enumerate(entries):
                if entry[2] is item:
                    del entries[index]
                    queue.drop_if_empty(group)
                    self._drop_if_empty(job)
                    return

    def settle(self, job: str, difference: float) -> None:
        """Charges a job for tokens beyond the announced cost, if the job is waiting."""
        if (queue := self._queues.get(job)) is not None:
            queue.deficit -= difference

    def take(
        self,
        place: Callable[[Item], Place | None],
        may_go: Callable[[Kind], bool] = _anything,
        may_start: Callable[[str], bool] = _anything,
        is_last: Callable[[Item], bool] = _nothing,
    ) -> tuple[Item, Place] | None:
        """Takes out the next item in fair order that can be placed; None if there is none.

        `place` returns where an item would go, None for nowhere. `may_go` says whether any item of a kind
        could be placed, and `may_start` whether any of a job, so that a long queue of others is skipped.
        `is_last` returns, for an item that goes nowhere, whether the job's later items of its kind and
        likeness can go nowhere either.
        """
        candidates = list(self._candidates(place, may_go, may_start, is_last))
        if not candidates:
            return None
        highest = max(self._priority_of(each.job) for each in candidates)
        candidates = [each for each in candidates if self._priority_of(each.job) == highest]
        won = min(candidates, key=lambda c: (c.rounds, c.position))
        for other in candidates:
            # Visits go round, so that jobs behind the winner have had one visit less.
            visits = won.rounds if other.position <= won.position else won.rounds - 1
            queue = self._queues[other.job]
            queue.deficit += max(0, visits) * self._quantum(other.job)
        queue, found = self._queues[won.job], won.found
        queue.deficit -= found.cost
        del queue.entries[found.group][found.index]
        queue.drop_if_empty(found.group)
        self._visit(won.job)
        self._drop_if_empty(won.job)
        return found.item, found.place

    def _candidates(
        self,
        place: Callable[[Item], Place | None],
        may_go: Callable[[Kind], bool],
        may_start: Callable[[str], bool],
        is_last: Callable[[Item], bool],
    ) -> Iterator[_Candidate[Item, Kind, Place]]:
        """Yields each job's first placeable item and how many more visits the job needs to afford it."""
        for position, (job, queue) in enumerate(self._queues.items()):
            if not may_start(job) or (found := queue.first(place, may_go, is_last)) is None:
                continue
            rounds = max(0, math.ceil((found.cost - queue.deficit) / self._quantum(job)))
            # The first job is being visited now; its next visit comes after those of all others.
            behind = len(self._queues) if position == 0 and rounds > 0 else position
            yield _Candidate(job, found, rounds, behind)

    def _quantum(self, job: str) -> float:
        return _QUANTUM * self._weight_of(job)

    def _visit(self, job: str) -> None:
        """Moves the circle on until this job is first."""
        while next(iter(self._queues)) != job:
            self._queues.move_to_end(next(iter(self._queues)))

    def _drop_if_empty(self, job: str) -> None:
        # A job that isn't waiting accumulates no deficit.
        if not self._queues[job].entries:
            del self._queues[job]
