"""A host's mirror hands engines the changes of each version, or says why they have to load everything."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
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
from rose.messages import WeightUpdate
from rose.transfer.follow import shared_mirror
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.follow.shared_mirror import SharedMirror
from rose.transfer.format.changes import ChangesFile, ChangesWriter
from rose.transfer.format.codec import Bits, Codec, Elements
from rose.transfer.format.planes import WeightPlanes
from rose.transfer.format.shared_planes import PlanesFile


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SharedMirror]:
    made = SharedMirror(tmp_path / "mirror")
    yield made
    made.close()


@pytest.fixture(params=[Codec.G8S_ZSTD, Codec.EXPONENT, Codec.DENSE])
def versions(request: pytest.FixtureRequest) -> Versions:
    return Versions(request.param, 5)


@pytest.fixture
def mirror(store: SharedMirror, versions: Versions) -> WeightMirror:
    made = WeightMirror(store=store)
    load_snapshot(made, *versions.snapshot(0))
    return made


def update_of(store: SharedMirror, base: str | None) -> WeightUpdate:
    """Returns what an engine at version `base` is told to load."""
    update = store.update_from(base)
    assert update is not None
    return update


def reason_of(store: SharedMirror, base: str) -> str:
    """Returns why an engine at version `base` has to load everything."""
    reason = update_of(store, base).whole_because
    assert reason is not None
    return reason


def bits_of(state: WeightPlanes) -> dict[str, Bits]:
    return {dtype: plane.copy() for dtype, plane in state.planes.items()}


def test_nothing_is_known_and_nothing_to_be_forgotten_before_the_first_version(store: SharedMirror) -> None:
    assert store.update_from(None) is None
    store.forget(set())


def test_a_store_that_is_closed_gives_back_the_memory_of_the_weights(tmp_path: Path) -> None:
    maps, store = Path("/proc/self/maps"), SharedMirror(tmp_path)
    mirror = WeightMirror(store=store)
    load_snapshot(mirror, *Versions(Codec.DENSE, 1).snapshot(0))
    assert str(tmp_path) in maps.read_text()
    store.close()
    assert str(tmp_path) not in maps.read_text() and mirror.version is not None


def test_a_snapshot_that_was_not_fetched_to_its_end_is_removed_when_a_delta_arrives(
    store: SharedMirror, versions: Versions, mirror: WeightMirror, tmp_path: Path
) -> None:
    store.make_planes(LAYOUT)
    partial = tmp_path / "mirror" / "weights.partial"
    assert partial.exists()
    manifest, frames = versions.deltas[1]
    mirror.apply_delta(manifest, fetch_from(manifest, frames))
    assert not partial.exists()
    check_holds(mirror, versions, 1)


def test_changes_files_lead_from_each_version_to_the_next(
    store: SharedMirror, versions: Versions, mirror: WeightMirror
) -> None:
    for number in range(1, 5):
        manifest, frames = versions.deltas[number]
        for frame in frames[: len(frames) // 2]:
            read_ahead(mirror, frame)
        check_holds(mirror, versions, number - 1)  # nothing is written before the manifest is there
        mirror.apply_delta(manifest, fetch_from(manifest, frames))
        check_holds(mirror, versions, number)
    update = update_of(store, "run/1")
    assert update.whole_because is None and len(update.changes) == 3
    held = bits_of(versions.states[1])
    for path in update.changes:
        for bucket, elements in ChangesFile(Path(path)).buckets(LAYOUT):
            bits = held[bucket.dtype][bucket.begin : bucket.end]
            assert np.array_equal(bits[elements.places], elements.old)
            bits[elements.places] = elements.new
    for dtype, plane in versions.states[4].planes.items():
        assert np.array_equal(held[dtype], plane)


def state_of(store: SharedMirror) -> tuple[str, str]:
    file = PlanesFile(Path(update_of(store, None).path))
    with file.reading() as state:
        file.close()
        return state


def test_a_failed_delta_leaves_the_file_at_its_version(
    store: SharedMirror, versions: Versions, mirror: WeightMirror
) -> None:
    manifest, frames = versions.deltas[1]
    wrong, _ = versions.deltas[2]
    with pytest.raises(FrameError):
        mirror.apply_delta(wrong, fetch_from(*versions.deltas[2]))
    bad = [*frames[:-1], frames[-1][:-1] + bytes([frames[-1][-1] ^ 1])]
    read_ahead(mirror, frames[0])
    with pytest.raises(FrameError):
        mirror.apply_delta(manifest, fetch_from(manifest, bad))
    assert state_of(store) == ("run/0", str(mirror.state_hash))
    check_holds(mirror, versions, 0)
    assert update_of(store, "run/0").version == "run/0"
    apply_delta(mirror, manifest, frames)
    check_holds(mirror, versions, 1)


def test_a_version_that_fails_half_way_leaves_no_changes_file(
    store: SharedMirror, mirror: WeightMirror, tmp_path: Path
) -> None:
    bucket, place, bits = LAYOUT.buckets[0], np.array([3], np.int32), np.zeros(1, np.uint16)
    assert mirror.planes is not None
    with (
        pytest.raises(FrameError, match="as its frame says"),
        store.changing(mirror.planes, [(bucket, 1), (LAYOUT.buckets[1], 1)]) as note,
    ):
        assert note is not None
        note(bucket, Elements(places=place, old=bits, new=bits))
        raise FrameError("bucket 1 does not hash as its frame says")
    assert [path.name for path in (tmp_path / "mirror").iterdir()] == ["weights.safetensors"]


def test_changes_that_no_engine_needs_are_removed_and_others_kept(
    store: SharedMirror,
    versions: Versions,
    mirror: WeightMirror,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_mirror, "KEPT_SHARE", 100.0)  # the weights of this test are tiny
    for number in range(1, 5):
        apply_delta(mirror, *versions.deltas[number])
    store.forget({"run/2", "run/3"})
    assert reason_of(store, "run/1") == "the changes since run/1 are not kept"
    assert len(update_of(store, "run/2").changes) == 2
    store.forget({"run/4"})
    assert [path.name for path in (tmp_path / "mirror").iterdir()] == ["weights.safetensors"]


def test_changes_of_engines_far_behind_take_a_share_of_the_weights_at_most(
    store: SharedMirror, versions: Versions, mirror: WeightMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_mirror, "KEPT_SHARE", 0.0)
    for number in range(1, 4):
        apply_delta(mirror, *versions.deltas[number])
        store.forget({"run/0", f"run/{number - 1}"})
    assert len(update_of(store, "run/2").changes) == 1
    assert "since run/1 are not kept" in reason_of(store, "run/1")


def test_where_much_changes_or_memory_is_full_engines_are_told_why_they_load_everything(
    store: SharedMirror, versions: Versions, mirror: WeightMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device: 100 bytes of changes, 0 of 10 free", "changes")

    apply_delta(mirror, *versions.deltas[1])
    with monkeypatch.context() as patched:
        patched.setattr(ChangesWriter, "put", full)
        apply_delta(mirror, *versions.deltas[2])
    update = update_of(store, "run/0")
    assert update.changes == []
    assert "from run/1 to run/2, changes can't be kept: [Errno 28] No space" in reason_of(store, "run/0")
    monkeypatch.setattr(shared_mirror, "MOST_CHANGED", 0.001)
    apply_delta(mirror, *versions.deltas[3])
    assert re.fullmatch(r"from run/2 to run/3, \d+ of \d+ elements change", reason_of(store, "run/2"))
    check_holds(mirror, versions, 3)


def test_a_new_snapshot_replaces_the_file_and_one_that_fails_does_not(
    store: SharedMirror, versions: Versions, mirror: WeightMirror, tmp_path: Path
) -> None:
    apply_delta(mirror, *versions.deltas[1])
    manifest, frames = versions.snapshot(3)
    with pytest.raises(FrameError):
        load_snapshot(mirror, manifest, [b"none", *frames[1:]])
    assert state_of(store) == ("run/1", str(versions.states[1].state_hash))
    load_snapshot(mirror, manifest, frames)
    assert state_of(store) == ("run/3", str(versions.states[3].state_hash))
    assert "since run/1 are not kept" in reason_of(store, "run/1")
    assert [path.name for path in (tmp_path / "mirror").iterdir()] == ["weights.safetensors"]


def test_two_mirrors_never_share_a_folder_and_what_a_killed_one_left_is_removed(tmp_path: Path) -> None:
    first = SharedMirror(tmp_path)
    with pytest.raises(ValueError, match="holds another subscriber's weights; give each its own"):
        SharedMirror(tmp_path)
    first.close()
    (tmp_path / "weights.partial").write_bytes(b"left")
    SharedMirror(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def elements_of(path: str) -> list[Elements]:
    return [elements for _, elements in ChangesFile(Path(path)).buckets(LAYOUT)]


def test_the_memory_of_changes_is_used_again_but_not_while_a_process_reads_them(
    store: SharedMirror,
    versions: Versions,
    mirror: WeightMirror,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for share in ("KEPT_SHARE", "SPARE_SHARE"):
        monkeypatch.setattr(shared_mirror, share, 100.0)  # the weights of this test are tiny
    spare = tmp_path / "mirror" / "changes-spare"

    def changes_to(number: int) -> str:
        apply_delta(mirror, *versions.deltas[number])
        (path,) = update_of(store, f"run/{number - 1}").changes
        store.forget({f"run/{number - 1}"})
        return path

    read = elements_of(changes_to(1))
    before = [(each.places.copy(), each.old.copy(), each.new.copy()) for each in read]
    store.forget({"run/1"})
    inode = spare.stat().st_ino
    second = changes_to(2)
    assert Path(second).stat().st_ino != inode and not spare.exists()
    for each, kept in zip(read, before, strict=True):
        assert all(map(np.array_equal, (each.places, each.old, each.new), kept))

    inode = Path(second).stat().st_ino
    store.forget({"run/2"})
    third = changes_to(3)
    assert Path(third).stat().st_ino == inode
    check_holds(mirror, versions, 3)
    held = bits_of(versions.states[2])
    for bucket, elements in ChangesFile(Path(third)).buckets(LAYOUT):
        bits = held[bucket.dtype][bucket.begin : bucket.end]
        assert np.array_equal(bits[elements.places], elements.old)
        bits[elements.places] = elements.new
    assert all(np.array_equal(held[name], plane) for name, plane in versions.states[3].planes.items())

    del elements
    store.forget({"run/3"})
    writer = ChangesWriter(spare, LAYOUT, "", [])
    with pytest.raises(FrameError, match="is being written over: its changes are no longer kept"):
        ChangesFile(spare)
    writer.discard()
