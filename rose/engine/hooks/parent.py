"""Ends a process of an engine when the process that started it has ended, in whatever way.

Why: in vLLM 0.32 a rank ends once it asks for its next step and learns that its engine core is gone. But a
rank in an all-reduce waits for the other ranks, for ever if one of them has ended, and keeps a core or a GPU
busy. An engine core does not notice that its API server is gone. Both keep the engine's slabs, because the
pool waits for the last of its processes.
"""

import logging
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.process import BaseProcess

from rose.memory.pool.processes import is_readable

logger = logging.getLogger(__name__)

GRACE_S = 5.0
"""The time between SIGTERM and SIGKILL. vLLM gives ranks that are told to end 4 s."""


def end_with_parent() -> None:
    """Has this process end once its parent has: by SIGTERM, and by SIGKILL after ``GRACE_S``.

    It does nothing in a process that multiprocessing did not start, whose starter may rightly end before it.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        watch = threading.Thread(target=_end_after, args=(parent,), name="rose-parent", daemon=True)
        watch.start()


def _end_after(parent: BaseProcess) -> None:
    assert parent.pid is not None
    try:
        pidfd = os.pidfd_open(parent.pid)
    except ProcessLookupError:
        pass  # it ended before this thread began
    else:
        # multiprocessing's own sentinel does not do, because forked siblings hold its pipe open too. But it
        # shows whether the pid already belonged to another process when it was opened.
        if parent.is_alive():
            is_readable(pidfd, None)
        os.close(pidfd)
    logger.error("parent process %d has ended, so process %d ends", parent.pid, os.getpid())
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
