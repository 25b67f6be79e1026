"""Weight planes in a file in memory, which the engines of a host map: the mirror's bits are the checkpoint.

    8 bytes                     length of the header
    header                      JSON as in a safetensors file; its metadata has the layout, and a
                                state of fixed size that is rewritten in place
    planes                      one vector of bits per dtype, the widest elements first

A file of uncut tensors is a safetensors file. Owns that format, and the lock between the process that changes
the bits and those that read them. A reader under the lock sees one whole version, or gets FrameError if the
writer died while it changed the bits. An open file stays readable when its name is gone.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from rose.errors import FrameError, RelayError
from rose.transfer.format.layout import DTYPE_BYTES, Layout, TensorPart, TensorSpec
from rose.transfer.format.manifest import LayoutBody, unpack_body
from rose.transfer.format.planes import WeightPlanes, bits_dtype
from rose.transfer.format.state_hash import StateHash

LAYOUT_KEY = "rose_layout"
_OLD_HELD_KEY = "rose_buckets"
"""Written by older subscribers: the indices of the buckets that the file has."""
_STATE_KEY = "rose_state"
_STATE_BYTES = 256
"""A flag, a version of up to 150 bytes, a hash of 32."""
_WHOLE, _CHANGING = "+", "-"
LOCK_TIMEOUT_S = 600.0
"""An engine reads under the lock as long as it loads the weights."""
READ_TIMEOUT_S = 30.0
"""The engine that waits for the subscriber stands still. Its next delivery finds the weights at rest."""
_LOCK_POLL_S = 0.02


class SharedPlanes(WeightPlanes):
    """Planes in a new file. Their process alone writes them."""

    def __init__(self, path: Path, layout: Layout) -> None:
        """Raises: OSError with the numbers when the memory or disk is full; the file is then removed."""
        super().__init__(layout, planes={})
        self.path = path
        order = _order(layout)
        head = _head(layout, order)
        self._state_at = head.index(_STATE_KEY.encode()) + len(_STATE_KEY) + len('":"')
        path.unlink(missing_ok=True)
        self._file = path.open("wb+")
        try:
            self._file.write(head)
            self._file.truncate(len(head) + layout.num_bytes)
            # A write to a mapped hole of a full disk would end the process; this reports it.
            os.posix_fallocate(self._file.fileno(), 0, len(head) + layout.num_bytes)
            starts = _plane_starts(layout, order, len(head))
            self.planes = _planes(np.memmap(path, np.uint8, "r+"), layout, starts)
        except OSError as error:
            self.remove()  # before the free space is measured
            room = shutil.disk_usage(path.parent)
            reason = (
                f"{error.strerror}: {layout.num_bytes} bytes of weights, {room.free} of {room.total} free"
            )
            raise OSError(error.errno, reason, str(path)) from error

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Keeps readers out while the bits change.

        Raises: FrameError when an engine reads for longer than it may, with nothing changed.
        """
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        while not _try_lock(self._file, fcntl.LOCK_EX):
            if time.monotonic() > deadline_s:
                raise FrameError(f"{self.path}: an engine has been reading it for {LOCK_TIMEOUT_S:.0f} s")
            time.sleep(_LOCK_POLL_S)
        try:
            self._mark(_CHANGING)
            try:
                yield
            except FrameError:
                self._mark(_WHOLE)  # whoever raises it has taken back what it had written
                raise
            self._mark(_WHOLE)
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def settle(self, version: str, state_hash: str) -> None:
        """Notes which version the bits are. Call it while nobody may read them."""
        self._write(self._state_at + 1, f"{version} {state_hash}".ljust(_STATE_BYTES - 1).encode())

    def rename(self, path: Path) -> None:
        """Shows the file under another name."""
        os.replace(self.path, path)
        self.path = path

    def close(self) -> None:
        self._file.close()

    def remove(self) -> None:
        """Closes the file, gives back its memory and removes its name. Others who have it open keep it."""
        self.close()
        self.planes = {}
        self.path.unlink(missing_ok=True)

    def _mark(self, flag: str) -> None:
        self._write(self._state_at, flag.encode())

    def _write(self, at: int, data: bytes) -> None:
        os.pwrite(self._file.fileno(), data, at)


class PlanesFile:
    """An open file of shared planes, for a reader. It stays readable after its name was removed."""

    def __init__(self, path: Path) -> None:
        """Raises: FrameError on a file that holds no planes, OSError."""
        self.path = path
        self._file = path.open("rb")
        try:
            self._data_at, metadata = _read_head(self._file.fileno(), path)
            self.layout = _described(metadata, path)
            starts = _plane_starts(self.layout, _order(self.layout), self._data_at)
            raw: NDArray[np.uint8] = np.memmap(self._file, np.uint8, "r")
            if raw.size != self._data_at + self.layout.num_bytes:
                raise FrameError(f"{path}: has {raw.size} bytes, its layout needs {self.layout.num_bytes}")
            self._planes = WeightPlanes(self.layout, planes=_planes(raw, self.layout, starts))
        except BaseException:
            self._file.close()
            raise

    @contextmanager
    def reading(self) -> Iterator[tuple[str, str]]:
        """Keeps the writer out; gives the version and the state hash of the bits.

        Raises: FrameError where the writer died while it changed them, or changes them for too long.
        """
        deadline_s = time.monotonic() + READ_TIMEOUT_S
        with open(f"/proc/self/fd/{self._file.fileno()}", "rb") as file:  # a lock belongs to one opening
            while not _try_lock(file, fcntl.LOCK_SH):
                if time.monotonic() > deadline_s:
                    raise FrameError(f"{self.path}: the subscriber has kept it for {READ_TIMEOUT_S:.0f} s")
                time.sleep(_LOCK_POLL_S)
            yield self._state()

    def _state(self) -> tuple[str, str]:
        _, metadata = _read_head(self._file.fileno(), self.path)
        flag, words = metadata[_STATE_KEY][:1], metadata[_STATE_KEY][1:].split()
        if flag != _WHOLE or len(words) != 2:
            raise FrameError(
                f"{self.path}: its writer ended while it changed the weights; "
                "the subscriber that comes next delivers them again"
            )
        return words[0], words[1]

    def state_hash(self) -> StateHash:
        """Returns the hash of the bits, computed from them."""
        buckets = self.layout.buckets
        hashes = (StateHash.of(self._planes.bits(bucket), bucket.first_index) for bucket in buckets)
        return sum(hashes, StateHash())

    def tensor(self, spec: TensorSpec) -> NDArray[Any]:
        """Returns a tensor's bits: in place, or put together where it is cut."""
        parts = self.layout.parts_by_tensor[spec.name]
        if len(parts) == 1:
            at = parts[0].offset
            return self._planes.planes[spec.dtype][at : at + spec.num_elements].reshape(spec.shape)
        whole = np.empty(spec.shape, bits_dtype(spec.dtype))
        for part in parts:
            self._planes.read_part_into(part, whole)
        return whole

    def close(self) -> None:
        self._file.close()


def _try_lock(file: IO[bytes], kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_planes_file(path: Path) -> bool:
    """Returns whether a checkpoint is a file of shared planes. Raises: FrameError, OSError."""
    with path.open("rb") as file:
        return LAYOUT_KEY in _read_head(file.fileno(), path)[1]


def _order(layout: Layout) -> list[str]:
    """The widest elements first, so that each plane starts at a multiple of its element's width."""
    return sorted(layout.plane_elements, key=lambda dtype: (-DTYPE_BYTES[dtype], dtype))


def _plane_starts(layout: Layout, order: list[str], at: int) -> dict[str, int]:
    starts = {}
    for dtype in order:
        starts[dtype] = at
        at += layout.plane_elements[dtype] * DTYPE_BYTES[dtype]
    return starts


def _planes(raw: NDArray[np.uint8], layout: Layout, starts: dict[str, int]) -> dict[str, Any]:
    return {
        dtype: raw[at : at + layout.plane_elements[dtype] * DTYPE_BYTES[dtype]].view(bits_dtype(dtype))
        for dtype, at in starts.items()
    }


def _head(layout: Layout, order: list[str]) -> bytes:
    metadata = {
        "format": "pt",
        _STATE_KEY: _CHANGING.ljust(_STATE_BYTES),
        LAYOUT_KEY: LayoutBody.of(layout).model_dump_json(),
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    starts = _plane_starts(layout, order, 0)
    if layout.cuts:
        entries = [
            (f"plane.{dtype}", dtype, [layout.plane_elements[dtype]], starts[dtype]) for dtype in order
        ]
    else:
        entries = [
            (part.tensor.name, part.tensor.dtype, list(part.tensor.shape), _start_of(part, starts))
            for part in layout.parts
        ]
    for name, dtype, shape, at in entries:
        size = int(np.prod(shape, dtype=np.int64)) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
    body = json.dumps(header, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    return len(body).to_bytes(8, "little") + body


def _start_of(part: TensorPart, starts: dict[str, int]) -> int:
    return starts[part.tensor.dtype] + part.offset * DTYPE_BYTES[part.tensor.dtype]


def _read_head(file: int, path: Path) -> tuple[int, dict[str, str]]:
    """Returns where the planes begin, and the metadata."""
    size = int.from_bytes(os.pread(file, 8, 0), "little")
    if size > os.fstat(file).st_size:
        raise FrameError(f"{path}: not a safetensors file: a header of {size} bytes")
    try:
        header = json.loads(os.pread(file, size, 8))
        return 8 + size, header.get("__metadata__", {})
    except (ValueError, AttributeError) as error:
        raise FrameError(f"{path}: not a safetensors file: {error!r}") from error


def _described(metadata: dict[str, str], path: Path) -> Layout:
    try:
        layout = unpack_body(metadata[LAYOUT_KEY].encode(), LayoutBody, str(path)).to_layout()
    except (RelayError, KeyError, ValueError) as error:
        raise FrameError(f"{path}: its metadata holds no layout: {error}") from error
    held = metadata.get(_OLD_HELD_KEY)
    if held is not None and len(held.split(",")) < len(layout.buckets):
        raise FrameError(
            f"{path}: an older subscriber with --plan keeps only some of its {len(layout.buckets)} buckets; "
            "start this version's subscriber in its place, without --plan"
        )
    return layout
