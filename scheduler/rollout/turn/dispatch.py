"""Placement on the event loop: turns wait for their place, for a bounded time in bounded queues.

Owns: waiting, deadlines, the queues' bounds.
Promises: a turn holds exactly one place on one worker between acquire and release, cancelled or not; a job
that floods its queue is refused, the others are not held up by it.
Never does: network I/O, decide (placement.py, policy.py).
"""

import asyncio
import time
from collections.abc import Callable

from rose.errors import NoWorkerError, RoseError
from rose.scheduler.rollout.placing.views import Policy, Turn
from rose.scheduler.rollout.turn.jobs import Job, JobTable
from rose.scheduler.rollout.turn.placement import Place, Placement, Waiter
from rose.scheduler.rollout.workers.registry import Registry


class QueueFull(RoseError):
    """The job has too many turns waiting; the client should come back later."""


class DeadlineExceeded(RoseError):
    """The turn's time is over."""


class Dispatcher:
    def __init__(
        self,
        registry: Registry,
        policy: Policy,
        jobs: JobTable,
        max_queued_per_job: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._jobs = jobs
        self._max_queued_per_job = max_queued_per_job
        self._clock = clock
        self._placement = Placement(registry.members, policy, jobs)

    @property
    def num_queued(self) -> int:
        return self._placement.num_queued

    def queued_by_job(self) -> dict[str, int]:
        return self._placement.queued_by_job()

    async def acquire(self, turn: Turn, deadline: float, *, is_continuation: bool = False) -> Place:
        """A place on a worker; waits in the job's queue until there is one.

        A continuation (its first part is generated already) goes to the front and is never refused.

        Raises:
            QueueFull: the job's queue is at its bound.
            DeadlineExceeded: `deadline` (clock time) passed first.
            NoWorkerError: none is registered, or none can ever take it.
        """
        if not self._registry.members():
            raise NoWorkerError("no worker is registered")
        now = self._clock()
        job, cost = self._jobs.get(turn.job, now), 0.0 if is_continuation else turn.expected_tokens
        if (place := self._placement.place_now(turn, job, cost, now)) is not None:
            return place  # the common case: no queue, no clock, no wait
        self._check_bound(job, is_continuation)
        granted: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        waiter = Waiter(turn, job, cost, lambda outcome: _resolve(granted, outcome))
        self._placement.enqueue(waiter, is_first=is_continuation)
        try:
            self.pump()
            if granted.done():
                return granted.result()
            async with asyncio.timeout(max(0.0, deadline - self._clock())):
                # Shielded: a place granted in the moment of a cancellation must be found and given back.
                return await asyncio.shield(granted)
        except TimeoutError as error:
            self._give_back(granted)
            raise DeadlineExceeded(f"no worker had room in time, {self.num_queued} turns waiting") from error
        except asyncio.CancelledError:
            self._give_back(granted)
            raise
        finally:
            if not _has_place(granted):  # who has one has left the queue, which may be long
                self._placement.withdraw(waiter)

    def _check_bound(self, job: Job, is_continuation: bool) -> None:
        limit = job.spec.max_queued if job.spec.max_queued is not None else self._max_queued_per_job
        waiting = self._placement.num_waiting(job.name)
        if waiting >= limit and not is_continuation:
            raise QueueFull(f"job {job.name} has {waiting} turns waiting, at most {limit}")

    def _give_back(self, granted: asyncio.Future[Place]) -> None:
        """The waiter left; if it had been granted a place in the same moment, free it."""
        if _has_place(granted):
            self.release(granted.result())

    def release(self, place: Place, num_tokens: int = 0) -> None:
        """The turn left its worker, having generated so many tokens there."""
        self._placement.release(place, num_tokens)
        self.pump()

    def pump(self) -> None:
        """Place what can be placed. Call when a worker or a job changed."""
        self._placement.pump(self._clock())

    def set_policy(self, policy: Policy) -> None:
        """Place by another policy from now on."""
        self._placement.set_policy(policy)
        self.pump()

    def pause(self, is_paused: bool) -> None:
        """Place nothing, or go on."""
        self._placement.is_paused = is_paused
        self.pump()

    @property
    def is_paused(self) -> bool:
        return self._placement.is_paused

    def lend_anew(self) -> None:
        """Select each job's serving GPUs by their usage of late."""
        self._placement.lend_anew(self._clock())
        self.pump()


def _has_place(granted: asyncio.Future[Place]) -> bool:
    return granted.done() and not granted.cancelled() and granted.exception() is None


def _resolve(granted: asyncio.Future[Place], outcome: Place | NoWorkerError) -> None:
    if isinstance(outcome, NoWorkerError):
        granted.set_exception(outcome)
    else:
        granted.set_result(outcome)
