"""Compares the trainer's kept copy with the live weights, brings it up to date, and packs the difference.

Owns the threads that encode, and the record of what the kept copy already has of a version that is not
committed yet. Buckets come out in the order in which they were asked for, and only a few are encoded ahead of
the caller. take_back() restores the kept copy as it was at the last settle(). Comparing and packing release
the GIL, so each thread may use a core. Never talks to a relay. One caller at a time.
"""

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

from rose.transfer.format.codec import Codec, Encoded, SparsePatch, pack_followed
from rose.transfer.format.layout import Bucket
from rose.transfer.format.state_hash import StateHash
from rose.transfer.publish.codec_choice import pack_for_link
from rose.transfer.publish.kept_copy import KeptCopy

_MOST_ENCODE_THREADS = 4
"""The default's limit: more cores only wait for memory."""


def num_encode_threads(wanted: int | None, num_ranks: int) -> int:
    """Returns a rank's share of the cores, unless another number is wanted. Raises: ValueError."""
    if wanted is not None and wanted < 1:
        raise ValueError(f"encode_threads must be >= 1, got {wanted}")
    share = len(os.sched_getaffinity(0)) // max(num_ranks, 1)
    return wanted if wanted is not None else min(max(share, 1), _MOST_ENCODE_THREADS)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedBucket:
    """One bucket's difference, and the hash of its bits before."""

    bucket: Bucket
    before: StateHash
    encoded: Encoded

    @property
    def after(self) -> StateHash:
        return self.before + self.encoded.change


@dataclass(frozen=True, slots=True)
class _Followed:
    """What a bucket's comparison found, and the hash of its bits before."""

    bucket: Bucket
    before: StateHash
    patch: SparsePatch
    change: StateHash


class BucketEncoder:
    """Encodes buckets. kept: the copy that is compared with, on the processor or on a device.

    codec: one for all buckets; None chooses for each bucket by its density and by the link. num_threads: the
    number of buckets that are encoded at the same time.
    """

    def __init__(
        self,
        kept: KeptCopy,
        codec: Codec | None,
        link_bytes_per_s: float,
        num_threads: int,
    ) -> None:
        self._kept = kept
        self._codec = codec
        self._link_bytes_per_s = link_bytes_per_s
        self._num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="rose-encode")
        self._ahead: list[tuple[Bucket, SparsePatch, StateHash]] = []
        """What the kept copy has of the version in progress, with the hashes before."""

    def encode(
        self, buckets: Sequence[Bucket], has_read: Callable[[], None] | None = None
    ) -> Generator[EncodedBucket, None, None]:
        """Yields the buckets as they are now. The caller closes the generator before it uses the encoder
        again.

        has_read: called as soon as all weights were read, before anything is packed, so the weights are free
        in about half of the time. None: a bucket is packed when it was read, so the first ones come sooner.
        """
        steps: Iterable[Callable[[], EncodedBucket]]
        if has_read is None:
            steps = (partial(self._encode, bucket) for bucket in buckets)
        else:
            steps = [partial(self._pack, followed) for followed in self._follow_all(buckets)]
            has_read()
        pending: deque[Future[EncodedBucket]] = deque()
        try:
            for step in steps:
                pending.append(self._executor.submit(step))
                if len(pending) > self._num_threads:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            wait(pending)

    def settle(self) -> None:
        """Records that what was encoded is committed."""
        self._ahead = []

    def take_back(self) -> None:
        """Undoes what was encoded since the last settle(), because it is not committed."""
        for bucket, patch, before in self._ahead:
            self._kept.revert(bucket, patch, before)
        self._ahead = []

    def close(self) -> None:
        """Ends the threads."""
        self._executor.shutdown()

    def _encode(self, bucket: Bucket) -> EncodedBucket:
        return self._pack(self._follow(bucket))

    def _follow_all(self, buckets: Sequence[Bucket]) -> list[_Followed]:
        futures = [self._executor.submit(self._follow, bucket) for bucket in buckets]
        wait(futures)
        return [future.result() for future in futures]

    def _follow(self, bucket: Bucket) -> _Followed:
        before = self._kept.planes.bucket_hash(bucket)
        patch, change = self._kept.follow(bucket)
        self._ahead.append((bucket, patch, before))
        return _Followed(bucket, before, patch, change)

    def _pack(self, followed: _Followed) -> EncodedBucket:
        bucket, patch = followed.bucket, followed.patch
        kept = self._kept.planes.bits(bucket)
        if self._codec is not None:
            codec, payload = self._codec, pack_followed(self._codec, patch, kept, bucket.dtype)
        else:
            codec, payload = pack_for_link(patch, kept, bucket.dtype, self._link_bytes_per_s)
        encoded = Encoded(codec=codec, payload=payload, patch=patch, change=followed.change)
        return EncodedBucket(bucket=bucket, before=followed.before, encoded=encoded)
