"""Waiting for a place on a worker, for a bounded time in bounded queues.

Owns: waiting, deadlines, the bounds of the queues.
Promises: a turn holds exactly one place on one worker between acquire and release, even if it is cancelled.
A job that floods its queue is refused and holds up no other job.
Never does: network I/O, choose workers (places.py, placing/policy.py).
"""

import asyncio
import math
import time
from collections.abc import Callable

from rose.errors import NoWorkerError, RoseError
from rose.scheduler.rollout.placing.policy import PlacementPolicy
from rose.scheduler.rollout.placing.views import TurnView, of_model
from rose.scheduler.rollout.turn.accounts import JobAccount, JobAccounts, QueueFull
from rose.scheduler.rollout.turn.journey import Journey
from rose.scheduler.rollout.turn.place import Place
from rose.scheduler.rollout.turn.places import Places, Waiter
from rose.scheduler.rollout.turn.trajectories import Trajectories
from rose.scheduler.rollout.workers.members import Members
from rose.scheduler.rollout.workers.worker import Worker
from rose.types import WeightVersion


class DeadlineExceeded(RoseError):
    """The turn's deadline has passed."""


class Dispatcher:
    """Gives turns their places. Lives on the router's event loop."""

    def __init__(
        self,
        members: Members,
        policy: PlacementPolicy,
        jobs: JobAccounts,
        trajectories: Trajectories,
        max_queued_per_job: int,
        weights_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members = members
        self._jobs = jobs
        self._trajectories = trajectories
        self._max_queued_per_job = max_queued_per_job
        self._clock = clock
        self._places = Places(members, policy, jobs, weights_s)
        self.pins_versions = False
        """Whether an attempt has to end when its worker receives other weights."""

    @property
    def num_queued(self) -> int:
        return self._places.num_queued

    def is_waited_for(self, worker: Worker, job: str) -> bool:
        """Returns whether turns of a job wait that may begin, and could on this worker."""
        return self._places.is_waited_for(worker, job)

    def queued_by_job(self) -> dict[str, int]:
        return self._places.queued_by_job()

    async def place(self, journey: Journey, first_version: WeightVersion | None = None) -> Place:
        """Waits for a place for the journey's next attempt; release() it afterwards.

        `first_version`: the weights that made the turn's first tokens, if there are any.

        Raises:
            QueueFull, DeadlineExceeded, NoWorkerError: as acquire() does.
        """
        turn, asked_at = self._trajectories.turn(journey, first_version), time.monotonic()
        since = journey.began if journey.num_attempts else math.inf
        try:
            place = await self.acquire(turn, journey.route.deadline, since)
        finally:
            journey.queued_s += time.monotonic() - asked_at
        journey.num_attempts += 1
        return place

    def have_takers(self, model: str | None) -> bool:
        """Returns whether a live worker of the model takes over the state of cut turns."""
        able = of_model(model, list(self._members.values()))
        return any(worker.is_alive and worker.continues_state for worker in able)

    def keep_to_takers(self, journey: Journey) -> None:
        """Keeps the journey to engines that take over state, as long as there are any."""
        avoid_until = journey.avoid_until
        if self.have_takers(journey.route.model):
            others = [worker.id for worker in self._members.values() if not worker.continues_state]
            avoid_until.update(dict.fromkeys(others, math.inf))
        else:
            for worker_id in [name for name, until in avoid_until.items() if until == math.inf]:
                del avoid_until[worker_id]

    async def acquire(self, turn: TurnView, deadline: float, since: float = math.inf) -> Place:
        """Waits in the job's queue for a place on a worker.

        `since`: when the turn first came, if it had a place before. Such turns go ahead of all others, in the
        order in which they came, and are never refused.

        Raises:
            QueueFull: the job's queue is at its bound.
            DeadlineExceeded: `deadline` (clock time) passed first.
            NoWorkerError: no worker is registered, or none can ever take the turn.
        """
        if not self._members:
            raise NoWorkerError("no worker is registered")
        now, is_continuation = self._clock(), since < math.inf
        job, cost = self._jobs.get(turn.job, now), 0.0 if is_continuation else turn.expected_tokens
        if (place := self._places.place_now(turn, job, cost, now)) is not None:
            return place  # the common case needs no queue and no timer
        self._check_bound(job, is_continuation)
        placed: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        waiter = Waiter(turn, job, cost, lambda outcome: _resolve(placed, outcome))
        self._places.enqueue(waiter, since=since)
        try:
            self.pump()
            if placed.done():
                return placed.result()
            async with asyncio.timeout(max(0.0, deadline - self._clock())):
                # Shielded: a place given at the moment of a cancellation must be found and given back.
                return await asyncio.shield(placed)
        except TimeoutError as error:
            self._give_back(placed)
            raise DeadlineExceeded(
                f"no worker had room in time; {self.num_queued} turns are waiting"
            ) from error
        except asyncio.CancelledError:
            self._give_back(placed)
            raise
        finally:
            if not _has_place(placed):  # a placed turn has left its queue already, which may be long
                self._places.withdraw(waiter)

    def check_room(self, name: str, num_turns: int) -> None:
        """Refuses a call of several turns at once if some of them would certainly be refused later. Starting
        tens of thousands of turns takes seconds.

        Raises: QueueFull if the job's queue and all workers together have no room for ``num_turns``.
        """
        if num_turns == 1:
            return
        limit, waiting = self._bound(name)
        most = limit - waiting
        if num_turns > most and num_turns > most + sum(worker.cap for worker in self._members.values()):
            raise QueueFull(
                f"the request has {num_turns} turns, and job {name} has {waiting} turns waiting and may have"
                f" {limit}; send several requests, with fewer prompts or a smaller n"
            )

    def _bound(self, job: str) -> tuple[int, int]:
        """Returns how many turns of a job may wait, and how many do."""
        limit = self._jobs.spec(job).max_queued
        return limit if limit is not None else self._max_queued_per_job, self._places.num_waiting(job)

    def _check_bound(self, job: JobAccount, is_continuation: bool) -> None:
        limit, waiting = self._bound(job.name)
        if waiting >= limit and not is_continuation:
            raise QueueFull(f"job {job.name} has {waiting} turns waiting, and may have {limit}; try later")

    def _give_back(self, placed: asyncio.Future[Place]) -> None:
        """Frees the place of a waiter that left at the moment it was placed."""
        if _has_place(placed):
            self.release(placed.result())

    def release(self, place: Place, num_tokens: int = 0) -> None:
        """Frees a place whose turn has left; `num_tokens` were generated there."""
        self._places.release(place, num_tokens, self._clock())
        self.pump()

    def pump(self) -> None:
        """Places every turn that can be placed. Called whenever a worker or a job changed."""
        self._places.pump(self._clock())

    def set_policy(self, policy: PlacementPolicy) -> None:
        """Places turns by another policy from now on."""
        self._places.set_policy(policy)
        self.pump()

    def pause(self, is_paused: bool) -> None:
        """Stops placing turns, or goes on."""
        self._places.is_paused = is_paused
        self.pump()

    @property
    def is_paused(self) -> bool:
        return self._places.is_paused

    def lend(self, *, begins_anew: bool = False) -> None:
        """Takes back the serving GPUs that jobs may no longer have, also while no turn waits for one.

        `begins_anew`: chooses each job's serving GPUs again by their recent usage.
        """
        self._places.lend(self._clock(), begins_anew=begins_anew)
        self.pump()


def _has_place(placed: asyncio.Future[Place]) -> bool:
    return placed.done() and not placed.cancelled() and placed.exception() is None


def _resolve(placed: asyncio.Future[Place], outcome: Place | NoWorkerError) -> None:
    if isinstance(outcome, NoWorkerError):
        placed.set_exception(outcome)
    else:
        placed.set_result(outcome)
