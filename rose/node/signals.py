"""Ending a long-running command on a signal, with its ``with`` blocks unwound.

The first SIGINT, SIGTERM or SIGHUP ends the block of ``StopOnSignals``. Later ones are ignored, so that they
can't cut the clean-up short. Errors pass through. ``signals_wait`` keeps signals from a few steps that belong
together.
"""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import NoReturn

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Stopped(BaseException):
    """A signal asked this command to end. It is no Exception, so that only StopOnSignals catches it."""


class StopOnSignals:
    """Leaves its ``with`` block quietly when a signal asks for it. Main thread only."""

    def __init__(self) -> None:
        self._before = {signum: signal.getsignal(signum) for signum in _SIGNALS}

    def __enter__(self) -> None:
        for signum in _SIGNALS:
            signal.signal(signum, _stop)

    def __exit__(
        self, _kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> bool:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        if isinstance(error, _Stopped):
            logger.info("stopped signal=%s", error)
        return isinstance(error, _Stopped)


def _stop(signum: int, _frame: FrameType | None) -> NoReturn:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise _Stopped(signal.Signals(signum).name)


def take_sigterm_as_sigint() -> None:
    """SIGTERM raises KeyboardInterrupt, as SIGINT does. Main thread only.

    In asyncio.Runner both cancel what runs in its loop; an exception from a handler would break into it.
    Later SIGTERMs are ignored, so that they can't cut the clean-up short.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(_signum: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.raise_signal(signal.SIGINT)


@contextmanager
def signals_wait() -> Iterator[None]:
    """Lets signals that would end this command come after the ``with`` block, which should be short.

    Processes that start meanwhile get these signals as usual. Outside the main thread it does nothing,
    because Python handles signals in the main thread.
    """
    came: list[int] = []
    before: dict[int, Callable[[int, FrameType | None], object] | int] = {}
    if threading.current_thread() is threading.main_thread():
        for number in _SIGNALS:
            handler = signal.getsignal(number)
            if handler is not None and handler != signal.SIG_IGN:
                before[number] = handler
                signal.signal(number, lambda signum, _: came.append(signum))
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        for signum in came:
            signal.raise_signal(signum)
