"""A mirror moves from version to version exactly, or stays where it is."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.errors import FrameError
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.format.codec import Codec, encode
from rose.transfer.format.frame import NO_BASE, Frame, run_digest
from rose.transfer.format.layout import DTYPE_BYTES, Layout, TensorSpec
from rose.transfer.format.manifest import BucketEntry, Manifest
from rose.transfer.format.planes import WeightPlanes
from rose.transfer.format.state_hash import StateHash
from rose.types import WeightVersion

LAYOUT = Layout(
    [
        TensorSpec(name="a", dtype="BF16", shape=(300, 7)),
        TensorSpec(name="b", dtype="BF16", shape=(11,)),
        TensorSpec(name="c", dtype="F32", shape=(500,)),
        TensorSpec(name="d", dtype="F8_E4M3", shape=(999,)),
    ],
    bucket_bytes=1000,
)


class Versions:
    """A run of versions 0, 1, ... with random changes, as manifests and frames."""

    def __init__(self, codec, count, seed=0):
        rng = np.random.default_rng(seed)
        self.states = [WeightPlanes(LAYOUT)]
        self.deltas = {}
        for bucket in LAYOUT.buckets:
            top = 256 ** DTYPE_BYTES[bucket.dtype]
            bits = rng.integers(0, top, bucket.num_elements)
            self.states[0].fill(bucket, bits.astype(self.states[0].bits(bucket).dtype))
        for number in range(1, count):
            self.states.append(WeightPlanes(LAYOUT))
            for bucket in LAYOUT.buckets:
                bits = self.states[number - 1].bits(bucket).copy()
                if bucket.index % 3:
                    changed = rng.random(bits.size) < 0.05
                    bits[changed] += rng.choice(np.array([1, -1, 77]), int(changed.sum())).astype(bits.dtype)
                self.states[number].fill(bucket, bits)
            self.deltas[number] = self._delta(codec, number)

    def snapshot(self, number):
        state = self.states[number]
        return self._version(
            number,
            None,
            [
                (bucket, Codec.DENSE, state.bits(bucket).tobytes(), bucket.num_elements, StateHash())
                for bucket in LAYOUT.buckets
            ],
        )

    def _delta(self, codec, number):
        old, new = self.states[number - 1], self.states[number]
        parts = []
        for bucket in LAYOUT.buckets:
            encoded = encode(codec, old.bits(bucket), new.bits(bucket), bucket.first_index)
            if encoded.num_changed:
                before = old.bucket_hash(bucket)
                parts.append((bucket, codec, encoded.payload, encoded.num_changed, before))
        return self._version(number, number - 1, parts)

    def _version(self, number, base, parts):
        state = self.states[number]
        frames = [
            Frame(
                codec=codec,
                width=DTYPE_BYTES[bucket.dtype],
                bucket=bucket.index,
                run=run_digest("run"),
                base=NO_BASE if base is None else base,
                version=number,
                layout=bytes.fromhex(LAYOUT.digest),
                dtype=bucket.dtype,
                num_elements=bucket.num_elements,
                first_index=bucket.first_index,
                num_changed=num_changed,
                base_hash=before,
                new_hash=state.bucket_hash(bucket),
                payload=payload,
            ).pack()
            for bucket, codec, payload, num_changed, before in parts
        ]
        manifest = Manifest(
            run_id="run",
            version=number,
            base=base,
            layout=LAYOUT.digest,
            state_hash=str(state.state_hash),
            base_state_hash=str(self.states[base].state_hash) if base is not None else None,
            num_elements=LAYOUT.num_elements,
            num_changed=sum(part[3] for part in parts),
            is_followed=False,
            buckets=[
                BucketEntry(
                    index=bucket.index,
                    key=f"k{bucket.index}",
                    num_bytes=1,
                    change=str(state.bucket_hash(bucket) - before),
                )
                for bucket, _, _, _, before in parts
            ],
        )
        return manifest, frames


def fetch_from(manifest, frames):
    by_key = {entry.key: frame for entry, frame in zip(manifest.buckets, frames, strict=True)}
    return lambda entry: by_key[entry.key]


def apply_delta(mirror, manifest, frames):
    mirror.apply_delta(manifest, fetch_from(manifest, frames))


def load_snapshot(mirror, manifest, frames):
    mirror.load_snapshot(manifest, LAYOUT, fetch_from(manifest, frames))


def check_holds(mirror, versions, number):
    assert mirror.version == WeightVersion(run_id="run", number=number)
    assert mirror.state_hash == versions.states[number].state_hash
    for dtype, plane in versions.states[number].planes.items():
        np.testing.assert_array_equal(mirror.planes.planes[dtype], plane)
    mirror.check_integrity()


def mirror_at_zero(versions):
    mirror = WeightMirror()
    manifest, frames = versions.snapshot(0)
    load_snapshot(mirror, manifest, frames)
    return mirror


@pytest.mark.parametrize("codec", list(Codec))
def test_a_mirror_follows_every_version(codec):
    versions = Versions(codec, 4)
    mirror = mirror_at_zero(versions)
    for number in range(1, 4):
        assert len(versions.deltas[number][1]) < len(LAYOUT.buckets)
        apply_delta(mirror, *versions.deltas[number])
        check_holds(mirror, versions, number)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_flipped_byte_in_any_frame_leaves_the_old_version(data):
    versions = Versions(Codec.G8S_ZSTD, 2)
    mirror = mirror_at_zero(versions)
    manifest, frames = versions.deltas[1]
    which = data.draw(st.integers(0, len(frames) - 1))
    broken = bytearray(frames[which])
    broken[data.draw(st.integers(0, len(broken) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FrameError):
        apply_delta(mirror, manifest, [*frames[:which], bytes(broken), *frames[which + 1 :]])
    check_holds(mirror, versions, 0)
    apply_delta(mirror, manifest, frames)
    check_holds(mirror, versions, 1)


def test_a_broken_snapshot_leaves_the_old_version():
    versions = Versions(Codec.G8S, 3)
    mirror = mirror_at_zero(versions)
    manifest, frames = versions.snapshot(2)
    with pytest.raises(FrameError):
        load_snapshot(mirror, manifest, [*frames[:-1], frames[-1][:-1]])
    with pytest.raises(FrameError, match="hash"):
        load_snapshot(mirror, manifest.model_copy(update={"state_hash": "0" * 32}), frames)
    check_holds(mirror, versions, 0)


def test_frames_of_another_run_version_bucket_or_base_are_refused():
    versions = Versions(Codec.G8S, 3)
    mirror = mirror_at_zero(versions)
    manifest, frames = versions.deltas[1]
    for other in ({"run_id": "other"}, {"base": 1}, {"layout": "00"}, {"base_state_hash": "0" * 32}):
        with pytest.raises(FrameError):
            apply_delta(mirror, manifest.model_copy(update=other), frames)
    with pytest.raises(FrameError):
        apply_delta(mirror, manifest, [frames[1], frames[0], *frames[2:]])
    with pytest.raises(FrameError):
        apply_delta(mirror, *versions.deltas[2])
    with pytest.raises(FrameError):
        apply_delta(mirror, manifest, [Frame.unpack(each).pack() for each in versions.deltas[2][1]])
    check_holds(mirror, versions, 0)


def test_a_manifest_that_omits_a_changed_bucket_is_refused():
    versions = Versions(Codec.G8S, 2)
    mirror = mirror_at_zero(versions)
    manifest, frames = versions.deltas[1]
    with pytest.raises(FrameError, match="would hash"):
        apply_delta(mirror, manifest.model_copy(update={"buckets": manifest.buckets[1:]}), frames[1:])
    twice = [*manifest.buckets, manifest.buckets[0]]
    with pytest.raises(FrameError, match="names buckets"):
        apply_delta(mirror, manifest.model_copy(update={"buckets": twice}), [*frames, frames[0]])
    check_holds(mirror, versions, 0)


def test_frames_that_disagree_with_their_payload_are_refused():
    versions = Versions(Codec.COO, 2)
    mirror = mirror_at_zero(versions)
    manifest, frames = versions.deltas[1]
    frame = Frame.unpack(frames[0])
    fields = {name: getattr(frame, name) for name in Frame.__slots__}
    entry = 4 + frame.width
    cut = {**fields, "payload": frame.payload[: len(frame.payload) // entry // 2 * entry]}
    with pytest.raises(FrameError):
        apply_delta(mirror, manifest, [Frame(**cut).pack(), *frames[1:]])
    check_holds(mirror, versions, 0)


@pytest.mark.parametrize("codec", [Codec.DENSE, Codec.G8S_ZSTD])
def test_frames_read_ahead_are_not_fetched_again_and_can_be_taken_back(codec):
    versions = Versions(codec, 3)
    mirror = mirror_at_zero(versions)
    manifest, frames = versions.deltas[1]
    for _ in range(2):
        for frame in frames[:-1]:
            mirror.read_ahead(frame)
        with pytest.raises(FrameError, match="starts at"):
            mirror.read_ahead(frames[0])
        assert mirror.state_hash == versions.states[0].state_hash
        mirror.check_integrity()
        mirror.take_back_ahead()
        check_holds(mirror, versions, 0)
    for frame in frames[:-1]:
        mirror.read_ahead(frame)
    with pytest.raises(FrameError):
        apply_delta(mirror, manifest, [*frames[:-1], frames[-1][:-1]])
    assert mirror.version.number == 0 and mirror.state_hash == versions.states[0].state_hash
    fetch, fetched = fetch_from(manifest, frames), []
    mirror.apply_delta(manifest, lambda entry: fetched.append(entry.key) or fetch(entry))
    assert fetched == [manifest.buckets[-1].key] and not mirror.buckets_ahead
    check_holds(mirror, versions, 1)
    apply_delta(mirror, *versions.deltas[2])
    check_holds(mirror, versions, 2)


def test_frames_of_an_aborted_attempt_do_not_count():
    versions, aborted = Versions(Codec.G8S, 2), Versions(Codec.G8S, 2)
    for bucket in LAYOUT.buckets:
        aborted.states[1].fill(bucket, aborted.states[0].bits(bucket) + 1)
    mirror = mirror_at_zero(versions)
    for frame in aborted._delta(Codec.G8S, 1)[1]:
        mirror.read_ahead(frame)
    assert len(mirror.buckets_ahead) == len(LAYOUT.buckets)
    assert mirror.state_hash == versions.states[0].state_hash
    apply_delta(mirror, *versions.deltas[1])
    check_holds(mirror, versions, 1)


def test_only_whole_frames_of_the_next_version_are_read_ahead():
    versions = Versions(Codec.G8S, 3)
    frame = versions.deltas[1][1][0]
    with pytest.raises(FrameError, match="empty mirror"):
        WeightMirror().read_ahead(frame)
    mirror = mirror_at_zero(versions)
    for bad in (frame[:-1], versions.deltas[2][1][0], versions.snapshot(0)[1][0]):
        with pytest.raises(FrameError):
            mirror.read_ahead(bad)
    assert not mirror.buckets_ahead
    check_holds(mirror, versions, 0)
