"""The folder in shared memory where the jobs of one runner on this host keep their working sets.

A runner that is killed frees nothing, and one that only ran a profile never comes back. So each runner locks
its folder, and removes those that nobody has locked any more. Folders without a lock's file are not touched:
they are of jobs on Ray or of a pair.
"""

import contextlib
import fcntl
import os
from pathlib import Path

from rose.jobs.ranks import remove

_LOCK = ".lock"
"""No job's name begins with a dot."""


class CacheFolder:
    """A folder that belongs to this process until the process ends or calls `close`. Its name stays the
    same."""

    def __init__(self, path: Path) -> None:
        """Removes what killed runners have left beside it, and under its name. Raises: OSError."""
        self.path = path
        for lock in path.parent.glob(f"*/{_LOCK}"):
            _remove_unlocked(lock)
        self._lock = _locked(path)

    def close(self) -> None:
        """Frees the memory."""
        remove(self.path)
        os.close(self._lock)


def _locked(folder: Path) -> int:
    """Returns the locked file of a folder that is there: another runner may remove it meanwhile."""
    while True:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)
            if os.fstat(lock).st_nlink > 0:
                return lock
            os.close(lock)


def _remove_unlocked(lock: Path) -> None:
    try:
        held = os.open(lock, os.O_RDWR)
    except OSError:  # its runner has just ended
        return
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove(lock.parent)
    except BlockingIOError:
        return
    finally:
        os.close(held)
