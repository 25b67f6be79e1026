"""Processes of other people, named so that a pid's next user is never taken for its last.

Owns the opening of pidfds. Promises that a descriptor it returns stands for the very process that was meant.
Never signals anybody.
"""

import os
import select
from pathlib import Path

from rose.errors import PoolError

_START_TIME_FIELD = 22  # of /proc/PID/stat, counted from 1 as in proc(5)


def open_pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process ends. Raises: PoolError if it has ended."""
    try:
        return os.pidfd_open(pid)
    except (OSError, ValueError) as error:
        raise PoolError(
            f"can't watch process {pid} ({error}): it must be alive and in the daemon's pid namespace"
        ) from error


def start_ticks(pid: int) -> int:
    """When the process started, in clock ticks since boot. Raises: PoolError if there is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError as error:
        raise PoolError(f"process {pid} is gone ({error.strerror})") from error
    # The second field is the command in parentheses, and may hold anything, parentheses and spaces included.
    return int(status.rpartition(")")[2].split()[_START_TIME_FIELD - 3])


def watch_process(pid: int) -> tuple[int, int]:
    """Of a living process: its pidfd and start_ticks. Raises: PoolError if it has ended."""
    pidfd = open_pidfd(pid)
    try:
        return pidfd, start_ticks(pid)
    except BaseException:
        os.close(pidfd)
        raise


def is_readable(fd: int, timeout_s: float = 0.0) -> bool:
    """Whether a descriptor becomes readable within the time. Unlike select() it takes numbers above 1,023."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def find_process(pid: int, started: int) -> int | None:
    """A pidfd of the process that has ``pid`` since ``started`` (start_ticks), None if it has ended."""
    try:
        pidfd = open_pidfd(pid)
    except PoolError:
        return None
    # Read after opening: if the pid had passed on before, the new process has another start time.
    try:
        is_same = start_ticks(pid) == started
    except PoolError:
        is_same = False
    if is_same and not is_readable(pidfd):  # else a zombie, its memory is gone
        return pidfd
    os.close(pidfd)
    return None
