"""The records of what rollouts cost serving, from the engine core to its API server.

Owns two rings in a shared file beside the status page. The engine core writes one record for each request
that ends and one for each slice of time with steps. It never waits and computes nothing.
"""

import fcntl
import mmap
import os
import struct
from collections import deque
from pathlib import Path
from typing import Any

from rose._shm import Words
from rose.admission.harm import TENANT_BYTES, RequestDelay, SliceTime
from rose.engine.status import allocate

NUM_REQUESTS = 16384
NUM_SLICES = 18432
"""Half an hour of slices with steps, which an engine with light traffic has in several hours."""
_RECORD = struct.Struct(f"=5d{TENANT_BYTES}s")
_HEADER_BYTES = 64
_BYTES = _HEADER_BYTES + _RECORD.size * (NUM_REQUESTS + NUM_SLICES)


class HarmRecords:
    """The file. One process writes and one reads; a record overwritten while it is read is dropped."""

    def __init__(self, path: Path, *, create: bool) -> None:
        if create:
            path.unlink(missing_ok=True)
        # It stays open for the claim, until its process ends.
        self._fd = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        if create:
            allocate(self._fd, path, _BYTES)
        self._map = mmap.mmap(self._fd, _BYTES)
        self.path = path
        self._counts = Words(self._map)
        self._num_read = [0, 0]
        self._requests: deque[RequestDelay] = deque(maxlen=NUM_REQUESTS)
        self._slices: deque[SliceTime] = deque(maxlen=NUM_SLICES)

    def claim(self) -> bool:
        """Returns whether this reader is the one that acts on the records; until it ends, no other is."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def add_request(self, one: RequestDelay) -> None:
        values = (one.at_s, one.ttft_s, one.ttft_waited_s, one.tpot_s, one.tpot_waited_s)
        self._add(0, 0, NUM_REQUESTS, *values, tenant=one.tenant)

    def add_slice(self, one: SliceTime) -> None:
        self._add(
            1, NUM_REQUESTS, NUM_SLICES, one.number, one.is_closed, one.seconds, one.predicted_s, one.fixed_s
        )

    def requests(self) -> list[RequestDelay]:
        """Returns the last NUM_REQUESTS records, oldest first. Only new ones are read from the file."""
        self._requests.extend(
            RequestDelay(
                at_s=at,
                ttft_s=ttft,
                ttft_waited_s=ttft_waited,
                tpot_s=tpot,
                tpot_waited_s=tpot_waited,
                tenant=tenant.rstrip(b"\0").decode(errors="replace"),
            )
            for at, ttft, ttft_waited, tpot, tpot_waited, tenant in self._read(0, 0, NUM_REQUESTS)
        )
        return list(self._requests)

    @property
    def has_dropped_requests(self) -> bool:
        """Whether requests have ended that the ring no longer holds."""
        return self._counts.load(0) >= NUM_REQUESTS

    @property
    def has_dropped_slices(self) -> bool:
        """Whether there were slices with steps that the ring no longer holds."""
        return self._counts.load(1) >= NUM_SLICES

    def slices(self) -> list[SliceTime]:
        """Returns the last NUM_SLICES records, oldest first. Only new ones are read from the file."""
        self._slices.extend(
            SliceTime(
                number=int(number),
                is_closed=bool(closed),
                seconds=seconds,
                predicted_s=predicted_s,
                fixed_s=fixed_s,
            )
            for number, closed, seconds, predicted_s, fixed_s, _ in self._read(1, NUM_REQUESTS, NUM_SLICES)
        )
        return list(self._slices)

    def close(self) -> None:
        """Removes the file; mappings of it stay valid."""
        self.path.unlink(missing_ok=True)

    def _add(self, ring: int, first: int, size: int, *values: float, tenant: str = "") -> None:
        place = first + self._counts.load(ring) % size
        _RECORD.pack_into(self._map, _HEADER_BYTES + _RECORD.size * place, *values, tenant.encode())
        self._counts.add(ring, 1)

    def _read(self, ring: int, first: int, size: int) -> list[tuple[Any, ...]]:
        """Returns the records that this reader has not had."""
        count = self._counts.load(ring)
        begin = max(self._num_read[ring], count - size)
        records = [
            _RECORD.unpack_from(self._map, _HEADER_BYTES + _RECORD.size * (first + number % size))
            for number in range(begin, count)
        ]
        self._num_read[ring] = count
        lost = self._counts.load(ring) + 1 - size  # its place may have been written meanwhile
        return records[max(0, lost - begin) :]


def records_path(runtime_dir: Path, engine_id: str) -> Path:
    return runtime_dir / f"engine-{engine_id}.harm"
