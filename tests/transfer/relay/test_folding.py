"""A relay folds deltas into snapshots by itself, bit for bit, or not at all."""

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from relay_process import CAPACITY_BYTES, StartRelay, stored, wait_folded
from training_steps import Weights, step

from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.format import manifest as keys
from rose.transfer.format.codec import Codec
from rose.transfer.format.frame import Frame
from rose.transfer.format.manifest import Fold, pack_body
from rose.transfer.publish import chain
from rose.transfer.publish.publisher import WeightPublisher
from rose.transfer.relay import folding
from rose.transfer.relay.beside import BesideRelay
from rose.transfer.relay.change_log import ChangeLog
from rose.transfer.relay.folding import SnapshotFolder
from rose.transfer.relay.object_store import ObjectStore, StoreClient
from rose.transfer.relay.opening import open_relay
from rose.transfer.relay.protocol import Relay


@pytest.fixture
def weights() -> Weights:
    torch.manual_seed(0)
    return {f"layer{i}.weight": torch.randn(60, 50) for i in range(4)}


@pytest.fixture
def store() -> Iterator[StoreClient]:
    """Makes a store in this process, which nobody else folds."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield StoreClient(ObjectStore(CAPACITY_BYTES), ChangeLog(), loop)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def published(embedded_url: str, weights: Weights) -> dict[str, bytes]:
    """Returns the objects of a run with versions 0 to 2 by key, and the wish that they are folded."""
    publisher = WeightPublisher(weights, embedded_url, "run", bucket_bytes=2000)
    for _ in range(3):
        publisher.publish()
        step(weights)
    publisher.close()
    relay = open_relay(embedded_url)
    found = {key: stored(relay, key) for key in relay.keys("rose/run/")}
    relay.close()
    return found | {keys.fold_key("run", 2): pack_body(Fold(snapshot=0))}


def fill(store: StoreClient, objects: Mapping[str, bytes]) -> None:
    for key, data in objects.items():
        store.upsert(key, data)


def is_folded(store: StoreClient) -> bool:
    return store.get(keys.manifest_key("run", 2, None)) is not None


def spoil(relay: Relay, key: str) -> None:
    data = bytearray(stored(relay, key))
    data[-1] ^= 1
    relay.upsert(key, bytes(data))


def test_a_run_sends_one_snapshot_however_long_it_is(relay_url: str, relay: Relay, weights: Weights) -> None:
    publisher = WeightPublisher(weights, relay_url, "run", snapshot_every=2, bucket_bytes=2000)
    for number in range(7):
        report = publisher.publish()
        assert report.snapshot_bytes == 0
        if number in (2, 4, 6):
            wait_folded(relay, "run", number)
        step(weights)
    report = publisher.publish()
    late = Follower(relay, "run", WeightMirror())
    assert late.advance() and late.mirror.version == report.version
    late.mirror.check_integrity()
    assert str(late.mirror.state_hash) == report.state_hash
    held = {key.split("/")[2] for key in relay.keys("rose/run/")}
    assert held == {"HEAD", "LAYOUT", "CLAIM", "6-none", "7-6"}
    publisher.close()


def test_a_snapshot_that_was_half_made_is_completed_with_the_same_bytes(
    embedded_url: str, weights: Weights
) -> None:
    relay = open_relay(embedded_url)
    publisher = WeightPublisher(weights, embedded_url, "run", snapshot_every=2, bucket_bytes=2000)
    for _ in range(3):
        publisher.publish()
        step(weights)
    wait_folded(relay, "run", 2)
    made = {key: stored(relay, key) for key in relay.keys(keys.version_prefix("run", 2, None))}
    assert len(made) > 10
    relay.remove([keys.manifest_key("run", 2, None), *sorted(made)[1::2]])
    relay.upsert(keys.fold_key("run", 2), pack_body(Fold(snapshot=0)))
    folder = SnapshotFolder(relay)
    folder.step(None)
    assert {key: relay.get(key) for key in made} == made
    assert folder.step(None) == 0
    publisher.close()
    relay.close()


def test_a_chain_with_a_wrong_frame_gives_no_snapshot_and_leaves_no_frames(
    embedded_url: str, weights: Weights
) -> None:
    relay = open_relay(embedded_url)
    publisher = WeightPublisher(weights, embedded_url, "run", bucket_bytes=2000)
    for _ in range(3):
        publisher.publish()
        step(weights)
    spoil(relay, keys.bucket_key("run", 2, 1, 3))
    relay.upsert(keys.fold_key("run", 2), pack_body(Fold(snapshot=0)))
    assert SnapshotFolder(relay).step(None) == 0
    assert relay.get(keys.manifest_key("run", 2, None)) is None
    publisher.close()
    relay.close()


def test_the_trainer_sends_a_snapshot_that_the_relay_can_not_fold(
    embedded_url: str, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "FOLD_TIMEOUT_S", 0.0)
    relay = open_relay(embedded_url)
    publisher = WeightPublisher(weights, embedded_url, "run", snapshot_every=2)
    publisher.publish()
    spoil(relay, keys.bucket_key("run", 0, None, 0))
    for number in range(1, 6):
        step(weights)
        report = publisher.publish()
        assert (report.snapshot_bytes > 0) == (number == 4)
    late = Follower(relay, "run", WeightMirror())
    assert late.advance() and str(late.mirror.state_hash) == report.state_hash
    publisher.close()
    relay.close()


@pytest.mark.slow
def test_a_full_relay_folds_when_it_has_room_again(start_relay: StartRelay) -> None:
    url = start_relay("embedded").url
    relay = open_relay(url)
    weights = {"w": torch.zeros(1 << 20, dtype=torch.bfloat16)}
    publisher = WeightPublisher(weights, url, "run", snapshot_every=1, full_wait_s=0)
    follower = Follower(relay, "run", WeightMirror())
    publisher.publish()
    relay.put(
        "filler", bytes(CAPACITY_BYTES - sum(len(stored(relay, k)) for k in relay.keys("")) - (1 << 20))
    )
    for _ in range(2):
        weights["w"][:100] += 1
        report = publisher.publish()
        assert follower.advance() and follower.mirror.version == report.version
    relay.remove(["filler"])
    wait_folded(relay, "run", 1)
    weights["w"][:100] += 1
    report = publisher.publish()
    late = Follower(relay, "run", WeightMirror())
    assert late.advance() and str(late.mirror.state_hash) == report.state_hash
    publisher.close()
    relay.close()


@pytest.mark.slow
def test_every_copy_of_a_relay_folds_before_followers_are_sent_to_the_snapshot(
    start_relay: StartRelay, weights: Weights
) -> None:
    first, second = start_relay("embedded"), start_relay("embedded")
    both = f"{first.url},{second.url}"
    publisher = WeightPublisher(weights, both, "run", snapshot_every=2)
    relay = open_relay(both)
    for number in range(4):
        report = publisher.publish()
        if number == 2:
            wait_folded(relay, "run", 2)
        step(weights)
    relay.close()
    for process in (first, second):
        alone = open_relay(process.url)
        assert not alone.lacking([keys.manifest_key("run", 2, None)])
        late = Follower(alone, "run", WeightMirror())
        assert late.advance() and str(late.mirror.state_hash) == report.state_hash
        alone.close()
    publisher.close()


@pytest.mark.parametrize("snapshot", [2, 3])
def test_a_wish_that_names_no_older_snapshot_is_refused(
    store: StoreClient, published: dict[str, bytes], caplog: pytest.LogCaptureFixture, snapshot: int
) -> None:
    fill(store, published | {keys.fold_key("run", 2): pack_body(Fold(snapshot=snapshot))})
    assert SnapshotFolder(store).step(None) == 0
    assert f"rose/run/2-none/FOLD names snapshot {snapshot}, which is not older" in caplog.text


@pytest.mark.parametrize("change", [{"payload": bytes(7)}, {"codec": Codec.COO}])
def test_a_snapshot_that_is_not_dense_is_refused(
    store: StoreClient, published: dict[str, bytes], caplog: pytest.LogCaptureFixture, change: dict[str, Any]
) -> None:
    key = keys.bucket_key("run", 0, None, 3)
    fill(store, published | {key: replace(Frame.unpack(published[key]), **change).pack()})
    folder = SnapshotFolder(store)
    assert folder.step(None) == 0 and "is not a dense one of 2000" in caplog.text
    assert store.keys("rose/run/2-none/") == [keys.fold_key("run", 2)]


def test_a_refused_wish_is_not_tried_again_until_it_is_written_again(
    store: StoreClient, published: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    bad = keys.bucket_key("run", 2, 1, 3)
    fill(store, published | {bad: published[bad][:-1] + b"x"})
    folder = SnapshotFolder(store)
    for written in (None, (), None):
        assert folder.step(written) == 0
    assert caplog.text.count("can't fold") == 1
    fill(store, {bad: published[bad]})
    assert folder.step([keys.fold_key("run", 2)]) == 1 and is_folded(store)


def test_a_copy_that_gets_the_frames_after_the_wish_folds_them(
    store: StoreClient, published: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folding._Retry, "put_off", lambda retry: None)
    frames = {key: data for key, data in published.items() if key.startswith("rose/run/0-none/")}
    fill(store, {key: data for key, data in published.items() if key not in frames})
    folder = SnapshotFolder(store)
    assert folder.step([keys.fold_key("run", 2)]) == 0
    fill(store, frames)
    assert folder.step([]) == 1 and is_folded(store)


def test_pauses_grow_to_a_minute() -> None:
    retry, pauses = folding._Retry(), []
    for _ in range(10):
        pauses.append(retry.pause_s)
        retry.put_off()
    assert pauses == [0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60]


@pytest.mark.parametrize("wish", [b"no wish", pack_body(Fold(snapshot=0))])
def test_a_snapshot_that_fails_holds_up_no_other_one(
    store: StoreClient, published: dict[str, bytes], caplog: pytest.LogCaptureFixture, wish: bytes
) -> None:
    fill(store, published | {keys.fold_key("another", 2): wish})
    folder = SnapshotFolder(store)
    assert folder.step(None) == 1 and is_folded(store)
    assert "can't fold, tries again in 0.5 s: key=rose/another/2-none/FOLD" in caplog.text


def test_a_host_without_memory_for_one_snapshot_makes_the_others(
    store: StoreClient, published: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, published | {keys.fold_key("another", 2): pack_body(Fold(snapshot=0))})
    folder, fold = SnapshotFolder(store), SnapshotFolder._fold

    def fold_small(folder: SnapshotFolder, key: str, data: bytes) -> bool:
        if "another" in key:
            raise MemoryError
        return fold(folder, key, data)

    monkeypatch.setattr(SnapshotFolder, "_fold", fold_small)
    assert folder.step(None) == 1 and is_folded(store)


@pytest.mark.slow
def test_an_unexpected_failure_does_not_end_the_thread(
    store: StoreClient, caplog: pytest.LogCaptureFixture
) -> None:
    class FailsOnce(BesideRelay):
        def step(self, written: Sequence[str] | None) -> int:
            if not caplog.records:
                raise ValueError("unexpected")
            went_on.set()
            return 0

    went_on = threading.Event()
    with FailsOnce(store, "test"):
        assert went_on.wait(60)
    assert "Traceback" in caplog.text and "ValueError: unexpected" in caplog.text


def test_a_snapshot_that_the_trainer_gave_up_meanwhile_leaves_nothing(
    store: StoreClient, published: dict[str, bytes]
) -> None:
    class GivenUp(SnapshotFolder):
        """The trainer removes its wish, and all that it finds, before the last object is written."""

        def _put_same(self, key: str, data: bytes) -> None:
            if key == keys.manifest_key("run", 2, None):
                store.remove(store.keys("rose/run/2-none/"))
            super()._put_same(key, data)

    fill(store, published)
    assert GivenUp(store).step(None) == 0
    assert store.keys("rose/run/2-none/") == []


def test_the_trainer_removes_what_was_folded_too_late(
    embedded_url: str, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "FOLD_TIMEOUT_S", 0.0)
    relay = open_relay(embedded_url)
    publisher = WeightPublisher(weights, embedded_url, "run", snapshot_every=2)
    publisher.publish()
    spoil(relay, keys.bucket_key("run", 0, None, 0))
    for number in range(1, 5):
        step(weights)
        report = publisher.publish()
        if number == 2:  # half a snapshot, from a relay that was killed
            relay.put(keys.bucket_key("run", 2, None, 7), b"half")
    assert report.snapshot_bytes > 0
    assert {key.split("/")[2] for key in relay.keys("rose/run/")} == {"HEAD", "LAYOUT", "CLAIM", "4-none"}
    publisher.close()
    relay.close()
