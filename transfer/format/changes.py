"""Changes files: what one version changes in the version before it, for the engines of a host.

    8 bytes     length of the head
    head        JSON (ChangesHead)
    per bucket  int32 places in rising order, then old bits, then new bits, each vector at a multiple of 8

An engine finds the elements of its parameters by the places, compares them with the old bits, and writes the
new ones. Owns that format. A file appears under its name only when it is complete, and a bucket whose bytes
do not have their checksum is refused. A writer may take over the memory of an earlier file, because getting
new memory would be most of its work. Locks keep it from a file that a process still reads.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from rose.errors import FrameError, RelayError
from rose.transfer.format.codec import Elements
from rose.transfer.format.layout import Bucket, Layout
from rose.transfer.format.manifest import unpack_body
from rose.transfer.format.planes import bits_dtype

_UNKNOWN = "0" * 32
"""Stands for a hash or a checksum until it is known. It has their length."""


class _BucketChanges(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    index: int
    num_changed: int
    begin: int
    """The offset of its first byte behind the head."""
    end: int
    check: str


class ChangesHead(BaseModel):
    """Which versions a changes file leads from and to, by the hashes of what the mirror holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layout: str
    base_hash: str
    state_hash: str
    buckets: list[_BucketChanges]


class ChangesWriter:
    """Writes a changes file, one bucket after the other, so that no more than one lies in memory twice."""

    def __init__(
        self, path: Path, layout: Layout, base_hash: str, counts: Sequence[tuple[Bucket, int]]
    ) -> None:
        """path: where the file lies until finish(); an earlier one there is written over. counts: the buckets
        that come, and how many of their elements change. Raises: OSError.
        """
        self._path = path
        self._entries: list[_BucketChanges] = []
        at = 0
        for bucket, count in counts:
            end = at + _rounded(4 * count) + 2 * _rounded(count * bits_dtype(bucket.dtype).itemsize)
            self._entries.append(
                _BucketChanges(index=bucket.index, num_changed=count, begin=at, end=end, check=_UNKNOWN)
            )
            at = end
        self._num_bytes = at
        self._head = ChangesHead(
            layout=layout.digest, base_hash=base_hash, state_hash=_UNKNOWN, buckets=self._entries
        )
        self._checks: list[str] = []
        self._body_at = len(_packed(self._head))
        self._file = _opened(path)
        self._file.seek(self._body_at)

    def put(self, bucket: Bucket, elements: Elements) -> None:
        """Writes the next bucket's elements. Raises: OSError with the numbers when the memory is full."""
        entry = self._entries[len(self._checks)]
        assert (entry.index, entry.num_changed) == (bucket.index, elements.places.size)
        vectors: list[bytes | memoryview] = [
            *_padded(elements.places),
            *_padded(elements.old),
            *_padded(elements.new),
        ]
        check = xxhash.xxh3_128()
        for vector in vectors:
            check.update(vector)
        with self._told_of_room():
            self._file.writelines(vectors)
        self._checks.append(check.hexdigest())

    def finish(self, state_hash: str, path: Path) -> int:
        """Shows the file under its name; returns its bytes. Raises: OSError."""
        assert len(self._checks) == len(self._entries)
        buckets = [
            entry.model_copy(update={"check": check})
            for entry, check in zip(self._entries, self._checks, strict=True)
        ]
        head = _packed(self._head.model_copy(update={"state_hash": state_hash, "buckets": buckets}))
        assert len(head) == self._body_at
        with self._told_of_room():
            self._file.seek(0)
            self._file.write(head)
            self._file.truncate(self._body_at + self._num_bytes)
            self._file.close()
            os.replace(self._path, path)
        return self._body_at + self._num_bytes

    def discard(self) -> None:
        """Removes what is written. May be called at any time, and after finish() does nothing."""
        with suppress(OSError):  # what is still buffered has no room
            self._file.close()
        self._path.unlink(missing_ok=True)

    @contextmanager
    def _told_of_room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.discard()  # before the free space is measured
            room = shutil.disk_usage(self._path.parent)
            reason = f"{error.strerror}: {self._num_bytes} bytes of changes, {room.free} of {room.total} free"
            raise OSError(error.errno, reason, str(self._path)) from error


def _opened(path: Path) -> BufferedWriter:
    """Opens a file that nobody reads: the one that is there, or else a new one. It stays locked until it is
    closed. Raises: OSError."""
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return file
    except BlockingIOError:  # a reader keeps what it has
        file.close()
        path.unlink()
        return path.open("xb")


def _packed(head: ChangesHead) -> bytes:
    text = head.model_dump_json().encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class ChangesFile:
    """An open changes file."""

    def __init__(self, path: Path) -> None:
        """Raises: FrameError on a file that is none, or is being written over; OSError."""
        self._path = path
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise FrameError(f"{path} is being written over: its changes are no longer kept") from error
            # The map has a copy of the descriptor, and with it the lock, as long as any of its elements is
            # used. A plain array, because each slice of a memmap runs code in Python.
            self._raw: NDArray[np.uint8] = np.asarray(np.memmap(file, np.uint8, "c"))
        size = int.from_bytes(self._raw[:8].tobytes(), "little")
        if size + 8 > self._raw.size:
            raise FrameError(f"{path}: not a changes file: head of {size} bytes in {self._raw.size}")
        try:
            self.head = unpack_body(self._raw[8 : 8 + size].tobytes(), ChangesHead, str(path))
        except RelayError as error:
            raise FrameError(str(error)) from error
        self._data = self._raw[8 + size :]

    @property
    def num_changed(self) -> int:
        return sum(entry.num_changed for entry in self.head.buckets)

    def buckets(self, layout: Layout) -> Iterator[tuple[Bucket, Elements]]:
        """Yields each changed bucket's elements. Raises: FrameError on another layout or a bad bucket."""
        if layout.digest != self.head.layout:
            raise FrameError(f"{self._path}: for layout {self.head.layout}, not {layout.digest}")
        for entry in self.head.buckets:
            body = self._data[entry.begin : entry.end]
            if xxhash.xxh3_128_hexdigest(body.data) != entry.check or entry.index >= len(layout.buckets):
                raise FrameError(f"{self._path}: bucket {entry.index} does not have its checksum")
            bucket = layout.buckets[entry.index]
            yield bucket, self._elements(entry, bucket, body)

    def _elements(self, entry: _BucketChanges, bucket: Bucket, body: NDArray[np.uint8]) -> Elements:
        count, width = entry.num_changed, bits_dtype(bucket.dtype)
        old_at = _rounded(4 * count)
        new_at = old_at + _rounded(count * width.itemsize)
        if body.size != new_at + _rounded(count * width.itemsize):
            raise FrameError(f"{self._path}: bucket {entry.index}: {body.size} bytes for {count} changes")
        places: NDArray[np.int32] = body[: 4 * count].view(np.int32)
        if count and not (places[0] >= 0 and places[-1] < bucket.num_elements):
            raise FrameError(f"{self._path}: bucket {entry.index} changes elements outside it")
        num_bytes = count * width.itemsize
        old, new = (body[at : at + num_bytes].view(width) for at in (old_at, new_at))
        return Elements(places=places, old=old, new=new)


def _padded(vector: NDArray[Any]) -> tuple[memoryview, bytes]:
    """Returns the vector's bytes, where they lie, and what fills them up."""
    return vector.view(np.uint8).data, bytes(_rounded(vector.nbytes) - vector.nbytes)


def _rounded(size: int) -> int:
    return size + -size % 8
