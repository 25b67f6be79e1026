"""The workers as policies see them, kept in order so that a decision looks at few of them.

Owns: Fleet and its cohorts: which workers have the same weights, and which of them may take turns, by load.
Promises: an answer is the same as if every view had been looked at. A changed view costs a binary search.
Never does: choose a worker (policy.py, cost.py), read a clock.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rose.scheduler.rollout.placing.columns import WorkerColumns
from rose.scheduler.rollout.placing.views import (
    AdapterVersions,
    Contexts,
    TurnView,
    WorkerKind,
    WorkerView,
    version_for,
)
from rose.types import WeightVersion

Load = tuple[float, str]
"""A worker's load and id: workers in the order in which they are preferred."""
_Shelf = tuple[WorkerKind, str | None]
"""The kind, and for serving GPUs the owner."""


_Likeness = tuple[
    frozenset[str] | None,
    WeightVersion | None,
    frozenset[WeightVersion],
    bool,
    frozenset[tuple[str, int | None]],
]
"""The models, the version of the whole weights, those of the adapters, whether others are awaited, and the
models' contexts."""


@dataclass(slots=True)
class Cohort:
    """The workers that serve the same models with the same contexts, weights and adapters."""

    number: int
    models: frozenset[str] | None
    version: WeightVersion | None
    adapters: AdapterVersions = field(default_factory=dict)
    awaits_weights: bool = False
    contexts: Contexts = field(default_factory=dict)
    num_workers: int = 0
    num_alive: int = 0
    shelves: dict[_Shelf, list[Load]] = field(default_factory=dict)
    """The workers that may take a turn of the shelf's owner, the least loaded first."""

    def version_for(self, model: str | None) -> WeightVersion | None:
        """Returns the version with which these workers answer a model."""
        return version_for(model, self.version, self.adapters)

    @property
    def is_open(self) -> bool:
        """Whether any of these workers may take a turn of some job."""
        return bool(self.shelves)

    def loads(self, kind: WorkerKind, job: str) -> Iterator[list[Load]]:
        """Yields the lists of workers of this kind that may take the job's turns."""
        for owner in (None,) if kind is WorkerKind.DEDICATED else (None, job):
            if loads := self.shelves.get((kind, owner)):
                yield loads

    def add(self, standing: "_Standing") -> None:
        self._count(standing, 1)
        if standing.shelf is not None:
            insort(self.shelves.setdefault(standing.shelf, []), standing.load)

    def remove(self, standing: "_Standing") -> None:
        self._count(standing, -1)
        if standing.shelf is not None:
            loads = self.shelves[standing.shelf]
            del loads[bisect_left(loads, standing.load)]
            if not loads:
                del self.shelves[standing.shelf]

    def _count(self, standing: "_Standing", by: int) -> None:
        self.num_workers += by
        self.num_alive += by * standing.is_alive


class _Standing(NamedTuple):
    """All that decides where a worker stands in its cohort."""

    load: Load
    shelf: _Shelf | None
    is_alive: bool


class Fleet:
    """All workers' views. Lives on one thread."""

    def __init__(self, views: Iterable[WorkerView] = ()) -> None:
        self._views: dict[str, WorkerView] = {}
        self._cohorts: dict[_Likeness, Cohort] = {}
        self._places: dict[str, tuple[Cohort, _Standing]] = {}
        self._num_cohorts_made = 0
        self._columns: WorkerColumns | None = None
        """None until they are asked for, which most policies never do."""
        self.revision = 0
        """Grows when a worker comes, leaves, or has other models or another run."""
        for view in views:
            self.put(view)

    @property
    def cohorts(self) -> list[Cohort]:
        return list(self._cohorts.values())

    @property
    def views(self) -> list[WorkerView]:
        return list(self._views.values())

    @property
    def is_open(self) -> bool:
        """Whether any worker may take a turn of some job."""
        return any(cohort.is_open for cohort in self._cohorts.values())

    @property
    def columns(self) -> WorkerColumns:
        """The workers' figures as they are now."""
        if self._columns is None:
            self._columns = WorkerColumns()
            for view in self._views.values():
                self._put_column(self._columns, view)
        return self._columns

    def _put_column(self, columns: WorkerColumns, view: WorkerView) -> None:
        cohort, standing = self._places[view.id]
        columns.put(view, cohort.number, is_open=standing.shelf is not None)

    def find(self, worker_id: str | None) -> WorkerView | None:
        return self._views.get(worker_id) if worker_id is not None else None

    def is_in(self, worker_id: str, cohorts: Iterable[Cohort]) -> bool:
        """Returns whether the worker is in one of these cohorts. Raises: KeyError."""
        return self._places[worker_id][0] in cohorts

    def put(self, view: WorkerView) -> None:
        """Takes in a new worker, or a worker's new view."""
        before = self._views.get(view.id)
        self._views[view.id] = view
        if before is None:
            self._enter(view)
            self.revision += 1
        elif (
            before.models is view.models
            and before.weight_version == view.weight_version
            and before.adapters == view.adapters
            and before.awaits_weights == view.awaits_weights
            and before.contexts == view.contexts
        ):
            self._move(view)
        else:
            self._leave(self._places[view.id])
            self._enter(view)
            self.revision += before.models != view.models or _run(before) != _run(view)
        if self._columns is not None:
            self._put_column(self._columns, view)

    def _move(self, view: WorkerView) -> None:
        (cohort, before), after = self._places[view.id], _standing(view)
        if after != before:
            cohort.add(after)
            cohort.remove(before)
            self._places[view.id] = (cohort, after)

    def _enter(self, view: WorkerView) -> None:
        cohort, standing = self._cohort(view), _standing(view)
        cohort.add(standing)
        self._places[view.id] = (cohort, standing)

    def _leave(self, place: tuple[Cohort, _Standing]) -> None:
        cohort, standing = place
        cohort.remove(standing)
        if not cohort.num_workers:
            del self._cohorts[_likeness(cohort)]

    def drop(self, worker_id: str) -> None:
        """Forgets a worker. Raises: KeyError."""
        del self._views[worker_id]
        self._leave(self._places.pop(worker_id))
        if self._columns is not None:
            self._columns.drop(worker_id)
        self.revision += 1

    def least_loaded(
        self, turn: TurnView, kind: WorkerKind, cohorts: Iterable[Cohort], now: float
    ) -> Load | None:
        """Returns the least-loaded worker of this kind that may take the turn now."""
        best: Load | None = None
        for cohort in cohorts:
            for loads in cohort.loads(kind, turn.job):
                for load in loads:
                    if best is not None and load > best:
                        break
                    if is_ready(self._views[load[1]], turn, now):
                        best = load
                        break
        return best

    def _cohort(self, view: WorkerView) -> Cohort:
        models = frozenset(view.models) if view.models is not None else None
        weights = (models, view.weight_version, view.adapters, view.awaits_weights, view.contexts)
        made = Cohort(self._num_cohorts_made + 1, *weights)
        if (cohort := self._cohorts.setdefault(_likeness(made), made)) is made:
            self._num_cohorts_made += 1
        return cohort

    def check_integrity(self) -> None:
        again = Fleet(self._views.values())
        for worker_id, (cohort, standing) in self._places.items():
            other, other_standing = again._places[worker_id]
            found, wanted = (
                (_likeness(each), place) for each, place in ((cohort, standing), (other, other_standing))
            )
            assert found == wanted
            assert self._cohorts[found[0]] is cohort
            assert replace(other, number=cohort.number, shelves={}) == replace(cohort, shelves={})
            assert other.shelves == cohort.shelves
        assert len(again._cohorts) == len(self._cohorts)


def _likeness(cohort: Cohort) -> _Likeness:
    weights = (cohort.models, cohort.version, frozenset(cohort.adapters.values()), cohort.awaits_weights)
    return (*weights, frozenset(cohort.contexts.items()))


def _standing(view: WorkerView) -> _Standing:
    shelf: _Shelf | None = None
    if view.has_room and view.kind is WorkerKind.DEDICATED:
        shelf = (view.kind, None)
    elif view.has_room and view.eligible:
        shelf = (view.kind, view.owner)
    return _Standing((view.load, view.id), shelf, view.alive)


def _run(view: WorkerView) -> str | None:
    return view.weight_version.run_id if view.weight_version is not None else None


def is_usable(view: WorkerView, turn: TurnView, now: float) -> bool:
    """Returns whether a worker with suitable weights may take the turn now."""
    shelf = _standing(view).shelf
    return shelf is not None and shelf[1] in (None, turn.job) and is_ready(view, turn, now)


def is_ready(view: WorkerView, turn: TurnView, now: float) -> bool:
    """Returns whether neither the worker nor the turn has to wait after a failure there."""
    return view.not_before <= now and turn.avoid_until.get(view.id, now) <= now
