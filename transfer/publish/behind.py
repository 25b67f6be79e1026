"""Lets a publish go on during the trainer's next step, once it has read the weights.

Owns the thread and the order: one publish at a time. Never retries; the publisher's next publish does.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Behind(Generic[Result]):
    """Runs calls in a thread, one after the other."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._last: Future[Result] | None = None
        self._has_read = threading.Event()

    def has_read(self) -> None:
        """Says that the running call needs the weights no more."""
        self._has_read.set()

    def run(self, call: Callable[[], Result]) -> Future[Result]:
        """Starts a call, and returns once it has read the weights or has ended."""
        # A new one for each call: settle() may return before the last call's callback has run.
        has_read = self._has_read = threading.Event()
        self._last = self._executor.submit(call)
        self._last.add_done_callback(lambda _: has_read.set())
        has_read.wait()
        return self._last

    def settle(self) -> None:
        """Returns when no call runs. A failure of the last one is logged: its own future raises it."""
        if self._last is None:
            return
        wait([self._last])
        if (error := self._last.exception()) is not None:
            logger.warning(
                "a publish behind the trainer's step failed, and this one takes its place: %s", error
            )
        self._last = None

    def close(self) -> None:
        """Waits for the running call, and ends the thread."""
        self._executor.shutdown()
