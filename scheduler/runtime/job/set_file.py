"""The file in shared memory that holds a working set. It stays mapped while the process lives.

The first set pays for the file's pages. Each later one of the same size finds them in the file and in the
process's page table, and is a plain copy.
"""

from __future__ import annotations

import mmap
import os
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Memory = npt.NDArray[np.uint8]


class SetFile:
    """One rank's file. Another process may remove it at any time; its memory is freed when the next set
    is kept or this process ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._memory: Memory | None = None
        self._identity = (0, 0, 0)

    def grow(self, num_bytes: int) -> None:
        """Makes the file at least this long, with all its pages. Its content stays.

        Raises: OSError if the memory is not there, with the file as it was.
        """
        with self._open(os.O_RDWR | os.O_CREAT) as file:
            if os.fstat(file.fileno()).st_size < num_bytes:
                os.posix_fallocate(file.fileno(), 0, num_bytes)

    def truncate(self, num_bytes: int) -> None:
        """Gives back what is behind these bytes. Arrays of a longer set may no longer be read."""
        with self._open(os.O_RDWR) as file:
            os.ftruncate(file.fileno(), num_bytes)

    def memory(self) -> Memory:
        """Returns the whole file, mapped. The same file is mapped once. Raises: FileNotFoundError."""
        import numpy as np

        with self._open(os.O_RDWR) as file:
            stat = os.fstat(file.fileno())
            identity = (stat.st_dev, stat.st_ino, stat.st_size)
            if self._memory is None or identity != self._identity:
                self._memory = None  # unmapped, unless somebody still has its arrays
                mapped = mmap.mmap(file.fileno(), stat.st_size) if stat.st_size > 0 else bytearray()
                self._memory = np.frombuffer(mapped, np.uint8)
                self._identity = identity
        return self._memory

    def unmap(self) -> None:
        """Lets go of the memory."""
        self._memory = None

    def _open(self, flags: int) -> FileIO:
        return FileIO(os.open(self._path, flags, 0o600), "r+")
