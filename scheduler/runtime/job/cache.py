"""A suspended phase's working set in host memory, from which a warm start loads.

Owns one folder of shared memory per job, phase and rank. The ranks of a job never keep more together than the
job was given. A set that was not written to its end does not count: its index loses its name first and gets
it back last. A new attempt starts cold, from its own checkpoint.

The file of a set keeps its pages and its mapping between phases, so that a later phase copies at the memory's
speed. The copies use all cores that the process may use.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypedDict, runtime_checkable

from rose.errors import CacheFull
from rose.scheduler.runtime.channel.messages import EngineRun
from rose.scheduler.runtime.job.copying import copy_arrays
from rose.scheduler.runtime.job.set_file import SetFile

if TYPE_CHECKING:  # numpy takes half as long to load as all else that a job needs of ROSE
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.generic]
    Memory = npt.NDArray[np.uint8]

_INDEX = "index.json"
_SET = "set.bin"
_CLAIM = "claim"
"""An empty file as long as a rank's set, which shows the set's size to the other ranks. It takes no memory,
so it can be written when none is left. It is made before the set."""
_ALIGN_BYTES = 64
"""Where an array may begin in the file: at a cache line."""


class _Entry(TypedDict):
    offset: int
    num_bytes: int
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
    """One rank's state of one phase of one job. Not thread-safe: a phase runs once at a time in a process.

    Keep one object for all iterations: each new one maps the file again.
    """

    def __init__(self, folder: Path, limit_bytes: int, owner: str, rank: int = 0) -> None:
        """``folder`` and ``limit_bytes`` are those of all ranks; ``owner`` names job and phase in errors."""
        self._folder = folder / f"rank-{rank}"
        self._limit_bytes = limit_bytes
        self._owner = owner
        self._file = SetFile(self._folder / _SET)

    @property
    def num_bytes(self) -> int:
        """The size of the whole set; 0 if there is none."""
        return sum(entry["num_bytes"] for entry in self._index().values())

    @property
    def memory(self) -> Memory:
        """The mapped file of all arrays, to be pinned. Raises: FileNotFoundError if no set was ever kept."""
        return self._file.memory()

    def keep(self, arrays: Mapping[str, Array]) -> None:
        """Replaces the set. Raises: CacheFull, with the old set untouched, if there is no room."""
        import numpy as np

        if objects := [name for name, each in arrays.items() if each.dtype.hasobject]:
            raise ValueError(f"{self._owner}: {objects[0]} has Python objects, which can't be kept as bytes")
        with suppress(FileNotFoundError):
            # What lies in the old set would be overwritten while it is read.
            held = self.memory
            arrays = {
                name: each.copy() if np.may_share_memory(each, held) else each
                for name, each in arrays.items()
            }
        with self.replacing({name: (each.dtype.str, each.shape) for name, each in arrays.items()}) as room:
            # A type that numpy has no name for comes back as bytes of its size.
            copy_arrays((room[name].view(each.dtype), each) for name, each in arrays.items())

    @contextmanager
    def replacing(self, wanted: Mapping[str, tuple[str, tuple[int, ...]]]) -> Iterator[dict[str, Array]]:
        """Yields arrays of these types and shapes, to be filled inside the context with the new set.

        The old set is gone from here on, and the new one counts when the context ends without an error.
        Raises: CacheFull, with the old set untouched, if there is no room.
        """
        index, end = _layout(wanted)
        num_bytes, fresh = sum(entry["num_bytes"] for entry in index.values()), self._folder / "index.new"
        before: int | None = None
        # Then it needs no memory beyond that of the old set.
        is_alike = self._index_path.exists() and self._index() == index
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            before = self._claim(num_bytes, len(index))
            if not is_alike:
                fresh.write_text(json.dumps(index))
            self._file.grow(end)
        except OSError as error:
            fresh.unlink(missing_ok=True)
            if before is not None:
                os.truncate(self._folder / _CLAIM, before)
            raise CacheFull(
                f"{self._owner}: {num_bytes} bytes in {len(index)} arrays, and {self._folder} has no room "
                f"({error.strerror}); give the host's shared memory more room, or run fewer jobs there"
            ) from error
        if is_alike:
            self._index_path.rename(fresh)
        self._index_path.unlink(missing_ok=True)
        self._file.truncate(end)
        yield _arrays(self._file.memory(), index)
        fresh.rename(self._index_path)

    def _claim(self, wanted: int, num_arrays: int) -> int:
        """Notes the size of the new set, one rank at a time. Returns that of the old one. Raises: CacheFull,
        OSError."""
        with (self._folder.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            claims = [each for each in self._folder.parent.glob(f"*/{_CLAIM}") if each.parent != self._folder]
            others = sum(each.stat().st_size for each in claims)
            if wanted + others > self._limit_bytes:
                beside = f", {others} of {len(claims)} other ranks" if claims else ""
                raise CacheFull(
                    f"{self._owner}: {wanted} bytes in {num_arrays} arrays{beside}, {self._limit_bytes} "
                    "allowed; ask for more in the job's memory"
                )
            own = self._folder / _CLAIM
            own.touch()
            before = own.stat().st_size
            os.truncate(own, wanted)
            return before

    def arrays(self) -> dict[str, Array]:
        """Returns the set, read-only and not copied; empty if there is none.

        The arrays may be read until the next set is kept.
        """
        index = self._index()
        if not index:
            return {}
        found = _arrays(self._file.memory(), index)
        for array in found.values():
            array.flags.writeable = False
        return found

    def forget(self) -> None:
        """Frees the memory."""
        self._file.unmap()
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
            import numpy as np

            kept = cache.arrays()
            self.arrays = {name: np.empty_like(each) for name, each in kept.items()}
            copy_arrays((self.arrays[name], each) for name, each in kept.items())

    def offload(self, cache: HostCache) -> None:
        cache.keep(self.arrays)
        self.arrays = {}


def _layout(wanted: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[dict[str, _Entry], int]:
    """Returns where each array is in the file, and the length of the file."""
    import numpy as np

    index: dict[str, _Entry] = {}
    end = 0
    for name, (dtype, shape) in wanted.items():
        offset = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        index[name] = {"offset": offset, "num_bytes": num_bytes, "dtype": dtype, "shape": list(shape)}
        end = offset + num_bytes
    return index, end


def _arrays(memory: Memory, index: Mapping[str, _Entry]) -> dict[str, Array]:
    return {
        name: memory[entry["offset"] : entry["offset"] + entry["num_bytes"]]
        .view(entry["dtype"])
        .reshape(entry["shape"])
        for name, entry in index.items()
    }
