"""Processes that stand still while others compute: stand-ins for other machines, and slices of a GPU's time.

Promises that nothing stays stopped when the context ends.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def stopping(pause_s: float, choose: Callable[[], frozenset[int]]) -> Iterator[None]:
    """Keeps stopped what ``choose`` returns after each pause: processes, and with a minus sign groups."""
    ended = threading.Event()

    def run() -> None:
        stopped: frozenset[int] = frozenset()
        try:
            while not ended.wait(pause_s):
                before, stopped = stopped, choose()
                _signal(stopped - before, signal.SIGSTOP)
                _signal(before - stopped, signal.SIGCONT)
        finally:
            _signal(stopped, signal.SIGCONT)

    thread = threading.Thread(target=run, name="stopping", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _signal(ids: Iterable[int], number: int) -> None:
    for each in ids:
        with suppress(ProcessLookupError):  # it may end by itself
            os.kill(each, number)
