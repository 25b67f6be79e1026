"""The workers behind a router by their ids, with the fleet of their views.

Owns: Members.
Promises: the fleet is up to date whenever it is asked for, and only changed workers are looked at again.
Never does: I/O.
"""

from collections.abc import Iterable, Iterator, Mapping

from rose.scheduler.rollout.placing.fleet import Fleet
from rose.scheduler.rollout.workers.speed import ModelSpeeds
from rose.scheduler.rollout.workers.worker import Worker


class Members(Mapping[str, Worker]):
    """Lives on one thread."""

    def __init__(self, workers: Iterable[Worker] = ()) -> None:
        self._workers: dict[str, Worker] = {}
        self._changed: set[str] = set()
        self._fleet = Fleet()
        self._speeds = ModelSpeeds()
        self.num_contests = 0
        """How often another router lent a GPU that this one would have lent to another job, or a GPU came to
        get other runs' weights than before."""
        for worker in workers:
            self.add(worker)

    def __getitem__(self, worker_id: str) -> Worker:
        return self._workers[worker_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    def add(self, worker: Worker) -> None:
        self._workers[worker.id] = worker
        worker.note_changes(self._changed)
        worker.learn_beside(self._speeds)

    def remove(self, worker_id: str) -> Worker:
        """Returns the removed worker. Raises: KeyError."""
        worker = self._workers.pop(worker_id)
        worker.note_changes(set())
        self._changed.discard(worker_id)
        if self._fleet.find(worker_id) is not None:
            self._fleet.drop(worker_id)
        return worker

    @property
    def fleet(self) -> Fleet:
        """The workers' views as they are now."""
        self.refresh()
        return self._fleet

    def refresh(self) -> None:
        """Takes the views of changed workers into the fleet."""
        if self._changed:
            for worker_id in self._changed:
                self._fleet.put(self._workers[worker_id].view())
            self._changed.clear()
