"""Writes the objects of one version to the relay: frames in the background, the manifest last.

Owns the keys, sizes and times of one version's way into the relay. `written` names whatever may have been
written, so that an aborted version can be cleared away. Used once, by one thread.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress

import numpy as np

from rose.errors import RelayFull
from rose.signature import Signer, frame_digest
from rose.transfer.format import manifest as keys
from rose.transfer.format.codec import Bits, Codec, Encoded
from rose.transfer.format.frame import Frame
from rose.transfer.format.layout import DTYPE_BYTES, Bucket, Layout
from rose.transfer.format.manifest import BucketEntry, Manifest, sealed
from rose.transfer.format.state_hash import StateHash
from rose.transfer.relay.protocol import Relay
from rose.types import BytesLike

_FULL_POLL_S = 0.05
_MAX_PENDING_BYTES = 256 << 20
"""The frames that may wait for a slow link."""


class VersionWriter:
    """Writes one version. base: the version that a delta starts from, None for a snapshot.

    written: receives every key before it is put. make_room: called repeatedly while the relay is full, from
    the executor's threads; the put fails after full_wait_s of that.
    """

    def __init__(
        self,
        relay: Relay,
        executor: Executor,
        run_id: str,
        layout: Layout,
        version: int,
        base: int | None,
        *,
        written: list[str],
        make_room: Callable[[], None],
        full_wait_s: float,
        signer: Signer | None,
    ) -> None:
        self._relay = relay
        self._executor = executor
        self._run_id = run_id
        self._layout = layout
        self.version = version
        self.base = base
        self._written = written
        self._make_room = make_room
        self._full_wait_s = full_wait_s
        self._signer = signer
        self.num_changed = 0
        self.coo_bytes = 0
        self.wire_bytes = 0
        self.encode_s = 0.0
        self.put_s = 0.0
        self._entries: list[BucketEntry] = []
        self._queued: deque[tuple[str, bytes]] = deque()
        self._queue_lock = threading.Lock()
        self._pending: deque[tuple[Future[None], int]] = deque()
        self._pending_bytes = 0

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Counts the time spent inside as encoding."""
        started = time.perf_counter()
        yield
        self.encode_s += time.perf_counter() - started

    def put(self, bucket: Bucket, encoded: Encoded, before: StateHash, after: StateHash) -> None:
        """Sends one bucket's difference. Raises: RelayError, also for an earlier bucket."""
        self._put(bucket, encoded.codec, encoded.payload, encoded.num_changed, before, after)

    def put_dense(self, bucket: Bucket, bits: Bits, after: StateHash) -> None:
        """Sends one bucket of a snapshot. Raises: RelayError, also for an earlier bucket."""
        self._put(bucket, Codec.DENSE, bits.view(np.uint8).data, bucket.num_elements, StateHash(), after)

    def _put(
        self,
        bucket: Bucket,
        codec: Codec,
        payload: BytesLike,
        num_changed: int,
        before: StateHash,
        after: StateHash,
    ) -> None:
        frame = Frame.of(
            self._layout,
            bucket,
            self._run_id,
            self.base,
            self.version,
            codec=codec,
            payload=payload,
            num_changed=num_changed,
            before=before,
            after=after,
        )
        key = keys.bucket_key(self._run_id, self.version, self.base, bucket.index)
        data = frame.pack()
        change = str(after - before)
        entry = BucketEntry(index=bucket.index, key=key, num_bytes=len(data), change=change)
        if self._signer is not None:
            entry = entry.model_copy(update={"digest": frame_digest(data)})
        self._entries.append(entry)
        self.num_changed += num_changed
        self.coo_bytes += num_changed * (4 + DTYPE_BYTES[bucket.dtype])
        self._send(key, data)
        self._wait_for_puts(_MAX_PENDING_BYTES)

    def run_beside(self, work: Callable[[], None]) -> None:
        """Runs `work` while buckets are encoded. What it raises, a later put or finish_frames() raises."""
        self._pending.append((self._executor.submit(work), 0))

    def note(self, key: str) -> None:
        """Records a key of this version that another rank, or another path, writes."""
        self._written.append(key)

    def finish_frames(self) -> list[BucketEntry]:
        """Returns when all frames are in the relay and run_beside() is done. Raises: RelayError."""
        self._wait_for_puts(0)
        return self._entries

    def commit(
        self,
        entries: list[BucketEntry],
        num_changed: int,
        after: StateHash,
        before: StateHash | None,
        is_followed: bool,
    ) -> Manifest:
        """Puts the manifest, after all its frames. Raises: RelayError."""
        manifest = Manifest(
            run_id=self._run_id,
            version=self.version,
            base=self.base,
            layout=self._layout.digest,
            state_hash=str(after),
            base_state_hash=str(before) if before is not None else None,
            num_elements=self._layout.num_elements,
            num_changed=num_changed,
            is_followed=is_followed,
            buckets=entries,
        )
        key = keys.manifest_key(self._run_id, self.version, self.base)
        self._send(key, sealed(self._signer, key, manifest))
        self._wait_for_puts(0)
        return manifest

    def abort(self) -> None:
        """Waits until nothing is being written any more. The caller removes what was written."""
        for future, _ in self._pending:
            future.exception()
        self._pending.clear()
        self._pending_bytes = 0

    def _send(self, key: str, data: bytes) -> None:
        self._written.append(key)
        self.wire_bytes += len(data)
        self._queued.append((key, data))
        self._pending.append((self._executor.submit(self._put_queued), len(data)))
        self._pending_bytes += len(data)

    def _put_queued(self) -> None:
        """Puts the object that was queued first, with those behind it that the relay takes together.

        There is a call for each object, so all are put when all calls have ended. Raises: as
        _put_patiently() does.
        """
        with self._queue_lock:
            objects = [self._queued.popleft()] if self._queued else []
            num_bytes = sum(len(data) for _, data in objects)
            while (
                self._queued and (num_bytes := num_bytes + len(self._queued[0][1])) <= self._relay.batch_bytes
            ):
                objects.append(self._queued.popleft())
        self._put_patiently(objects)

    def _put_patiently(self, objects: list[tuple[str, bytes]]) -> None:
        """Puts, waiting while the relay is full. Raises: RelayFull when no room came for one of them in time;
        RelayError."""
        deadline_s = time.monotonic() + self._full_wait_s
        while objects:
            try:
                del objects[: self._relay.put_several(objects)]
                deadline_s = time.monotonic() + self._full_wait_s
                continue
            except RelayFull:
                if time.monotonic() >= deadline_s:
                    raise
            with suppress(RelayFull):  # even HEAD may find no room when its numbers grow by a digit
                self._make_room()
            time.sleep(_FULL_POLL_S)

    def _wait_for_puts(self, max_bytes: int) -> None:
        """Returns when this much is left to send; with 0, when nothing runs any more."""
        started = time.perf_counter()
        while self._pending_bytes > max_bytes or (self._pending and max_bytes == 0):
            future, num_bytes = self._pending.popleft()
            self._pending_bytes -= num_bytes
            future.result()
        self.put_s += time.perf_counter() - started
