"""The mirror: an engine's copy of the published weights, on the host.

Owns the bits of the version that the engine is to run next, and that version's identity. Updates are
transactional. Every frame's checksums, base, place and payload are checked before the first write. What is
written is hashed at once, and one bucket with a wrong hash undoes all of them. If load_snapshot() or
apply_delta() raises, version, hash and bits are as before. Frames that are read ahead are written too, so
that little is left to do when their manifest arrives last; a caller that reads the bits meanwhile first calls
take_back_ahead(). Where other processes read the bits (MirrorStore), such frames are checked and decoded
ahead, and written with the rest of their version. Pure: no relay, no files, no clock. One thread at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from rose.errors import FrameError
from rose.transfer.format.codec import Elements, Patch, decode, dense_bits
from rose.transfer.format.frame import Frame
from rose.transfer.format.layout import Bucket, Layout
from rose.transfer.format.manifest import BucketEntry, Manifest
from rose.transfer.format.planes import WeightPlanes, bits_dtype
from rose.transfer.format.state_hash import StateHash
from rose.types import BytesLike, WeightVersion

Fetch = Callable[[Sequence[BucketEntry]], Iterator[BytesLike]]
"""Yields the entries' frames in order. A frame is dropped before the next one is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """One bucket's change to the next version, with payload and base checked."""

    bucket: Bucket
    patch: Patch
    before: StateHash
    after: StateHash

    @property
    def change(self) -> StateHash:
        return self.after - self.before


Note = Callable[[Bucket, Elements], None]


class MirrorStore(Protocol):
    """Where a mirror's bits lie, if other processes read them."""

    def make_planes(self, layout: Layout) -> WeightPlanes:
        """Returns new planes of all buckets. Raises: OSError when there is no room."""

    def has_room(self) -> bool:
        """Returns whether one more version may arrive before the kept changes, since the last look, are
        dropped."""

    def changing(
        self, planes: WeightPlanes, counts: Sequence[tuple[Bucket, int]]
    ) -> AbstractContextManager[Note | None]:
        """Keeps readers out while the bits lie between two versions.

        counts: the buckets that change, and how many of their elements. Gives what takes these elements,
        bucket by bucket in this order; None where nobody asks for them. Raises: FrameError.
        """

    def arrived(self, planes: WeightPlanes, version: WeightVersion, state_hash: StateHash) -> None:
        """Notes that the planes hold a version now: new planes, or the end of what changing() has begun."""


class WeightMirror:
    """A mirror is empty until its first snapshot.

    store: where the bits are to lie; None: in this process's own memory.
    """

    def __init__(self, *, store: MirrorStore | None = None) -> None:
        self._store = store
        self.version: WeightVersion | None = None
        self.planes: WeightPlanes | None = None
        self._version_hash: StateHash | None = None
        self._held_hash: StateHash | None = None
        self._ahead: dict[int, _Step] = {}
        """The steps to the version after this one, by bucket. Without a store they are already written."""

    @property
    def state_hash(self) -> StateHash | None:
        """The hash of the held weights, without what was read ahead; None while empty."""
        return self._held_hash

    @property
    def version_hash(self) -> StateHash | None:
        """The hash that the version has by its manifest; None while empty."""
        return self._version_hash

    @property
    def has_room(self) -> bool:
        """Whether the mirror may go on to another version before the readers of its store have taken this
        one.
        """
        return self._store is None or self._store.has_room()

    def make_planes(self, layout: Layout) -> WeightPlanes:
        """Returns empty planes, where the bits are to lie."""
        if self._store is not None:
            return self._store.make_planes(layout)
        return WeightPlanes(layout)

    def load_snapshot(self, manifest: Manifest, layout: Layout, fetch: Fetch) -> None:
        """Replaces everything by a snapshot.

        fetch: called for all buckets. Raises: FrameError, and then keeps the old state.
        """
        if manifest.base is not None or manifest.layout != layout.digest:
            raise FrameError(f"version {manifest.version} is not a snapshot of layout {layout.digest}")
        if [entry.index for entry in manifest.buckets] != [bucket.index for bucket in layout.buckets]:
            raise FrameError(f"snapshot {manifest.version} does not hold each bucket of its layout once")
        planes = self.make_planes(layout)
        frames = fetch(manifest.buckets)
        for bucket in layout.buckets:
            _fill(planes, manifest, bucket, next(frames))
        self.adopt(manifest, planes)

    def adopt(self, manifest: Manifest, planes: WeightPlanes) -> None:
        """Takes over weights that already equal the snapshot, such as the checkpoint that the trainer started
        from.

        Raises: FrameError when their hash differs, and then keeps the old state.
        """
        whole = _require_changes(manifest, StateHash())
        for entry in manifest.buckets:
            found = planes.bucket_hash(planes.layout.buckets[entry.index])
            if str(found) != entry.change:
                raise FrameError(
                    f"bucket {entry.index} hashes to {found}, in version {manifest.version} to {entry.change}"
                )
        self._arrive(manifest, planes, whole)

    @property
    def buckets_ahead(self) -> frozenset[int]:
        """The buckets of which read_ahead() has taken a frame."""
        return frozenset(self._ahead)

    def read_ahead(self, data: BytesLike, bucket: int) -> None:
        """Checks this bucket's frame of the next version before its manifest is there, and writes it unless
        others read the bits.

        An aborted attempt may leave frames here that the version does not have in the end; apply_delta()
        learns that from the manifest and undoes them. Raises: FrameError, also when the frame is another
        bucket's or the bucket's was read before.
        """
        if self.version is None or self.planes is None:
            raise FrameError("an empty mirror can't read ahead: it needs a snapshot first")
        frame, layout = Frame.unpack(data), self.planes.layout
        if not 0 <= bucket < len(layout.buckets):
            raise FrameError(f"there is no bucket {bucket} among {len(layout.buckets)}")
        if bucket in self._ahead:
            raise FrameError(f"bucket {bucket} was read ahead already")
        run_id, number = self.version.run_id, self.version.number
        frame.check_place(layout.buckets[bucket], layout.digest)
        frame.check_version(run_id, number, number + 1)
        step = self._check_step(self.planes, frame, layout.buckets[bucket])
        if self._store is None:
            _apply_all(self.planes, [step])
        self._ahead[bucket] = step

    def take_back_ahead(self) -> None:
        """Leaves only the bits of the mirror's version. What was read ahead has to be fetched again."""
        for bucket in self.buckets_ahead:
            self._take_back(bucket)

    def apply_delta(self, manifest: Manifest, fetch: Fetch) -> None:
        """Moves on to the manifest's version.

        fetch: called for the buckets that were not read ahead. Raises: FrameError, and then keeps the old
        state.
        """
        planes, before = self._require_base(manifest)
        _require_buckets(manifest, planes.layout)
        whole = _require_changes(manifest, before)
        self._take_back_others(manifest)
        missing = [entry for entry in manifest.buckets if entry.index not in self._ahead]
        frames = fetch(missing)
        steps = [self._read_step(planes, manifest, entry, next(frames)) for entry in missing]
        if self._store is None:
            _apply_all(planes, steps)
            self._arrive(manifest, planes, whole)
            return
        steps = sorted([*self._ahead.values(), *steps], key=lambda step: step.bucket.index)
        self._ahead.clear()  # a patch is applied once
        counts = [(step.bucket, step.patch.num_changed) for step in steps]
        with self._store.changing(planes, counts) as note:
            _apply_all(planes, steps, note)
            self._arrive(manifest, planes, whole)

    def check_integrity(self) -> None:
        """Raises: AssertionError when the bits don't have the hash that is kept for them."""
        assert (self.planes is None) == (self.version is None) == (self._version_hash is None)
        if self.planes is not None:
            self.planes.check_integrity()
            written = self._ahead.values() if self._store is None else ()
            ahead = sum((step.change for step in written), StateHash())
            assert self.planes.state_hash - ahead == self._held_hash == self._version_hash

    def _arrive(self, manifest: Manifest, planes: WeightPlanes, whole: StateHash) -> None:
        self._ahead.clear()
        self.planes = planes
        self._version_hash, self._held_hash = whole, planes.state_hash
        self.version = WeightVersion(run_id=manifest.run_id, number=manifest.version)
        if self._store is not None:
            self._store.arrived(planes, self.version, self._held_hash)

    def _require_base(self, manifest: Manifest) -> tuple[WeightPlanes, StateHash]:
        have = (self.version.run_id, self.version.number) if self.version is not None else None
        if self.planes is None or self._version_hash is None or have != (manifest.run_id, manifest.base):
            raise FrameError(f"delta {manifest.run_id}/{manifest.version} needs {manifest.base}, have {have}")
        if manifest.layout != self.planes.layout.digest:
            raise FrameError(f"delta has layout {manifest.layout}, mirror {self.planes.layout.digest}")
        if manifest.base_state_hash != str(self._version_hash):
            raise FrameError(f"delta starts at {manifest.base_state_hash}, mirror is at {self._version_hash}")
        return self.planes, self._version_hash

    def _take_back_others(self, manifest: Manifest) -> None:
        """Undoes what was read ahead but does not change its bucket as the manifest says."""
        changes = {entry.index: entry.change for entry in manifest.buckets}
        for bucket, step in list(self._ahead.items()):
            if changes.get(bucket) != str(step.change):
                self._take_back(bucket)

    def _take_back(self, bucket: int) -> None:
        assert self.planes is not None
        step = self._ahead.pop(bucket)
        if self._store is None:
            self.planes.revert(step.bucket, step.patch, step.before)

    def _read_step(
        self, planes: WeightPlanes, manifest: Manifest, entry: BucketEntry, data: BytesLike
    ) -> _Step:
        bucket = planes.layout.buckets[entry.index]
        frame = Frame.unpack(data)
        frame.check_place(bucket, manifest.layout)
        frame.check_version(manifest.run_id, manifest.base, manifest.version)
        step = self._check_step(planes, frame, bucket)
        if str(step.change) != entry.change:
            raise FrameError(f"bucket {bucket.index}: its frame does not change its hash by {entry.change}")
        return step

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


def _fill(planes: WeightPlanes, manifest: Manifest, bucket: Bucket, data: BytesLike) -> None:
    """Writes one bucket of a snapshot, straight from its frame."""
    # A dense frame needs no base, so it may belong to the version's delta.
    frame = Frame.unpack(data)
    frame.check_place(bucket, planes.layout.digest)
    frame.check_version(manifest.run_id, frame.base, manifest.version)
    planes.fill(bucket, dense_bits(frame.codec, frame.payload, bits_dtype(bucket.dtype), bucket.num_elements))


def _apply_all(planes: WeightPlanes, steps: Sequence[_Step], note: Note | None = None) -> None:
    """Applies all steps, or none if one of them leads to another hash than its frame says."""
    for number, step in enumerate(steps):
        elements = None
        if note is not None:
            elements = planes.patch_noting(step.bucket, step.patch)
        else:
            planes.patch(step.bucket, step.patch)
        found = planes.bucket_hash(step.bucket)
        if found != step.after:
            for done in steps[: number + 1]:
                planes.revert(done.bucket, done.patch, done.before)
            raise FrameError(f"bucket {step.bucket.index} hashes to {found}, its frame says {step.after}")
        if note is not None and elements is not None:
            note(step.bucket, elements)


def _require_changes(manifest: Manifest, before: StateHash) -> StateHash:
    """Returns the version's state hash. Raises: FrameError unless the entries' changes lead to it from
    `before`.

    A mirror that holds a part of the weights can't hash the whole; this check shows that no entry was left
    out.
    """
    try:
        after = sum((StateHash.from_hex(entry.change) for entry in manifest.buckets), before)
    except ValueError as error:
        raise FrameError(f"version {manifest.version}: {error}") from error
    if str(after) != manifest.state_hash:
        raise FrameError(f"version {manifest.version} would hash to {after}, not {manifest.state_hash}")
    return after


def _require_buckets(manifest: Manifest, layout: Layout) -> None:
    indices = [entry.index for entry in manifest.buckets]
    if any(index >= len(layout.buckets) for index in indices) or len(set(indices)) != len(indices):
        raise FrameError(f"version {manifest.version} names buckets {indices} of {len(layout.buckets)}")
