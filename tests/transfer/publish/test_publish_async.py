"""A publish that goes on behind the trainer's next step."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from relay_process import StartRelay, stored
from slow_proxy import SlowProxy

from rose.errors import RelayError
from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.publish import bucket_encoder
from rose.transfer.publish.behind import Behind
from rose.transfer.publish.codec_choice import pack_for_link
from rose.transfer.publish.publisher import WeightPublisher
from rose.transfer.relay.opening import open_relay

CHUNK_S = 0.03


@pytest.fixture
def link(embedded_url: str) -> Iterator[SlowProxy]:
    """The trainer's link to the relay, fast at first."""
    with closing(SlowProxy(embedded_url, pause_s=0.0)) as proxy:
        yield proxy


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"layer{i}.weight": torch.randn(512, 512) for i in range(8)}


def change(weights: dict[str, torch.Tensor]) -> None:
    for tensor in weights.values():
        tensor.normal_()


def copy_of(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in weights.items()}


def check_holds(mirror: WeightMirror, weights: dict[str, torch.Tensor]) -> None:
    assert mirror.planes is not None
    held = {name: np.zeros(tensor.shape, np.uint16) for name, tensor in weights.items()}
    mirror.planes.read_into(held)
    for name, tensor in weights.items():
        expected = tensor.to(torch.bfloat16).view(torch.uint16)
        assert torch.from_numpy(held[name]).equal(expected), name


@pytest.mark.slow
def test_the_next_steps_may_change_the_weights_while_versions_are_sent(
    embedded_url: str, link: SlowProxy, weights: dict[str, torch.Tensor]
) -> None:
    publisher = WeightPublisher(weights, link.url, "run")
    with closing(publisher), closing(open_relay(embedded_url)) as relay:
        follower = Follower(relay, "run", WeightMirror())
        for number in range(3):
            change(weights)
            published = copy_of(weights)
            sent = publisher.publish_async()
            assert not sent.done()
            change(weights)
            report = sent.result()
            assert report.version.number == number and follower.advance()
            check_holds(follower.mirror, published)
            link.pause_s = CHUNK_S


def test_the_weights_are_free_before_anything_is_packed(
    embedded_url: str, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_pack = threading.Event()

    def pack_later(*arguments: Any) -> Any:
        may_pack.wait()
        return pack_for_link(*arguments)

    monkeypatch.setattr(bucket_encoder, "pack_for_link", pack_later)
    publisher = WeightPublisher(weights, embedded_url, "run", bucket_bytes=1 << 18)
    with closing(publisher), closing(open_relay(embedded_url)) as relay:
        follower = Follower(relay, "run", WeightMirror())
        publisher.publish()
        change(weights)
        published = copy_of(weights)
        sent = publisher.publish_async()
        change(weights)
        may_pack.set()
        assert sent.result().num_changed > 0 and follower.advance()
        check_holds(follower.mirror, published)


def test_a_version_that_could_not_be_sent_comes_with_the_next_one(
    start_relay: StartRelay, weights: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    url = start_relay("embedded").url
    publisher = WeightPublisher(weights, url, "run", full_wait_s=0)
    with closing(publisher), closing(open_relay(url)) as relay:
        follower = Follower(relay, "run", WeightMirror())
        publisher.publish()
        follower.advance()
        relay.put("filler", bytes(64 * 2**20 - sum(len(stored(relay, k)) for k in relay.keys("")) - 3000))
        change(weights)
        failed = publisher.publish_async()
        change(weights)
        with pytest.raises(RelayError, match="free of"):
            failed.result()
        relay.remove(["filler"])
        assert publisher.publish_async().result().version.number == 1
        assert "this one takes its place" in caplog.text
        follower.advance()
        check_holds(follower.mirror, weights)


def test_closing_waits_for_what_is_being_sent(link: SlowProxy, weights: dict[str, torch.Tensor]) -> None:
    publisher = WeightPublisher(weights, link.url, "run")
    link.pause_s = CHUNK_S
    sent = publisher.publish_async()
    assert not sent.done()
    publisher.close()
    assert sent.result().version.number == 0


def test_the_late_end_of_one_publish_never_says_that_the_next_one_has_read_the_weights() -> None:
    behind = Behind[None]("late")
    first = behind.run(lambda: time.sleep(0.05))  # its callback is added before it ends
    behind.settle()
    has_read: list[bool] = []

    def read() -> None:
        first._invoke_callbacks()  # type: ignore[attr-defined]  # as when its thread is slow to get there
        time.sleep(0.05)
        has_read.append(True)
        behind.has_read()

    behind.run(read)
    assert has_read
    behind.close()
