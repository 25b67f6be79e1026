"""Folders of servers for sockets and the like, below the folder for temporary files.

Owns the folders named ``rose-rpc-*``. Each is locked (``flock``) while its supervisor or its server lives.
When both are killed together with their watcher, the folder is left without a lock, and the start of any
later server removes it. A folder whose lock is held is never removed by another server's start, and no pid is
trusted. Machines that share the folder for temporary files have to share its locks as well.
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
"""The length of a folder's name: ``tempfile`` adds 8 characters to the prefix."""
NEW_S = 60.0
"""A younger folder is never removed: its supervisor may not have locked it yet."""


class ScratchFolder:
    """An empty folder, which is locked until every process that has ``fd`` has closed it or ended."""

    def __init__(self) -> None:
        """Makes the folder, and removes those that dead servers have left."""
        remove_stale()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.fd = _open(self.path)
        with suppress(OSError):  # where the file system has no locks, remove_stale() gets none either
            fcntl.flock(self.fd, fcntl.LOCK_SH)

    def remove(self) -> None:
        """Removes the folder with all that is in it. The server has ended."""
        os.close(self.fd)
        shutil.rmtree(self.path, ignore_errors=True)


def remove_stale() -> None:
    """Removes this user's folders whose servers and supervisors have ended."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another start has removed it, it is no folder, or its lock is held
            fd = _open(path)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.fstat(fd)
                if found.st_uid == os.getuid() and time.time() - found.st_mtime > NEW_S:
                    shutil.rmtree(path)
            finally:
                os.close(fd)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
