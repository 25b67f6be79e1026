"""Kills and stops processes, for every benchmark of faults.

Promises that what was stopped goes on, also on an error. Never waits for what a signal causes.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager


def kill(pid: int, *, whole_group: bool = True) -> float:
    """Sends SIGKILL to a process, by default to all of the group that it leads; returns when (monotonic)."""
    killed_s = time.monotonic()
    (os.killpg if whole_group else os.kill)(pid, signal.SIGKILL)
    return killed_s


@contextmanager
def stopped(leader_pid: int) -> Iterator[float]:
    """Stops all processes of a group for as long as the block runs; yields when it began (monotonic)."""
    os.killpg(leader_pid, signal.SIGSTOP)
    try:
        yield time.monotonic()
    finally:
        os.killpg(leader_pid, signal.SIGCONT)
