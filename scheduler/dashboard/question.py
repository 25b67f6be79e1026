"""One question to another process, for all viewers together.

Owns when it may be asked again. At most one question is on its way, and none while there is no viewer. A
viewer waits for it no longer than the caller says; a later answer is used for the next view.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Question(Generic[T]):
    """One event loop, and a thread while the question is on its way."""

    def __init__(self, ask: Callable[[], T], answer_s: float) -> None:
        """ask: runs in the thread. answer_s: how long after it was asked its answer is waited for."""
        self._ask = ask
        self._answer_s = answer_s
        self._asking: asyncio.Task[T] | None = None
        self._asked_s = 0.0
        self._next_s = 0.0

    async def settled(self) -> asyncio.Task[T] | None:
        """Asks if it is time. Returns the question once it has ended, to one of those who waited for it;
        None if there is nothing new.

        Raises: TimeoutError, with a line to show, while it is on its way for too long.
        """
        if self._asking is None and time.monotonic() >= self._next_s:
            self._asked_s = time.monotonic()
            self._asking = asyncio.create_task(asyncio.to_thread(self._ask))
        asking = self._asking
        if asking is None:
            return None
        left_s = self._asked_s + self._answer_s - time.monotonic()
        await asyncio.wait([asking], timeout=max(0.0, left_s))
        if not asking.done():
            raise TimeoutError(f"no answer in {self._answer_s:g} s")
        if self._asking is not asking:  # another one who waited has taken it
            return None
        self._asking = None
        return asking

    def wait(self, pause_s: float) -> None:
        """Keeps the question from being asked again for this long."""
        self._next_s = time.monotonic() + pause_s
