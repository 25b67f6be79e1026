"""Other processes, named so that a pid's next user is never taken for its last one.

A pidfd that is returned belongs to exactly the process that was meant. No process is signalled.
"""

import os
import select
from pathlib import Path

from rose.errors import PoolError

SHARE_PIDS = (
    "a pool's processes watch each other by pid, so they must share a pid namespace: start their containers "
    "with --pid=host, or in Kubernetes with shareProcessNamespace: true in one pod"
)
_START_TIME_FIELD = 22  # of /proc/PID/stat, counted from 1 as in proc(5)


def open_pidfd(pid: int) -> int:
    """Opens a descriptor that is readable once the process ends. Raises: PoolError if it has ended."""
    try:
        return os.pidfd_open(pid)
    except (OSError, ValueError) as error:
        raise PoolError(
            f"can't watch process {pid} ({error}): it has ended, or is out of sight: {SHARE_PIDS}"
        ) from error


def start_ticks(pid: int) -> int:
    """Returns when a process started, in clock ticks since boot. Raises: PoolError if there is none."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError as error:
        raise PoolError(f"process {pid} is gone ({error.strerror})") from error
    # The second field is the command in parentheses; it may contain parentheses and spaces itself.
    return int(status.rpartition(")")[2].split()[_START_TIME_FIELD - 3])


def watch_process(pid: int) -> tuple[int, int]:
    """Returns a living process's pidfd and start_ticks. Raises: PoolError if it has ended."""
    pidfd = open_pidfd(pid)
    try:
        return pidfd, start_ticks(pid)
    except BaseException:
        os.close(pidfd)
        raise


def is_readable(fd: int, timeout_s: float | None = 0.0) -> bool:
    """Returns whether a descriptor becomes readable within the time; None sets no limit. Unlike select() it
    takes numbers above 1,023."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000 if timeout_s is not None else None))


def find_process(pid: int, started: int) -> int | None:
    """Returns a pidfd of the process that has had ``pid`` since ``started`` (start_ticks); None if it
    ended."""
    try:
        pidfd = open_pidfd(pid)
    except PoolError:
        return None
    # Read after opening: if the pid has a new process by then, that one has another start time.
    try:
        is_same = start_ticks(pid) == started
    except PoolError:
        is_same = False
    if is_same and not is_readable(pidfd):  # a zombie's memory is gone
        return pidfd
    os.close(pidfd)
    return None
