"""The mirror: an engine's copy of the published weights, on the host.

Owns: the bits of the version that the engine is to run next, and its identity.
Promises: transactional. Every frame's checksums, base, place and payload are checked before the first write,
and what was written is hashed as it is written: a bucket that comes out wrong takes all of them back. When
load_snapshot() or apply_delta() raise, version, hash and bits are as before.
Pure: no relay, no files, no clock. One thread at a time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rose.errors import FrameError
from rose.transfer.codec import Codec, Patch, decode
from rose.transfer.frame import NO_BASE, Frame, run_digest
from rose.transfer.layout import Bucket, Layout
from rose.transfer.manifest import Manifest
from rose.transfer.planes import WeightPlanes, bits_dtype
from rose.transfer.state_hash import StateHash
from rose.types import WeightVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One bucket's way to the next version; payload and base were checked, nothing is written yet."""

    bucket: Bucket
    patch: Patch
    before: StateHash
    after: StateHash


class WeightMirror:
    """Empty until its first snapshot."""

    def __init__(self) -> None:
        self.version: WeightVersion | None = None
        self.planes: WeightPlanes | None = None

    @property
    def state_hash(self) -> StateHash | None:
        """The hash of the held weights, None while empty."""
        return self.planes.state_hash if self.planes is not None else None

    def load_snapshot(self, manifest: Manifest, layout: Layout, frames: Iterable[bytes]) -> None:
        """Replaces everything by a snapshot; `frames` come in the order of the manifest's entries.

        Raises: FrameError and keeps the old state.
        """
        if manifest.base is not None or manifest.layout != layout.digest:
            raise FrameError(f"version {manifest.version} is not a snapshot of layout {layout.digest}")
        if [entry.index for entry in manifest.buckets] != [bucket.index for bucket in layout.buckets]:
            raise FrameError(f"snapshot {manifest.version} does not hold each bucket of its layout once")
        planes = WeightPlanes(layout)
        for bucket, data in zip(layout.buckets, frames, strict=True):
            frame = _open_frame(data, manifest, bucket)
            bits = np.frombuffer(frame.payload, bits_dtype(bucket.dtype))
            if frame.codec is not Codec.DENSE or bits.size != bucket.num_elements:
                raise FrameError(f"bucket {bucket.index} of snapshot {manifest.version} is not dense")
            planes.fill(bucket, bits)
            if planes.bucket_hash(bucket) != frame.new_hash:
                raise FrameError(f"bucket {bucket.index}: hash {planes.bucket_hash(bucket)}")
        self.adopt(manifest, planes)

    def adopt(self, manifest: Manifest, planes: WeightPlanes) -> None:
        """Takes over weights that are the snapshot already, e.g. the checkpoint the trainer started from.

        Raises: FrameError when their hash is another, and keeps the old state.
        """
        if str(planes.state_hash) != manifest.state_hash:
            raise FrameError(
                f"weights hash to {planes.state_hash}, version {manifest.version} to {manifest.state_hash}"
            )
        self.planes = planes
        self.version = WeightVersion(run_id=manifest.run_id, number=manifest.version)

    def apply_delta(self, manifest: Manifest, frames: Iterable[bytes]) -> None:
        """Moves on to the manifest's version; `frames` come in the order of its entries.

        Raises: FrameError and keeps the old state.
        """
        planes = self._require_base(manifest)
        steps = [
            self._check_step(planes, _open_frame(data, manifest, bucket), bucket)
            for bucket, data in zip(_buckets(manifest, planes.layout), frames, strict=True)
        ]
        after = sum((step.after - step.before for step in steps), planes.state_hash)
        if str(after) != manifest.state_hash:
            raise FrameError(f"version {manifest.version} would hash to {after}, not {manifest.state_hash}")
        _apply_all(planes, steps)
        self.version = WeightVersion(run_id=manifest.run_id, number=manifest.version)

    def check_integrity(self) -> None:
        """Raises: AssertionError when the bits don't have the hash that is kept for them."""
        assert (self.planes is None) == (self.version is None)
        if self.planes is not None:
            self.planes.check_integrity()

    def _require_base(self, manifest: Manifest) -> WeightPlanes:
        have = (self.version.run_id, self.version.number) if self.version is not None else None
        if self.planes is None or have != (manifest.run_id, manifest.base):
            raise FrameError(f"delta {manifest.run_id}/{manifest.version} needs {manifest.base}, have {have}")
        if manifest.layout != self.planes.layout.digest:
            raise FrameError(f"delta has layout {manifest.layout}, mirror {self.planes.layout.digest}")
        if manifest.base_state_hash != str(self.planes.state_hash):
            have_hash = self.planes.state_hash
            raise FrameError(f"delta starts at {manifest.base_state_hash}, mirror is at {have_hash}")
        return self.planes

    @staticmethod
    def _check_step(planes: WeightPlanes, frame: Frame, bucket: Bucket) -> _Step:
        before = planes.bucket_hash(bucket)
        if frame.base_hash != before:
            raise FrameError(f"bucket {bucket.index} starts at {frame.base_hash}, mirror at {before}")
        patch = decode(frame.codec, frame.payload, planes.bits(bucket))
        if patch.num_changed != frame.num_changed:
            raise FrameError(
                f"bucket {bucket.index} has {patch.num_changed} changes, its frame says {frame.num_changed}"
            )
        return _Step(bucket=bucket, patch=patch, before=before, after=frame.new_hash)


def _apply_all(planes: WeightPlanes, steps: Sequence[_Step]) -> None:
    """Applies all steps; none when one of them leads to another hash than its frame says."""
    for number, step in enumerate(steps):
        planes.patch(step.bucket, step.patch)
        found = planes.bucket_hash(step.bucket)
        if found != step.after:
            for done in steps[: number + 1]:
                planes.revert(done.bucket, done.patch, done.before)
            raise FrameError(f"bucket {step.bucket.index} hashes to {found}, its frame says {step.after}")


def _buckets(manifest: Manifest, layout: Layout) -> list[Bucket]:
    indices = [entry.index for entry in manifest.buckets]
    if any(index >= len(layout.buckets) for index in indices) or len(set(indices)) != len(indices):
        raise FrameError(f"version {manifest.version} names buckets {indices} of {len(layout.buckets)}")
    return [layout.buckets[index] for index in indices]


def _open_frame(data: bytes, manifest: Manifest, bucket: Bucket) -> Frame:
    frame = Frame.unpack(data)
    frame.check_place(bucket, manifest.layout)
    base = manifest.base if manifest.base is not None else NO_BASE
    expected = (run_digest(manifest.run_id), base, manifest.version)
    if (frame.run, frame.base, frame.version) != expected:
        raise FrameError(
            f"frame is {frame.version} on {frame.base} of run {frame.run.hex()}, expected "
            f"{manifest.version} on {base} of {expected[0].hex()}"
        )
    return frame
