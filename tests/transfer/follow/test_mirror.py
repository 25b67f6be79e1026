"""A mirror moves from version to version exactly, or stays where it is."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mirror_versions import (
    LAYOUT,
    Versions,
    apply_delta,
    check_holds,
    fetch_from,
    load_snapshot,
    read_ahead,
)

from rose.errors import FrameError
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.format.codec import Codec
from rose.transfer.format.frame import Frame
from rose.transfer.format.manifest import BucketEntry
from rose.types import BytesLike


def mirror_at_zero(versions: Versions) -> WeightMirror:
    mirror = WeightMirror()
    manifest, frames = versions.snapshot(0)
    load_snapshot(mirror, manifest, frames)
    return mirror


@pytest.mark.parametrize("codec", list(Codec))
def test_a_mirror_follows_every_version(codec: Codec) -> None:
    versions = Versions(codec, 4)
    mirror = mirror_at_zero(versions)
    for number in range(1, 4):
        assert len(versions.deltas[number][1]) < len(LAYOUT.buckets)
        apply_delta(mirror, *versions.deltas[number])
        check_holds(mirror, versions, number)


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_flipped_byte_in_any_frame_leaves_the_old_version(data: st.DataObject) -> None:
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


def test_a_broken_snapshot_leaves_the_old_version() -> None:
    versions = Versions(Codec.G8S, 3)
    mirror = mirror_at_zero(versions)
    manifest, frames = versions.snapshot(2)
    with pytest.raises(FrameError):
        load_snapshot(mirror, manifest, [*frames[:-1], frames[-1][:-1]])
    with pytest.raises(FrameError, match="hash"):
        load_snapshot(mirror, manifest.model_copy(update={"state_hash": "0" * 32}), frames)
    check_holds(mirror, versions, 0)


def test_frames_of_another_run_version_bucket_or_base_are_refused() -> None:
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


def test_a_manifest_that_omits_a_changed_bucket_is_refused() -> None:
    versions = Versions(Codec.G8S, 2)
    mirror = mirror_at_zero(versions)
    manifest, frames = versions.deltas[1]
    with pytest.raises(FrameError, match="would hash"):
        apply_delta(mirror, manifest.model_copy(update={"buckets": manifest.buckets[1:]}), frames[1:])
    twice = [*manifest.buckets, manifest.buckets[0]]
    with pytest.raises(FrameError, match="names buckets"):
        apply_delta(mirror, manifest.model_copy(update={"buckets": twice}), [*frames, frames[0]])
    check_holds(mirror, versions, 0)


def test_frames_that_disagree_with_their_payload_are_refused() -> None:
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
def test_frames_read_ahead_are_not_fetched_again_and_can_be_taken_back(codec: Codec) -> None:
    versions = Versions(codec, 3)
    mirror = mirror_at_zero(versions)
    manifest, frames = versions.deltas[1]
    for _ in range(2):
        for frame in frames[:-1]:
            read_ahead(mirror, frame)
        with pytest.raises(FrameError, match="bucket 1 was read ahead already"):
            read_ahead(mirror, frames[0])
        assert mirror.state_hash == versions.states[0].state_hash
        mirror.check_integrity()
        mirror.take_back_ahead()
        check_holds(mirror, versions, 0)
    for frame in frames[:-1]:
        read_ahead(mirror, frame)
    with pytest.raises(FrameError):
        apply_delta(mirror, manifest, [*frames[:-1], frames[-1][:-1]])
    assert str(mirror.version) == "run/0" and mirror.state_hash == versions.states[0].state_hash
    fetched: list[str] = []

    def fetch(entries: Sequence[BucketEntry]) -> Iterator[BytesLike]:
        fetched.extend(entry.key for entry in entries)
        return fetch_from(manifest, frames)(entries)

    mirror.apply_delta(manifest, fetch)
    assert fetched == [manifest.buckets[-1].key] and not mirror.buckets_ahead
    check_holds(mirror, versions, 1)
    apply_delta(mirror, *versions.deltas[2])
    check_holds(mirror, versions, 2)


def test_frames_of_an_aborted_attempt_do_not_count() -> None:
    versions, aborted = Versions(Codec.G8S, 2), Versions(Codec.G8S, 2)
    for bucket in LAYOUT.buckets:
        aborted.states[1].fill(bucket, aborted.states[0].bits(bucket) + 1)
    mirror = mirror_at_zero(versions)
    for frame in aborted.delta(Codec.G8S, 1)[1]:
        read_ahead(mirror, frame)
    assert len(mirror.buckets_ahead) == len(LAYOUT.buckets)
    assert mirror.state_hash == versions.states[0].state_hash
    apply_delta(mirror, *versions.deltas[1])
    check_holds(mirror, versions, 1)


def test_only_whole_frames_of_the_next_version_are_read_ahead() -> None:
    versions = Versions(Codec.G8S, 3)
    frame = versions.deltas[1][1][0]
    with pytest.raises(FrameError, match="empty mirror"):
        WeightMirror().read_ahead(frame, 1)
    mirror = mirror_at_zero(versions)
    for bad, bucket in ((frame[:-1], 1), (versions.deltas[2][1][0], 1), (versions.snapshot(0)[1][0], 0)):
        with pytest.raises(FrameError):
            mirror.read_ahead(bad, bucket)
    assert not mirror.buckets_ahead
    check_holds(mirror, versions, 0)


def test_a_frame_is_read_ahead_only_as_the_bucket_that_it_is() -> None:
    versions = Versions(Codec.G8S, 2)
    mirror = mirror_at_zero(versions)
    with pytest.raises(FrameError, match=r"frame is for \(1, .*, expected \(2, "):
        mirror.read_ahead(versions.deltas[1][1][0], 2)
    assert not mirror.buckets_ahead
    check_holds(mirror, versions, 0)
