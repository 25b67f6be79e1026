"""The lock that lets a pool have one daemon: `pool-NAME.lock`.

Owns the file. Promises that the kernel drops the lock with its holder: a dead daemon's pool can be retaken.
"""

import fcntl
import os
from pathlib import Path

from rose.errors import PoolError


class PoolLock:
    """Held from construction to :meth:`release`."""

    def __init__(self, path: Path, pool: str) -> None:
        """Raises: PoolError if somebody else holds it."""
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
        """A daemon that was just stopping may have unlinked the file between our open and our lock."""
        try:
            return os.fstat(self._fd).st_ino == self._path.stat().st_ino
        except FileNotFoundError:
            return False

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)
