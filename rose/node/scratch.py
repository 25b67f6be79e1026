"""A server's own folder for sockets and the like, below the folder for temporary files.

Owns the folders named ``rose-rpc-*``. A folder is locked while its supervisor or its server lives, so that
what is left of both, killed together, is known to be nobody's: the next server's start removes it.
"""

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "rose-rpc-"
NAME_BYTES = len(PREFIX) + 8
"""What ``tempfile`` makes of the prefix."""
_NEW_S = 60.0
"""A folder that was made just now may not be locked yet."""


class ScratchFolder:
    """An empty folder, locked by ``fd``: a process that inherits the descriptor keeps the lock too."""

    def __init__(self) -> None:
        """Makes the folder, and removes those that nobody has any more."""
        remove_stale()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.fd = _open(self.path)
        fcntl.flock(self.fd, fcntl.LOCK_SH)

    def remove(self) -> None:
        """Removes the folder with all that is in it."""
        os.close(self.fd)
        shutil.rmtree(self.path, ignore_errors=True)


def remove_stale() -> None:
    """Removes this user's folders whose servers and supervisors have ended."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # it has gone, it is another user's, or its processes live
            fd = _open(path)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.fstat(fd)
                if found.st_uid == os.getuid() and time.time() - found.st_mtime > _NEW_S:
                    shutil.rmtree(path)
            finally:
                os.close(fd)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
