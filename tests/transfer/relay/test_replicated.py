"""Either of two relays that hold the same objects may die at any moment, and nothing is lost."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from relay_process import RelayProcess, StartRelay, stored
from training_steps import Weights, step

from rose.errors import RelayError, RelayUnreachable
from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.format import manifest as keys
from rose.transfer.format.manifest import Ack, pack_body
from rose.transfer.publish.publisher import SyncReport, WeightPublisher
from rose.transfer.relay import calls as relay_calls
from rose.transfer.relay import copies as relay_copy
from rose.transfer.relay.opening import open_relay
from rose.transfer.relay.protocol import Relay
from rose.transfer.relay.replicated import ReplicatedRelay

Pair = tuple[RelayProcess, RelayProcess, str]


@pytest.fixture
def pair(start_relay: StartRelay) -> Pair:
    """Starts two relay processes; returns them and the URL of both together."""
    first, second = start_relay("embedded"), start_relay("embedded")
    return first, second, f"{first.url},{second.url}"


@pytest.fixture
def weights() -> Weights:
    torch.manual_seed(0)
    return {f"layer{i}.weight": torch.randn(60, 50) for i in range(6)}


def objects(url: str) -> dict[str, bytes]:
    relay = open_relay(url)
    held = {key: stored(relay, key) for key in relay.keys("rose/")}
    relay.close()
    return held


def bits_of(weights: Weights) -> dict[str, NDArray[np.uint16]]:
    return {name: tensor.to(torch.bfloat16).view(torch.uint16).numpy() for name, tensor in weights.items()}


def check_holds(mirror: WeightMirror, weights: Weights, report: SyncReport) -> None:
    assert mirror.version == report.version and str(mirror.state_hash) == report.state_hash
    mirror.check_integrity()
    expected = bits_of(weights)
    held = {name: np.zeros_like(bits) for name, bits in expected.items()}
    assert mirror.planes is not None
    mirror.planes.read_into(held)
    for name, bits in expected.items():
        assert np.array_equal(held[name], bits), name


@pytest.mark.slow
def test_both_hold_every_object_and_the_writer_sends_it_once(
    pair: Pair,
) -> None:
    first, second, both = pair
    relay = open_relay(both)
    relay.put("rose/run/1-0/0", os.urandom(100_000))
    relay.upsert("rose/run/HEAD", b"head")
    assert objects(first.url) == objects(second.url) and len(objects(first.url)) == 2
    with pytest.raises(RelayError, match="immutable"):
        relay.put("rose/run/1-0/0", b"other")
    relay.remove(["rose/run/1-0/0"])
    assert objects(first.url) == objects(second.url) == {"rose/run/HEAD": b"head"}
    relay.close()


@pytest.mark.parametrize("victim", [0, 1])
def test_objects_survive_the_death_of_either_relay(pair: Pair, victim: int) -> None:
    relay = open_relay(pair[2])
    relay.put("rose/run/a", b"before")
    pair[:2][victim].kill()
    assert relay.get("rose/run/a") == b"before"
    relay.put("rose/run/b", b"after")
    relay.upsert("rose/run/a2", b"after")
    assert relay.keys("rose/run/") == ["rose/run/a", "rose/run/a2", "rose/run/b"]
    assert relay.get("rose/run/b") == b"after" and relay.get("rose/run/none") is None
    assert relay.lacking(["rose/run/b", "rose/run/none"]) == {"rose/run/none"}
    assert relay.get_all("rose/run/a") == {"rose/run/a": b"before", "rose/run/a2": b"after"}
    late = open_relay(pair[2])
    assert late.get("rose/run/a") == b"before"
    pair[:2][1 - victim].kill()
    for call in (lambda: relay.get("rose/run/a"), lambda: relay.put("c", b""), lambda: relay.keys("")):
        with pytest.raises(RelayUnreachable):
            call()
    with pytest.raises(RelayUnreachable):
        open_relay(pair[2])
    relay.close()
    late.close()


@pytest.mark.parametrize("kind", ["embedded", pytest.param("mooncake", marks=pytest.mark.mooncake)])
def test_several_objects_are_read_although_the_first_copy_lacks_one_of_them(
    kind: str, start_relay: StartRelay
) -> None:
    urls = [start_relay(kind).url for _ in range(2)]
    both, first = open_relay(",".join(urls)), open_relay(urls[0])
    held = {f"rose/run/1-0/{number}": os.urandom(1000 + number) for number in range(3)}
    for key, data in held.items():
        both.put(key, data)
    names = ["rose/run/1-0/none", *held]
    for lacks, data in held.items():
        first.remove([lacks])
        found: list[bytes | None] = []
        while len(found) < len(names):
            came = both.get_several(names[len(found) :])
            found += [bytes(each) if each is not None else None for each in came]
        assert found == [None, *held.values()], lacks
        first.put(lacks, data)
    first.close()
    both.close()


@pytest.mark.slow
def test_a_put_whose_relay_died_after_handing_it_on_is_no_second_put(
    pair: Pair,
) -> None:
    first, second, both = pair
    relay = open_relay(both)
    other = open_relay(second.url)
    other.put("rose/run/1-0/0", b"handed on")
    first.kill()
    relay.put("rose/run/1-0/0", b"handed on")
    with pytest.raises(RelayError, match="immutable"):
        relay.put("rose/run/1-0/0", b"something else")
    relay.close()
    other.close()


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.slow
def test_a_relay_killed_while_versions_flow_loses_nothing(pair: Pair, weights: Weights, victim: int) -> None:
    publisher = WeightPublisher(weights, pair[2], "run", bucket_bytes=2000)
    relay = open_relay(pair[2])
    follower = Follower(relay, "auto", WeightMirror())
    for number in range(8):
        step(weights)
        if number == 4:
            # The relay dies while frames are being put.
            killing = threading.Timer(0.005, pair[:2][victim].kill)
            killing.start()
        report = publisher.publish()
        if number == 4:
            killing.join()
        assert report.version.number == number
        follower.advance()
        check_holds(follower.mirror, weights, report)
    late_relay = open_relay(pair[2])
    late = Follower(late_relay, "auto", WeightMirror())
    assert late.advance()
    check_holds(late.mirror, weights, report)
    for each in (publisher, relay, late_relay):
        each.close()


@pytest.mark.slow
def test_a_copy_that_missed_versions_is_repaired_by_the_next_publish(pair: Pair, weights: Weights) -> None:
    first, second, both = pair
    publisher = WeightPublisher(weights, both, "run", snapshot_every=3)
    publisher.publish()
    # A relay that was away for a while lacks some objects and holds others that were removed.
    alone = open_relay(second.url)
    for key in alone.keys("rose/run/0-none/"):
        alone.remove([key])
    alone.remove([keys.HEAD_RUN_KEY])
    alone.put("rose/run/77-76/0", b"of a version that went")
    alone.upsert(keys.ack_prefix("run") + "w", pack_body(Ack(worker="w", version=0, state_hash="")))
    step(weights)
    report = publisher.publish()
    assert objects(first.url).keys() == objects(second.url).keys()
    assert not [key for key in objects(second.url) if "77-76" in key]
    first.kill()
    follower = Follower(alone, "auto", WeightMirror())
    assert follower.advance()
    check_holds(follower.mirror, weights, report)
    publisher.close()
    alone.close()


@pytest.mark.slow
def test_a_copy_that_did_not_answer_is_repaired_although_it_has_the_newest_objects(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_copy, "REST_S", 0.0)
    monkeypatch.setattr(relay_copy, "REST_OVER_WAIT", 0.0)
    first, second, _ = pair
    is_away = True

    def open_second() -> Relay:
        if is_away:
            raise RelayUnreachable("away")
        return open_relay(second.url)

    # The second relay's URL is of a kind that the first one can't hand objects on to.
    relay = ReplicatedRelay([(first.url, partial(open_relay, first.url)), ("mooncake://far:1", open_second)])
    relay.put("rose/run/1-0/0", b"missed")
    relay.upsert(keys.HEAD_RUN_KEY, b"missed")
    is_away = False
    relay.put("rose/run/2-1/0", b"newest")
    assert list(objects(second.url)) == ["rose/run/2-1/0"]
    relay.repair("rose/run/", ["rose/run/1-0/0", "rose/run/2-1/0"], ["rose/run/2-1/0"])
    assert objects(second.url) == objects(first.url) and len(objects(first.url)) == 3
    relay.close()


@pytest.mark.slow
def test_a_follower_never_goes_back_with_a_copy_that_is_behind(pair: Pair, weights: Weights) -> None:
    first, second, both = pair
    relay = open_relay(both)
    publisher = WeightPublisher(weights, both, "run")
    publisher.publish()
    behind = objects(second.url)
    step(weights)
    report = publisher.publish()
    follower = Follower(relay, "auto", WeightMirror())
    assert follower.advance()
    publisher.close()
    newer = WeightPublisher(weights, both, "newer")
    report = newer.publish()
    assert follower.advance() and follower.mirror.version == report.version
    alone = open_relay(second.url)
    for key, data in behind.items():
        alone.upsert(key, data)
    first.kill()
    assert not follower.advance()
    assert follower.mirror.version == report.version
    for each in (newer, relay, alone):
        each.close()


@pytest.mark.slow
def test_a_wait_goes_on_at_the_other_copy_when_one_dies(pair: Pair) -> None:
    first, _, both = pair
    relay, writer = open_relay(both), open_relay(both)

    def wait_for(key: str) -> None:
        seen = None
        while relay.get(key) is None:
            seen = relay.wait(["rose/run/"], seen, 60.0).seen

    with ThreadPoolExecutor(1) as executor:
        for key in ("rose/run/1-0/0", "rose/run/1-0/1"):
            waiting = executor.submit(wait_for, key)
            first.kill()
            writer.put(key, b"frame")
            waiting.result()
    relay.close()
    writer.close()


def test_one_relay_can_not_be_named_as_two_copies() -> None:
    with pytest.raises(ValueError, match="twice"):
        open_relay("embedded://127.0.0.1:1,embedded://127.0.0.1:1")
    with pytest.raises(ValueError, match="relay URL 'nonsense'"):
        open_relay("embedded://127.0.0.1:1,nonsense")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_relay_that_hangs_is_given_up_and_nothing_is_lost(pair: Pair, victim: int) -> None:
    """Uses production's time limits: if a writer waited little longer for a relay than that waits for its
    peer, it would give up both when the machine stalls."""
    assert relay_calls.SILENCE_S <= 10
    relay = open_relay(pair[2])
    relay.put("rose/run/a", b"before")
    os.kill(pair[:2][victim].process.pid, signal.SIGSTOP)
    try:
        relay.put("rose/run/b", b"after")
        assert relay.get("rose/run/a") == b"before" and relay.get("rose/run/b") == b"after"
        alone = open_relay(pair[:2][1 - victim].url)
        assert alone.get("rose/run/b") == b"after"
        alone.close()
    finally:
        os.kill(pair[:2][victim].process.pid, signal.SIGCONT)
    relay.close()


@pytest.mark.slow
def test_a_copy_gets_the_wish_for_a_snapshot_after_the_frames(
    pair: Pair,
) -> None:
    first, second = (open_relay(each.url) for each in pair[:2])
    frames = [keys.bucket_key("run", number, number - 1, 0) for number in (1, 2)]
    for key in (keys.fold_key("run", 10), *frames):
        first.put(key, b"x")
    seen = second.wait(["rose/"], None, 0.0).seen
    both = open_relay(pair[2])
    both.repair("rose/run/", [keys.fold_key("run", 10), *frames], frames)
    assert second.wait(["rose/"], seen, 0.0).keys == [*frames, keys.fold_key("run", 10)]
    for relay in (both, first, second):
        relay.close()
