"""A job's part of a device that it shares with another: reports its steps, and takes the shares it is given.

Owns the pause between two steps and the report of what ran. A `Device` carries a share out; on CPUs it is a
set of cores. The number of threads stays the program's own: sums of floats depend on it, and a program must
compute the same bits whatever runs beside it.
"""

import contextlib
import os
import queue
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from rose.scheduler.runtime.channel.messages import SchedulerMessage, Shared, StepRun

TELL_S = 0.05
"""The longest time between two reports while steps run."""


class Device(Protocol):
    """Carries out shares in this process: core sets here. On CUDA it would be green contexts, or MPS."""

    def take(self, share: Shared) -> None:
        """Confines this process's work to the share, from its next step on."""


class CoreSets:
    """Shares of the CPU: all threads of this process run on the share's cores alone."""

    def take(self, share: Shared) -> None:
        confine(share.cores)


def confine(cores: Iterable[int]) -> None:
    """Confines all threads of this process to these cores, and with them the threads that they start."""
    wanted = set(cores)
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), wanted)


class SharedDevice:
    """One job's side. The thread that runs the phases calls it."""

    def __init__(
        self,
        orders: "queue.SimpleQueue[SchedulerMessage | None]",
        report: Callable[[list[StepRun], int], None],
        device: Device,
    ) -> None:
        """orders: what the scheduler sends unasked. report: tells it of steps, and of the epoch obeyed."""
        self._orders = orders
        self._report = report
        self._device = device
        self._share = Shared(epoch=0, cores=[], compute=0.0, memory=0.0)
        self._steps: list[StepRun] = []
        self._since_s = self._told_s = 0.0

    @property
    def memory(self) -> float:
        """The share of the device's memory; 1 before the first."""
        return self._share.memory if self._share.epoch else 1.0

    def begin(self) -> None:
        """A phase has its permit: takes its share."""
        self._obey()
        self._since_s = time.monotonic()

    def step(self, tokens: int, num_running: int) -> None:
        """A step is done. Takes a new share, and returns when the job may go on."""
        self._note(tokens, num_running)
        self._obey()
        self._since_s = time.monotonic()

    def end(self) -> None:
        """The phase is over."""
        self._tell()

    def _note(self, tokens: int, num_running: int) -> None:
        now = time.monotonic()
        seconds = now - self._since_s
        self._steps.append(
            StepRun(tokens=tokens, num_running=num_running, seconds=seconds, epoch=self._share.epoch)
        )
        if now - self._told_s >= TELL_S:
            self._tell()

    def _tell(self) -> None:
        self._report(self._steps, self._share.epoch)
        self._steps, self._told_s = [], time.monotonic()

    def _obey(self) -> None:
        """Takes all shares that have come; sleeps while the last one has no cores."""
        while True:
            is_paused = bool(self._share.epoch) and not self._share.cores
            try:
                order = self._orders.get(block=is_paused)
            except queue.Empty:
                return
            if isinstance(order, Shared):
                self._share = order
                if order.cores:
                    self._device.take(order)
                self._tell()
