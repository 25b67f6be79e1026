"""The publisher removes what no worker needs, and knows which version each worker has acknowledged."""

import time

import pytest
import torch
from relay_process import wait_folded
from training_steps import step

from rose.errors import WorkerError
from rose.transfer.format import manifest as keys
from rose.transfer.format.leases import ACK_LEASE_S
from rose.transfer.format.manifest import Ack, pack_body
from rose.transfer.publish.publisher import WeightPublisher
from rose.transfer.relay.calls import RelayAnswer, RelayCalls
from rose.transfer.relay.opening import open_relay
from rose.transfer.relay.protocol import Relay


def acknowledge(relay: Relay, worker: str, version: int) -> None:
    ack = Ack(worker=worker, version=version, state_hash="")
    relay.upsert(keys.ack_prefix("run") + worker, pack_body(ack))


def test_old_objects_are_removed_when_the_workers_are_past_them(relay_url: str, relay: Relay) -> None:
    weights = {"a": torch.randn(100, 100)}
    publisher = WeightPublisher(weights, relay_url, "run", snapshot_every=2, snapshot_share=10.0)
    for number in range(5):
        step(weights)
        publisher.publish()
        acknowledge(relay, "w", min(number, 2))
        if number in (2, 4):
            wait_folded(relay, "run", number)
    assert publisher.acked() == {"w": 2}
    kept = {key.split("/")[2] for key in relay.keys("rose/run/")}
    assert kept == {"HEAD", "LAYOUT", "CLAIM", "ack", "2-none", "3-2", "4-3", "4-none"}
    publisher.close()


def test_wait_acked_accepts_newer_versions_and_names_late_workers(relay_url: str, relay: Relay) -> None:
    publisher = WeightPublisher({"a": torch.randn(10, 10)}, relay_url, "run")
    version = publisher.publish().version
    acknowledge(relay, "a", 3)
    publisher.wait_acked(version, ["a"], timeout_s=60)
    with pytest.raises(WorkerError, match=r"run/0 .* from b"):
        publisher.wait_acked(version, ["a", "b"], timeout_s=0.1)
    publisher.close()


def test_the_acknowledgement_of_a_worker_that_left_expires(
    embedded_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    relay = open_relay(embedded_url)
    weights = {"a": torch.randn(40, 40)}
    publisher = WeightPublisher(weights, embedded_url, "run", snapshot_every=2)
    for number in range(7):
        step(weights)
        publisher.publish()
        if number == 0:
            acknowledge(relay, "gone", 0)
        if number in (2, 4, 6):
            wait_folded(relay, "run", number)
        ack = Ack(worker="there", version=1, state_hash="", beat=number)
        relay.upsert(keys.ack_prefix("run") + "there", pack_body(ack))
        now_s += ACK_LEASE_S * 0.7
    assert publisher.acked() == {"there": 1}
    publisher.close()
    relay.close()


def test_an_acknowledgement_that_is_none_is_skipped(
    embedded_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    weights = {"a": torch.randn(40, 40)}
    publisher = WeightPublisher(weights, embedded_url, "run", snapshot_every=2)
    relay = open_relay(embedded_url)
    for evil in (b"{}", b"\xff", b"[" * 4000):
        relay.upsert(keys.ack_prefix("run") + "evil", evil)
        version = publisher.publish().version
        acknowledge(relay, "w", version.number)
        step(weights)
    assert publisher.acked() == {"w": 2}
    assert "acknowledgement skipped: rose/run/ack/evil: not a Ack" in caplog.text
    with pytest.raises(WorkerError, match="from evil"):
        publisher.wait_acked(version, ["w", "evil"], timeout_s=0.1)
    publisher.close()
    relay.close()


def test_a_publish_makes_no_relay_call_per_worker_that_left(
    embedded_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"a": torch.randn(40, 40)}
    publisher = WeightPublisher(weights, embedded_url, "run", snapshot_every=3)
    publisher.publish()
    relay = open_relay(embedded_url)
    for number in range(200):
        acknowledge(relay, f"gone{number}", 0)
    made: list[str] = []
    call = RelayCalls.call

    def counted(calls: RelayCalls, method: str, path: str, content: bytes | None = None) -> RelayAnswer:
        made.append(f"{method} {path}")
        return call(calls, method, path, content)

    monkeypatch.setattr(RelayCalls, "call", counted)
    for number in range(1, 9):
        step(weights)
        made.clear()
        publisher.publish()
        assert len(made) <= 10, made
        if number % 3 == 0:
            wait_folded(relay, "run", number)  # the next publish looks who is past the snapshot
    assert len(publisher.acked()) == 200
    publisher.close()
    relay.close()
