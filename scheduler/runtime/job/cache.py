"""A suspended phase's working set in host memory, from which a warm start loads.

Owns one folder of shared memory per job, phase and rank. The ranks of a job never keep more together than the
job was given. A set that was not written to its end does not count: its index is removed first and written
last. A new attempt starts cold, from its own checkpoint.
"""

from __future__ import annotations

import fcntl
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypedDict, runtime_checkable

from rose.errors import CacheFull
from rose.scheduler.runtime.channel.messages import EngineRun

if TYPE_CHECKING:  # numpy takes half as long to load as all else that a job needs of ROSE
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.generic]

_INDEX = "index.json"
_CLAIM = "bytes"
"""The file with the size of a rank's set, for the other ranks. It is written before the set."""


class _Entry(TypedDict):
    file: str
    dtype: str
    shape: list[int]


class WorkingSet(Protocol):
    """What a phase needs on its devices."""

    def load(self, cache: HostCache) -> None:
        """Brings the state back to the devices. If the cache is empty, this is a cold start."""

    def offload(self, cache: HostCache) -> None:
        """Moves the state into the cache, and frees the devices."""


@runtime_checkable
class BoundedSet(WorkingSet, Protocol):
    """A working set that keeps within a share of the device's memory."""

    def take_memory(self, share: float) -> None:
        """Keeps within this share from now on. 1: all of it, as after each `load`."""


@runtime_checkable
class EngineSet(WorkingSet, Protocol):
    """A working set of engines, which compute a rollout beside the job's process."""

    def engine_runs(self) -> list[EngineRun]:
        """Returns what each rollout node's engines have computed since the last call; nothing at the first
        one. Raises: WorkerError."""


class HostCache:
    """One rank's state of one phase of one job. Not thread-safe: a phase runs once at a time in a process."""

    def __init__(self, folder: Path, limit_bytes: int, owner: str, rank: int = 0) -> None:
        """``folder`` and ``limit_bytes`` are those of all ranks; ``owner`` names job and phase in errors."""
        self._folder = folder / f"rank-{rank}"
        self._limit_bytes = limit_bytes
        self._owner = owner

    @property
    def num_bytes(self) -> int:
        """The size of the whole set; 0 if there is none."""
        return sum(array.nbytes for array in self.arrays().values())

    def keep(self, arrays: Mapping[str, Array]) -> None:
        """Replaces the set. Raises: CacheFull, with the old set untouched, if it is over the limit."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._claim(sum(array.nbytes for array in arrays.values()), len(arrays))
        self._index_path.unlink(missing_ok=True)
        index: dict[str, _Entry] = {}
        for number, (name, array) in enumerate(arrays.items()):
            file = f"{number}.bin"
            _write(self._folder / file, array)
            index[name] = {"file": file, "dtype": array.dtype.str, "shape": list(array.shape)}
        for path in self._folder.iterdir():
            if path.name not in {_CLAIM, *(entry["file"] for entry in index.values())}:
                path.unlink()
        fresh = self._folder / "index.new"
        fresh.write_text(json.dumps(index))
        fresh.rename(self._index_path)

    def _claim(self, wanted: int, num_arrays: int) -> None:
        """Writes down the size of the new set, one rank at a time. Raises: CacheFull."""
        with (self._folder.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            claims = [each for each in self._folder.parent.glob(f"*/{_CLAIM}") if each.parent != self._folder]
            others = sum(int(each.read_text()) for each in claims)
            if wanted + others > self._limit_bytes:
                beside = f", {others} of {len(claims)} other ranks" if claims else ""
                raise CacheFull(
                    f"{self._owner}: {wanted} bytes in {num_arrays} arrays{beside}, {self._limit_bytes} "
                    "allowed; ask for more in the job's memory"
                )
            (self._folder / _CLAIM).write_text(str(wanted))

    def arrays(self) -> dict[str, Array]:
        """Returns the set, read-only and not copied; empty if there is none."""
        index = self._index()
        if not index:
            return {}
        import numpy as np

        found: dict[str, Array] = {}
        for name, entry in index.items():
            shape = tuple(entry["shape"])
            path = self._folder / entry["file"]
            if math.prod(entry["shape"]) == 0:  # nothing to map
                found[name] = np.zeros(shape, entry["dtype"])
            else:
                found[name] = np.memmap(path, dtype=entry["dtype"], mode="r", shape=shape)
        return found

    def forget(self) -> None:
        """Frees the memory."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _index(self) -> dict[str, _Entry]:
        try:
            index: dict[str, _Entry] = json.loads(self._index_path.read_text())
        except FileNotFoundError:
            return {}
        return index

    @property
    def _index_path(self) -> Path:
        return self._folder / _INDEX


class ArraySet:
    """A working set of arrays on the host."""

    def __init__(self) -> None:
        self.arrays: dict[str, Array] = {}

    def load(self, cache: HostCache) -> None:
        if not self.arrays:
            self.arrays = {name: array.copy() for name, array in cache.arrays().items()}

    def offload(self, cache: HostCache) -> None:
        cache.keep(self.arrays)
        self.arrays = {}


def _write(path: Path, array: Array) -> None:
    """Writes in place where the file exists, so that its pages are not allocated and zeroed again."""
    if array.nbytes == 0:
        path.touch()
        return
    import numpy as np

    mode = "r+" if path.exists() and path.stat().st_size == array.nbytes else "w+"
    kept = np.memmap(path, dtype=array.dtype, mode=mode, shape=array.shape)  # type: ignore[call-overload]
    kept[...] = array
