"""A relay folds deltas into snapshots by itself, bit for bit, or not at all."""

import pytest
import torch
from relay_process import CAPACITY_BYTES, wait_folded
from training_steps import step

from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.format import manifest as keys
from rose.transfer.format.manifest import Fold, pack_body
from rose.transfer.publish import chain
from rose.transfer.publish.publisher import WeightPublisher
from rose.transfer.relay.folding import SnapshotFolder
from rose.transfer.relay.opening import open_relay


@pytest.fixture
def weights():
    torch.manual_seed(0)
    return {f"layer{i}.weight": torch.randn(60, 50) for i in range(4)}


def spoil(relay, key):
    data = bytearray(relay.get(key))
    data[-1] ^= 1
    relay.upsert(key, bytes(data))


def test_a_run_sends_one_snapshot_however_long_it_is(relay_url, relay, weights):
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
    assert held == {"HEAD", "LAYOUT", "6-none", "7-6"}
    publisher.close()


def test_a_snapshot_that_was_half_made_is_completed_with_the_same_bytes(embedded_url, weights):
    relay = open_relay(embedded_url)
    publisher = WeightPublisher(weights, embedded_url, "run", snapshot_every=2, bucket_bytes=2000)
    for _ in range(3):
        publisher.publish()
        step(weights)
    wait_folded(relay, "run", 2)
    made = {key: relay.get(key) for key in relay.keys(keys.version_prefix("run", 2, None))}
    assert len(made) > 10
    relay.remove([keys.manifest_key("run", 2, None), *sorted(made)[1::2]])
    relay.upsert(keys.fold_key("run", 2), pack_body(Fold(snapshot=0)))
    folder = SnapshotFolder(relay)
    folder.step(None)
    assert {key: relay.get(key) for key in made} == made
    assert folder.step(None) == 0
    publisher.close()
    relay.close()


def test_a_chain_with_a_wrong_frame_gives_no_snapshot_and_leaves_no_frames(embedded_url, weights):
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


def test_the_trainer_sends_a_snapshot_that_the_relay_can_not_fold(embedded_url, weights, monkeypatch):
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


def test_a_full_relay_folds_when_it_has_room_again(start_relay):
    url = start_relay("embedded").url
    relay = open_relay(url)
    weights = {"w": torch.zeros(1 << 20, dtype=torch.bfloat16)}
    publisher = WeightPublisher(weights, url, "run", snapshot_every=1, full_wait_s=0)
    follower = Follower(relay, "run", WeightMirror())
    publisher.publish()
    relay.put("filler", bytes(CAPACITY_BYTES - sum(len(relay.get(k)) for k in relay.keys("")) - (1 << 20)))
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


def test_every_copy_of_a_relay_folds_before_followers_are_sent_to_the_snapshot(start_relay, weights):
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
