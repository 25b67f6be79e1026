"""The dispatcher takes and frees places exactly, alternates between jobs, and puts continuations first."""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from math import inf

import aiohttp
import pytest

from rose.errors import NoWorkerError
from rose.scheduler.rollout.placing.policy import PaperPolicy
from rose.scheduler.rollout.placing.views import TurnView
from rose.scheduler.rollout.router_config import RouterConfig, WorkerSpec
from rose.scheduler.rollout.turn.accounts import JobAccounts, QueueFull
from rose.scheduler.rollout.turn.dispatch import DeadlineExceeded, Dispatcher
from rose.scheduler.rollout.turn.place import Place
from rose.scheduler.rollout.turn.trajectories import Trajectories
from rose.scheduler.rollout.workers.registry import Registry
from rose.scheduler.rollout.workers.wire import Wire
from rose.scheduler.rollout.workers.worker import Worker
from tests.scheduler.rollout.scripted_worker import ScriptedWorker
from tests.scheduler.rollout.waiting import until


class Rig:
    """A dispatcher over one worker with room for one turn."""

    def __init__(self, registry: Registry, worker: Worker, config: RouterConfig) -> None:
        self.registry = registry
        self.worker = worker
        jobs = JobAccounts(config)
        trajectories = Trajectories(config, registry.members(), jobs)
        self.dispatcher = Dispatcher(
            registry.members(), PaperPolicy(), jobs, trajectories, max_queued_per_job=3
        )

    def acquire(self, job: str = "a", since: float = inf) -> "asyncio.Task[Place]":
        turn = TurnView(session="t", job=job, expected_tokens=10)
        return asyncio.create_task(self.dispatcher.acquire(turn, inf, since))


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    config = RouterConfig(turns_per_gpu=1, heartbeat_s=3600, lost_after_s=3600)  # there is but one beat
    async with ScriptedWorker() as scripted, aiohttp.ClientSession() as http:
        registry = Registry(config, http, Wire(ssl.create_default_context()), lambda: None)
        worker = registry.add(WorkerSpec(url=scripted.url))
        await until(lambda: worker.is_alive)
        yield Rig(registry, worker, config)
        await registry.close()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_jobs_take_turns_whatever_the_length_of_their_queues(rig: Rig) -> None:
    order: list[str] = []

    async def run(job: str) -> None:
        place = await rig.acquire(job)
        order.append(job)
        await asyncio.sleep(0)
        rig.dispatcher.release(place, 10)

    running = await rig.acquire()
    tasks = [asyncio.create_task(run(job)) for job in ("a", "a", "a", "b")]
    await settle()
    rig.dispatcher.release(running)
    await asyncio.gather(*tasks)
    assert order.index("b") <= 1
    assert (rig.worker.in_flight, rig.dispatcher.num_queued) == (0, 0)


async def test_a_continuation_goes_first_and_is_never_refused(rig: Rig) -> None:
    running = await rig.acquire()
    waiting = [rig.acquire() for _ in range(3)]
    await settle()
    with pytest.raises(QueueFull):
        await rig.acquire()
    continuation = rig.acquire(since=0.0)
    await settle()
    rig.dispatcher.release(running)
    assert (await continuation).worker is rig.worker
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert rig.dispatcher.num_queued == 0


async def test_a_waiter_cancelled_in_the_moment_of_its_grant_gives_the_place_back(rig: Rig) -> None:
    running = await rig.acquire()
    waiting = rig.acquire()
    await settle()
    rig.dispatcher.release(running)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert rig.worker.in_flight == 0


async def test_a_passed_deadline_leaves_nothing_behind(rig: Rig) -> None:
    running = await rig.acquire()
    with pytest.raises(DeadlineExceeded):
        await rig.dispatcher.acquire(TurnView(session="t"), time.monotonic() - 1)
    assert (rig.worker.in_flight, rig.dispatcher.num_queued) == (1, 0)
    rig.dispatcher.release(running)


async def test_no_worker_at_all_is_an_error(rig: Rig) -> None:
    rig.registry.remove(rig.worker.id)
    with pytest.raises(NoWorkerError):
        await rig.acquire()
