"""The lock that lets a pool have one daemon: `pool-NAME.lock`.

The kernel drops the lock with its holder, so a dead daemon's pool can be taken again.
"""

import fcntl
import os
from pathlib import Path

from rose.errors import PoolError


class PoolLock:
    """A lock that is held from its making to :meth:`release`."""

    def __init__(self, path: Path, pool: str) -> None:
        """Raises: PoolError if another daemon holds it."""
        self._path = path
        while True:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(self._fd)
                raise PoolError(
                    f"pool already owned: {pool} has a running daemon ({path} is locked)"
                ) from error
            if self._is_current():
                return
            os.close(self._fd)

    def _is_current(self) -> bool:
        """Whether the locked file still has its name: a stopping daemon may have removed it before our
        lock."""
        try:
            return os.fstat(self._fd).st_ino == self._path.stat().st_ino
        except FileNotFoundError:
            return False

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
