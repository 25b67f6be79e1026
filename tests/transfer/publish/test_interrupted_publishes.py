"""What happens while a version is written: the relay is killed and comes back empty, or another trainer opens
the same run."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from relay_process import RelayProcess, StartRelay

from rose.errors import RelayError
from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.format import leases
from rose.transfer.format import manifest as keys
from rose.transfer.format.layout import Layout, TensorSpec
from rose.transfer.format.manifest import Head, unpack_body
from rose.transfer.format.state_hash import StateHash
from rose.transfer.publish.chain import VersionChain, claim_run
from rose.transfer.publish.publisher import WeightPublisher
from rose.transfer.publish.run_lease import RunLease
from rose.transfer.publish.torch_source import TensorShard
from rose.transfer.relay.opening import open_relay
from rose.transfer.relay.protocol import Relay

SHAPE = (100, 100)


class WatchedShard(TensorShard):
    """Calls what stands first in `before_reading` when the weights are about to be read."""

    before_reading: ClassVar[list[Callable[[], object]]] = []

    def region(self, ends: tuple[tuple[int, int], ...]) -> Any:
        while self.before_reading:
            self.before_reading.pop()()
        return super().region(ends)


def wait_coming(relay: Relay, version: int) -> None:
    """Returns when the trainer has announced that this version is being written."""
    while (data := relay.get(keys.head_key("run"))) is None or unpack_body(
        data, Head, "HEAD"
    ).coming != version:
        time.sleep(0.01)


def check_newest(relay: Relay, weights: torch.Tensor) -> None:
    """Checks that a late joiner gets these weights."""
    follower = Follower(relay, "run", WeightMirror())
    assert follower.advance() and follower.mirror.planes is not None
    held = {"a": np.zeros(SHAPE, np.uint16)}
    follower.mirror.planes.read_into(held)
    assert torch.from_numpy(held["a"]).equal(weights.to(torch.bfloat16).view(torch.uint16))


@pytest.mark.parametrize("at_version", [0, 2])
def test_late_joiners_get_a_run_whose_relay_was_started_again_while_a_version_was_written(
    start_relay: StartRelay, at_version: int
) -> None:
    first = start_relay("embedded")
    weights = torch.randn(SHAPE)
    shard = WatchedShard(tensor=weights, shape=SHAPE, start=(0, 0))
    publisher = WeightPublisher({"a": shard}, first.url, "run")
    second: list[RelayProcess] = []

    def start_again() -> None:
        if at_version > 0:
            with closing(open_relay(first.url)) as relay:
                wait_coming(relay, at_version)
        first.kill()
        second.append(start_relay("embedded", "--port", first.port))
        publisher.relay.close()  # its connections, as when they have been idle for some seconds

    for version in range(at_version + 2):
        weights.add_(1.0)
        if version == at_version:
            WatchedShard.before_reading.append(start_again)
        try:
            publisher.publish()
        except RelayError as error:
            assert (version, at_version) == (0, 0) and "was started again while a snapshot was" in str(error)
            continue
        with closing(open_relay(first.url)) as relay:
            check_newest(relay, weights)
    assert second
    publisher.close()


def test_a_relay_that_comes_back_empty_gets_the_last_version_again_without_another_publish(
    start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer may wait for turns of an engine that has just started, too, and so publish nothing."""
    monkeypatch.setattr(leases, "BEAT_S", 0.05)
    relay_process = start_relay("embedded")
    weights = torch.randn(SHAPE)
    with closing(WeightPublisher({"a": weights}, relay_process.url, "run")) as publisher:
        for _ in range(3):
            published = weights.add_(1.0).clone()
            publisher.publish()
        relay_process.kill()
        weights.add_(1.0)  # half of a step
        again = start_relay("embedded", "--port", relay_process.port)
        with closing(open_relay(again.url)) as relay:
            late = Follower(relay, "run", WeightMirror())
            while not late.advance():
                late.wait(1.0)
            assert str(late.mirror.version) == "run/2"
            check_newest(relay, published)
            weights.add_(1.0)
            assert str(publisher.publish().version) == "run/3"
            check_newest(relay, weights)
            assert late.advance() and str(late.mirror.version) == "run/3"


def test_a_relay_that_comes_back_too_small_for_the_last_version_is_told_of(
    start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leases, "BEAT_S", 0.05)
    first = start_relay("embedded")
    weights = torch.randn(SHAPE)
    with closing(WeightPublisher({"a": weights}, first.url, "run", full_wait_s=0.05)) as publisher:
        publisher.publish()
        first.kill()
        start_relay("embedded", "--port", first.port, "--capacity-bytes", "4096")
        while not (told := [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]):
            time.sleep(0.05)
        assert "lost run run, and could not be given its last version again" in told[0]
        assert "free of 4096" in told[0]
        with pytest.raises(RelayError, match="free of 4096"):
            publisher.publish()
        with closing(open_relay(first.url)) as relay:
            assert relay.get(keys.head_key("run")) is None, "HEAD names a version that is not there"


def test_a_run_whose_relay_came_back_empty_lives_on_while_its_last_version_is_sent_again(
    embedded_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "BEAT_S", 0.02)
    is_sent = threading.Event()

    def send_again() -> None:
        is_sent.wait()

    with closing(open_relay(embedded_url)) as relay:
        lease = RunLease(relay, "run", send_again)
        lease.start()
        signs = {relay.get(keys.run_sign_key("run"))}
        while len(signs) < 5:
            signs.add(relay.get(keys.run_sign_key("run")))
        is_sent.set()
        lease.stop()


def test_a_trainer_leaves_its_run_to_another_that_opened_it_in_a_relay_that_came_back_empty(
    embedded_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "BEAT_S", 1e6)
    mine, others = torch.randn(SHAPE), torch.randn(SHAPE)
    with (
        closing(open_relay(embedded_url)) as relay,
        closing(WeightPublisher({"a": mine}, embedded_url, "run")) as first,
    ):
        first.publish()
        relay.remove(relay.keys("rose/"))
        with closing(WeightPublisher({"a": others}, embedded_url, "run")) as second:
            second.publish()
            for _ in range(2):
                mine.add_(1.0)
                with pytest.raises(RelayError, match="run run is in this relay already; choose another"):
                    first.publish()
            check_newest(relay, others)


def test_a_relay_that_lost_a_run_while_a_late_snapshot_was_written_gets_all_of_it_again(
    embedded_url: str,
) -> None:
    """Followers are on the run's chain already, as when the trainer sends a snapshot that was not folded."""
    layout = Layout([TensorSpec(name="a", dtype="BF16", shape=SHAPE)])
    with closing(open_relay(embedded_url)) as relay:
        chain = VersionChain(relay, "run", layout, 1, 1.0, None)
        chain.open()
        chain.add_snapshot(0, 1)
        chain.move_head(0, StateHash())
        assert not chain.require_claim(1)
        relay.remove(relay.keys("rose/"))
        with pytest.raises(RelayError, match="was started again while a snapshot was written"):
            chain.require_claim(1)
        chain.open()
        assert relay.get(keys.layout_key("run")) is not None and not chain.is_announced


class BetweenCalls:
    """A relay's client; at one call of a method something else happens first."""

    def __init__(self, relay: Relay, at: tuple[str, int], act: Callable[[], None]) -> None:
        self._relay = relay
        self._at, self._act = at, act
        self._called: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("_"):
            return super().__getattribute__(name)
        self._called[name] += 1
        if (name, self._called[name]) == self._at:
            self._act()
        return getattr(self._relay, name)


@pytest.mark.parametrize("call", [("get", 1), ("upsert", 1), ("get", 2), ("remove", 1), ("upsert", 2)])
def test_a_trainer_that_opens_a_run_while_another_commits_it_takes_nothing_away(
    embedded_url: str, call: tuple[str, int]
) -> None:
    """Whenever the second one begins, its opening or the first one's commit is refused, or both are."""
    layout = Layout([TensorSpec(name="a", dtype="BF16", shape=SHAPE)])
    frame = keys.bucket_key("run", 0, None, 0)
    refused: list[RelayError] = []

    def open_too() -> None:
        try:
            claim_run(relay, "run")
        except RelayError as error:
            refused.append(error)

    with closing(open_relay(embedded_url)) as relay:
        first = VersionChain(relay, "run", layout, 1, 1.0, None, writer=claim_run(relay, "run"))
        first.open()
        relay.put(frame, b"bits")
        watched: Any = BetweenCalls(relay, call, open_too)
        first._relay = watched
        try:
            first.require_claim(4)
            first.add_snapshot(0, 4)
            first.move_head(0, StateHash())
        except RelayError as error:
            refused.append(error)
        assert refused
        assert relay.get(keys.head_key("run")) is None or relay.get(frame) == b"bits"
        assert relay.get(keys.opening_key("run")) is None


def test_of_two_trainers_with_one_run_id_followers_get_the_weights_of_one(embedded_url: str) -> None:
    """The second one starts while the first one still writes its first version."""
    weights = [torch.randn(SHAPE) for _ in range(2)]
    shards = [WatchedShard(tensor=each, shape=SHAPE, start=(0, 0)) for each in weights]
    first = WeightPublisher({"a": shards[0]}, embedded_url, "run")
    others: list[WeightPublisher] = []

    def start_second() -> None:
        others.append(WeightPublisher({"a": shards[1]}, embedded_url, "run"))

    WatchedShard.before_reading.append(start_second)
    with pytest.raises(RelayError, match="another trainer has opened this run; publish again"):
        first.publish()
    others[0].publish()
    for _ in range(2):
        for tensor in weights:
            tensor.add_(1.0)
        with pytest.raises(RelayError, match="run run is in this relay already; choose another run id"):
            first.publish()
        others[0].publish()
        with closing(open_relay(embedded_url)) as relay:
            check_newest(relay, weights[1])
    for publisher in (first, *others):
        publisher.close()
