"""A job's side of a device that it shares with another job: reports its steps, and takes the shares it is
given.

Owns the pause between two steps and the report of what ran. A `Device` enforces a share; on CPUs a share is a
set of cores. Never changes the program's number of threads: sums of floats depend on it, and a program must
compute the same bits whatever runs beside it.
"""

import contextlib
import logging
import os
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from rose.errors import RoseError
from rose.scheduler.runtime.channel.messages import SchedulerMessage, Shared, StepRun

logger = logging.getLogger(__name__)

TELL_S = 0.05
"""The longest time between two reports while steps run."""


class Device(Protocol):
    """Enforces shares in this process: on CPUs by core sets, on a GPU by green contexts
    (multiprocessors.py)."""

    def take(self, share: Shared) -> None:
        """Confines this process's work to the share, from the next step on. One without cores is a pause."""

    def finish(self) -> None:
        """Waits until the work of the last step is done, where the program does not."""


class CoreSets:
    """Shares of the CPU: all threads of this process run only on the share's cores."""

    def take(self, share: Shared) -> None:
        if share.cores:
            confine(share.cores)

    def finish(self) -> None:
        """Nothing is left behind a step on CPUs."""


def confine(cores: Iterable[int]) -> None:
    """Confines all threads of this process, and those that they will start, to these cores."""
    wanted = set(cores)
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
            os.sched_setaffinity(int(thread.name), wanted)


class SharedDevice:
    """One job's side. Only the thread that runs the phases may call it."""

    def __init__(
        self,
        orders: "queue.SimpleQueue[SchedulerMessage | None]",
        report: Callable[[list[StepRun], int], None],
        device: Device,
    ) -> None:
        """``orders``: the messages that the scheduler sends unasked. ``report`` sends it steps, and the epoch
        that this job obeys."""
        self._orders = orders
        self._report = report
        self._device = device
        self._share = Shared(epoch=0, cores=[], compute=0.0, memory=0.0)
        self._take_memory: Callable[[float], None] | None = None
        self._bound = 1.0
        self._steps: list[StepRun] = []
        self._since_s = self._told_s = 0.0

    @property
    def memory(self) -> float:
        """The share of the device's memory; 1 before the first share."""
        return self._share.memory if self._share.epoch else 1.0

    @contextlib.contextmanager
    def bounding(self, take_memory: Callable[[float], None]) -> Iterator[None]:
        """Tells ``take_memory`` the share of memory, and each new one inside the context; at its end, all of
        the memory, if it can be told.

        It has all memory at first, and keeps what it was told while the job pauses.
        """
        outer = self._take_memory, self._bound
        self._take_memory, self._bound = take_memory, 1.0
        try:
            self._tell_memory()
            yield
        finally:
            is_bound = self._bound != 1.0
            self._take_memory, self._bound = outer
            if is_bound:
                try:
                    take_memory(1.0)
                except RoseError as error:
                    logger.warning("a share of memory stays until the engine is activated again: %s", error)

    def begin(self) -> None:
        """Takes the share of a phase that has its permit."""
        self._obey()
        self._since_s = time.monotonic()

    def step(self, tokens: int, num_running: int) -> None:
        """Notes a step and takes new shares. Returns when the job may go on."""
        self._device.finish()
        self._note(tokens, num_running)
        self._obey()
        self._since_s = time.monotonic()

    def end(self) -> None:
        """Reports the end of the phase."""
        self._device.finish()
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
        """Takes all shares that have come, and sleeps while the last one has no cores."""
        while True:
            is_paused = bool(self._share.epoch) and not self._share.cores
            try:
                order = self._orders.get(block=is_paused)
            except queue.Empty:
                return
            if isinstance(order, Shared):
                self._share = order
                self._device.take(order)
                if order.cores:
                    self._tell_memory()
                self._tell()

    def _tell_memory(self) -> None:
        if self._take_memory is not None and self.memory != self._bound:
            self._take_memory(self.memory)
            self._bound = self.memory
