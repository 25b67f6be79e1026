"""Ending a long-running command on a signal, with its ``with`` blocks unwound.

The first SIGINT, SIGTERM or SIGHUP ends the block of ``StopOnSignals``. Later ones are ignored, so that they
can't cut the clean-up short. Errors pass through.
"""

import logging
import signal
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
