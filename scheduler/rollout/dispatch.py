"""Matches turns with workers: picks at once where there is room, queues the rest.

Owns: the queues (one per job, taken in turn), the workers' in-flight counts.
Promises: a turn holds exactly one place on one worker between acquire and release, cancelled or not; a job
that floods its queue is refused, the others are not held up by it.
Never does: network I/O, placement rules (policy.py).
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from rose.errors import NoWorkerError, RoseError
from rose.scheduler.rollout.policy import Policy, Turn
from rose.scheduler.rollout.registry import Registry, Worker


class QueueFull(RoseError):
    """The job has too many turns waiting; the client should come back later."""


class DeadlineExceeded(RoseError):
    """The turn's time is over."""


@dataclass(slots=True, eq=False)
class _Waiter:
    turn: Turn
    granted: asyncio.Future[Worker] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Dispatcher:
    def __init__(
        self,
        registry: Registry,
        policy: Policy,
        max_queued_per_job: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._policy = policy
        self._max_queued_per_job = max_queued_per_job
        self._clock = clock
        self._queues: OrderedDict[str, deque[_Waiter]] = OrderedDict()

    @property
    def num_queued(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def queued_by_job(self) -> dict[str, int]:
        return {job: len(queue) for job, queue in self._queues.items()}

    async def acquire(
        self, turn: Turn, job: str, deadline: float, *, is_continuation: bool = False
    ) -> Worker:
        """A worker with a place taken on it; waits in the job's queue until there is one.

        A continuation (its first part is generated already) goes to the front and is never refused.

        Raises:
            QueueFull: the job's queue is at its bound.
            DeadlineExceeded: `deadline` (clock time) passed first.
            NoWorkerError: none is registered, or none can ever take it.
        """
        if not self._registry.workers():
            raise NoWorkerError("no worker is registered")
        queue = self._queues.setdefault(job, deque())
        if len(queue) >= self._max_queued_per_job and not is_continuation:
            raise QueueFull(f"job {job} has {len(queue)} turns waiting, at most {self._max_queued_per_job}")
        waiter = _Waiter(turn)
        if is_continuation:
            queue.appendleft(waiter)
        else:
            queue.append(waiter)
        self.pump()
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock())):
                return await waiter.granted
        except TimeoutError as error:
            self._give_back(waiter)
            raise DeadlineExceeded(f"no worker had room in time, {self.num_queued} turns waiting") from error
        except asyncio.CancelledError:
            self._give_back(waiter)
            raise
        finally:
            self._drop(job, waiter)

    def _give_back(self, waiter: _Waiter) -> None:
        """The waiter left; if it had been granted a place in the same moment, free it."""
        if waiter.granted.done() and not waiter.granted.cancelled() and waiter.granted.exception() is None:
            self.release(waiter.granted.result())

    def _drop(self, job: str, waiter: _Waiter) -> None:
        queue = self._queues.get(job)
        if queue is None:
            return
        if waiter in queue:
            queue.remove(waiter)
        if not queue:
            del self._queues[job]

    def release(self, worker: Worker) -> None:
        assert worker.in_flight > 0, f"worker {worker.id} released more often than acquired"
        worker.in_flight -= 1
        self.pump()

    def pump(self) -> None:
        """Place what can be placed, one turn per job in each round. Call when a worker changed."""
        is_placed = True
        while is_placed:
            is_placed = False
            for job in list(self._queues):
                is_placed |= self._place_one(job)

    def _place_one(self, job: str) -> bool:
        views = [worker.view() for worker in self._registry.workers()]
        if not any(view.has_room for view in views):
            return False
        queue = self._queues[job]
        for waiter in queue:
            if waiter.granted.done():
                continue
            try:
                picked = self._policy.pick(waiter.turn, views, self._clock())
            except NoWorkerError as error:
                waiter.granted.set_exception(error)
                continue
            if picked is not None:
                queue.remove(waiter)
                self._queues.move_to_end(job)  # even if only one place came free, the next is another job's
                worker = self._registry.get(picked)
                assert worker is not None
                worker.in_flight += 1
                waiter.granted.set_result(worker)
                return True
        return False
