"""A job's part of a shared device: the cores that it runs on, its pauses, and what it reports."""

import os
import queue
import threading
from collections.abc import Iterator

import pytest

from rose.errors import WorkerError
from rose.scheduler.runtime.channel.messages import SchedulerMessage, Shared, StepRun
from rose.scheduler.runtime.job.share import CoreSets, SharedDevice

CORES = sorted(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def _own_cores() -> Iterator[None]:
    yield
    CoreSets().take(share(0, CORES))


def share(epoch: int, cores: list[int]) -> Shared:
    return Shared(epoch=epoch, cores=cores, compute=len(cores) / len(CORES), memory=0.5)


class Reports:
    """What the job has told, in order."""

    def __init__(self) -> None:
        self.orders: queue.SimpleQueue[SchedulerMessage | None] = queue.SimpleQueue()
        self.seen: list[tuple[list[StepRun], int]] = []
        self.is_paused = threading.Event()
        self.device = SharedDevice(self.orders, self.report, CoreSets())

    def report(self, steps: list[StepRun], epoch: int) -> None:
        self.seen.append((steps, epoch))
        if epoch == 2:
            self.is_paused.set()

    @property
    def epochs(self) -> list[int]:
        return [each.epoch for steps, _ in self.seen for each in steps]


def test_a_step_moves_all_threads_to_the_newest_share_s_cores() -> None:
    job, stops = Reports(), threading.Event()
    beside = threading.Thread(target=stops.wait)
    beside.start()
    job.orders.put(share(1, CORES))
    job.device.begin()
    assert job.device.memory == 0.5
    job.orders.put(share(2, CORES[:1]))
    job.device.step(8, 8)
    assert beside.native_id is not None
    assert os.sched_getaffinity(0) == os.sched_getaffinity(beside.native_id) == {CORES[0]}
    stops.set()
    beside.join()
    assert job.epochs == [1], "the step began under the first share"
    assert job.seen[-1][1] == 2, "and the second one is obeyed now"


def test_without_cores_a_step_returns_when_the_job_may_go_on() -> None:
    job = Reports()
    job.orders.put(share(1, CORES))
    job.device.begin()
    job.orders.put(share(2, []))
    steps = threading.Thread(target=job.device.step, args=(8, 8))
    steps.start()
    assert job.is_paused.wait(30)
    assert steps.is_alive()
    job.orders.put(None)  # a connection that came back says nothing about shares
    job.orders.put(share(3, CORES))
    steps.join(30)
    job.device.step(8, 8)
    job.device.end()
    assert job.epochs == [1, 3]
    assert sum(each.seconds for steps_, _ in job.seen for each in steps_) < 30


def test_a_working_set_is_told_each_new_share_of_memory_but_not_a_pause_s() -> None:
    job, told = Reports(), list[float]()
    job.orders.put(share(1, CORES))
    job.device.begin()
    with job.device.bounding(told.append):
        for epoch, memory in ((2, 0.5), (3, 1.0), (4, 0.25)):
            cores = Shared(epoch=epoch, cores=CORES, compute=1.0, memory=memory)
            job.orders.put(Shared(epoch=epoch, cores=[], compute=0.0, memory=0.0))
            job.orders.put(cores)
            job.device.step(8, 8)
        assert told == [0.5, 1.0, 0.25]
    job.orders.put(share(5, CORES))
    job.device.step(8, 8)
    assert told == [0.5, 1.0, 0.25, 1.0]


def test_a_working_set_that_refuses_its_share_is_told_none_afterwards() -> None:
    job = Reports()
    job.orders.put(Shared(epoch=1, cores=CORES, compute=1.0, memory=0.5))
    job.device.begin()

    def refuse(_memory: float) -> None:
        raise WorkerError("no such engine")

    with pytest.raises(WorkerError), job.device.bounding(refuse):
        raise AssertionError("unreachable")
    job.orders.put(Shared(epoch=2, cores=CORES, compute=1.0, memory=0.25))
    job.device.step(8, 8)
    assert job.device.memory == 0.25


def test_before_the_first_share_nothing_is_waited_for() -> None:
    job = Reports()
    job.device.begin()
    job.device.step(8, 8)
    assert job.device.memory == 1.0
