"""A follower of "auto" follows the only live run of a relay, and refuses to guess between two."""

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from training_steps import Weights, step

from rose.errors import RelayError
from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.follow.run_choice import RunChoice
from rose.transfer.format import leases
from rose.transfer.format.leases import WatchedSigns
from rose.transfer.format.manifest import RunSign, pack_body, run_sign_key
from rose.transfer.publish.publisher import WeightPublisher
from rose.transfer.relay.opening import open_relay
from rose.transfer.relay.protocol import Relay

Publish = Callable[[str], tuple[Weights, WeightPublisher]]

FAILING_TRAINER = """
import os, sys, torch
from rose.transfer.publish.publisher import WeightPublisher
publisher = WeightPublisher({"a": torch.ones(40, 40)}, sys.argv[1], "first")
publisher.publish()
if os.fork() == 0:
    sys.exit()
os.wait()
print(publisher.relay.get("rose/.runs/first").decode())
raise RuntimeError("the trainer fails")
"""


@pytest.fixture
def relay(embedded_url: str) -> Iterator[Relay]:
    relay = open_relay(embedded_url)
    yield relay
    relay.close()


@pytest.fixture
def publish(embedded_url: str) -> Iterator[Publish]:
    made: list[WeightPublisher] = []

    def make(run_id: str) -> tuple[Weights, WeightPublisher]:
        weights = {"a": torch.randn(40, 40)}
        made.append(WeightPublisher(weights, embedded_url, run_id))
        made[-1].publish()
        return weights, made[-1]

    yield make
    for publisher in made:
        publisher.close()


def test_a_run_that_opens_does_not_take_the_followers_of_a_live_run(publish: Publish, relay: Relay) -> None:
    weights, first = publish("first")
    follower = Follower(relay, "auto", WeightMirror())
    assert follower.advance()
    publish("second")
    assert not follower.advance()
    step(weights)
    report = first.publish()
    assert follower.advance() and follower.mirror.version == report.version


def test_auto_with_two_live_runs_is_refused_with_both_names(
    publish: Publish, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "BEAT_S", 0.02)
    publish("first")
    publish("second")
    follower = Follower(relay, "auto", WeightMirror())
    with pytest.raises(
        RelayError, match=r"2 runs are live in this relay: first, second; .* \(`--run`, or `run:`"
    ):
        while not follower.advance():
            pass
    named = Follower(relay, "second", WeightMirror())
    assert named.advance() and str(named.mirror.version) == "second/0"


@pytest.mark.slow
def test_a_run_whose_trainer_died_does_not_block_auto(
    publish: Publish, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "BEAT_S", 0.02)
    monkeypatch.setattr(leases, "RUN_LEASE_S", 1.0)
    # The sign of a trainer that was killed stands still.
    relay.upsert(run_sign_key("dead"), pack_body(RunSign(beat=7, is_ended=False)))
    publish("alive")
    follower = Follower(relay, "auto", WeightMirror())
    while not follower.advance():
        pass
    assert str(follower.mirror.version) == "alive/0"


@pytest.mark.slow
def test_a_follower_of_a_run_that_is_silent_for_long_moves_to_the_live_one(
    publish: Publish, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "RUN_GONE_S", 1.0)
    monkeypatch.setattr(leases, "BEAT_S", 1e6)
    publish("first")
    follower = Follower(relay, "auto", WeightMirror())
    assert follower.advance()
    monkeypatch.setattr(leases, "BEAT_S", 0.02)
    publish("second")
    while not follower.advance():
        pass
    assert str(follower.mirror.version) == "second/0"


def test_a_trainer_that_hangs_keeps_its_followers(relay: Relay, caplog: pytest.LogCaptureFixture) -> None:
    def sign(run_id: str, beat: int) -> None:
        relay.upsert(run_sign_key(run_id), pack_body(RunSign(beat=beat, is_ended=False)))

    choice = RunChoice(relay)
    sign("hangs", 1)
    for now_s in (0, 10, 20, 30):
        sign("other", now_s)
        assert choice.choose("hangs", now_s) == "hangs"
    (error,) = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    assert "following=hangs (silent" in error and "others=other; name its run (`--run`" in error
    sign("hangs", 2)
    for now_s, followed in ((605, "hangs"), (1200, "hangs"), (1206, "other")):
        sign("other", now_s)
        assert choice.choose("hangs", now_s) == followed


def test_a_follower_leaves_a_run_that_said_it_ended_at_once(publish: Publish, relay: Relay) -> None:
    first = publish("first")[1]
    follower = Follower(relay, "auto", WeightMirror())
    assert follower.advance()
    first.close()
    publish("second")
    assert follower.advance() and str(follower.mirror.version) == "second/0"


def test_a_run_ends_with_its_trainers_process_if_nobody_closed_the_publisher(
    publish: Publish, relay: Relay, embedded_url: str
) -> None:
    trainer = [sys.executable, "-c", FAILING_TRAINER, embedded_url]
    told = subprocess.run(trainer, capture_output=True, text=True, check=False)
    assert '"is_ended":false' in told.stdout, "a fork's end is not the run's"
    assert "the trainer fails" in told.stderr
    follower = Follower(relay, "auto", WeightMirror())
    assert follower.advance() and str(follower.mirror.version) == "first/0"
    publish("second")
    assert follower.advance() and str(follower.mirror.version) == "second/0"


def test_without_a_live_run_the_newest_one_is_followed(publish: Publish, relay: Relay) -> None:
    for run_id in ("first", "second"):
        publish(run_id)[1].close()
    follower = Follower(relay, "auto", WeightMirror())
    assert follower.advance() and str(follower.mirror.version) == "second/0"


def test_a_sign_is_live_when_it_changed_and_dead_when_it_stood_still() -> None:
    signs = WatchedSigns(lease_s=10.0)
    assert signs.is_dead("a", 0.0)
    signs.look({"a": 1, "b": 1}, 0.0)
    assert not signs.is_dead("a", 5.0) and not signs.is_live("a", 5.0)
    signs.look({"a": 2, "b": 1}, 5.0)
    assert signs.is_live("a", 15.0) and not signs.is_live("a", 15.1)
    assert signs.is_dead("b", 10.1)
    signs.look({}, 12.0)
    assert not signs.is_dead("a", 15.0), "a relay that came back empty ends no run"


def test_signs_that_are_gone_for_two_leases_are_forgotten() -> None:
    signs = WatchedSigns(lease_s=10.0)
    signs.look({"a": 1, "b": 1}, 0.0)
    signs.look({"b": 1}, 20.1)
    signs.look({"a": 2, "b": 2}, 20.2)
    assert signs.is_live("b", 20.2) and not signs.is_live("a", 20.2), "a is seen for the first time"
