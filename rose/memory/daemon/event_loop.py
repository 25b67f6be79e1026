"""The pool daemon's one thread: what it waits for, and what ends it.

A source that was dropped is never reacted to. The loop never reads a source itself.
"""

import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rose.memory.pool.processes import open_pidfd


class Stopped(Exception):
    """A stop signal came while :meth:`EventLoop.stop_raises` was in force."""


class EventLoop:
    """Readable sources and their reactions."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._is_stopping = False
        self._does_stop_raise = False

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    def watch(self, source: socket.socket | int, react: Callable[[], None]) -> None:
        """Calls ``react`` in each round in which ``source`` is readable."""
        self._selector.register(source, selectors.EVENT_READ, react)

    def drop(self, source: socket.socket | int) -> None:
        """Forgets ``source``. Call this before closing it."""
        self._selector.unregister(source)

    def run(self, is_done: Callable[[], bool] = lambda: False, timeout_s: float | None = None) -> None:
        """Reacts until ``is_done``, a stop, or the timeout."""
        deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        while not self._is_stopping and not is_done():
            left_s = deadline - time.monotonic() if deadline is not None else None
            if left_s is not None and left_s <= 0:
                return
            for key, _ in self._selector.select(left_s):
                # An earlier event of this round may have closed this one, and its number may be in use again.
                if self._selector.get_map().get(key.fd) is key:
                    key.data()

    def stop(self) -> None:
        """Ends :meth:`run` after the current round of events, and every later one."""
        self._is_stopping = True

    def stop_on_signals(self) -> None:
        """Lets SIGTERM and SIGINT stop the loop. Main thread only."""
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)
        signal.set_wakeup_fd(writer.fileno())
        self._signal_ends = (reader, writer)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._take_signal)
        self.watch(reader, self.stop)

    @contextmanager
    def stop_raises(self) -> Iterator[None]:
        """Lets a stop signal raise Stopped at once, for long work that doesn't come back to the loop."""
        self._does_stop_raise = True
        try:
            yield
        finally:
            self._does_stop_raise = False

    def _take_signal(self, _number: int, _frame: FrameType | None) -> None:
        """Leaves the rest to the wake-up socket, unless nobody listens there now."""
        if self._does_stop_raise:
            self._is_stopping = True
            raise Stopped

    def stop_with(self, pid: int) -> None:
        """Lets the end of process ``pid`` stop the loop. Raises: PoolError if it has ended already."""
        self.watch(open_pidfd(pid), self.stop)

    def close(self) -> None:
        self._selector.close()
