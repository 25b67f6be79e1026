"""A store gets frames from the store beside it, so that the writer sends them once."""

import os
import threading
from collections.abc import Callable, Iterator

import pytest
from relay_process import StartRelay

from rose.errors import RelayUnreachable
from rose.transfer.relay import replicated as replicated_relay
from rose.transfer.relay.nearby_copies import NearbyCopies
from rose.transfer.relay.opening import open_relay
from rose.transfer.relay.protocol import Relay
from rose.transfer.relay.url import add_beside, beside_of

FRAMES = {f"rose/run/1-0/{number}": os.urandom(1000 + number) for number in range(5)}
MANIFEST = "rose/run/1-0/MANIFEST"
OTHERS = ["rose/HEAD_RUN", "rose/run/HEAD", MANIFEST, "rose/run/1-0/PART1", "rose/run/ack/w"]


@pytest.fixture
def two(start_relay: StartRelay) -> Iterator[tuple[Relay, Relay]]:
    source, target = (open_relay(start_relay("embedded").url) for _ in range(2))
    yield source, target
    source.close()
    target.close()


@pytest.mark.slow
def test_only_frames_are_copied_because_they_are_never_replaced(two: tuple[Relay, Relay]) -> None:
    source, target = two
    copies = NearbyCopies(source, target)
    for key in (*FRAMES, *OTHERS):
        source.put(key, FRAMES.get(key, b"small"))
    target.put("rose/run/1-0/3", FRAMES["rose/run/1-0/3"])
    assert copies.step() == len(FRAMES) - 1
    assert target.keys("") == sorted(FRAMES) and all(target.get(key) == FRAMES[key] for key in FRAMES)
    assert copies.step() == 0
    # A frame that was removed from both relays is put again.
    for relay in two:
        relay.remove(["rose/run/1-0/2"])
    assert copies.step() == 0
    source.put("rose/run/1-0/2", b"another")
    assert copies.step() == 1 and target.get("rose/run/1-0/2") == b"another"


@pytest.mark.slow
def test_copying_continues_when_a_full_target_has_room_again(start_relay: StartRelay) -> None:
    source, target = (open_relay(start_relay("embedded", "--capacity-bytes", "10000").url) for _ in range(2))
    target.put("filler", bytes(9000))
    source.put("rose/run/1-0/0", bytes(5000))
    with NearbyCopies(source, target):
        target.remove(["filler"])
        seen = None
        while target.get("rose/run/1-0/0") is None:
            seen = target.wait(["rose/"], seen, 5.0).seen
    assert all(each.name != "rose-copies" for each in threading.enumerate())
    source.close()
    target.close()


@pytest.mark.mooncake
def test_a_mooncake_store_gets_frames_from_the_one_beside_it(start_relay: StartRelay) -> None:
    first = start_relay("mooncake")
    second = start_relay("mooncake", "--beside", first.url)
    assert beside_of(second.url) == first.url.split("//")[1].split("?")[0]
    alone, near = open_relay(first.url), open_relay(second.url)
    alone.put("rose/run/1-0/0", b"frame")
    seen = None
    while near.get("rose/run/1-0/0") is None:
        seen = near.wait(["rose/"], seen, 5.0).seen
    both = open_relay(f"{first.url},{second.url}")
    for key, data in list(FRAMES.items())[1:]:
        both.put(key, data)
    both.put(MANIFEST, b"manifest")
    for key, data in list(FRAMES.items())[1:]:
        assert alone.get(key) == near.get(key) == data
    both.upsert("rose/run/HEAD", b"head")
    assert alone.get("rose/run/HEAD") == near.get("rose/run/HEAD") == b"head"
    # The second store dies while a version is being written.
    both.put("rose/run/2-1/0", b"frame")
    second.kill()
    both.put("rose/run/2-1/MANIFEST", b"manifest")
    assert alone.get("rose/run/2-1/0") == b"frame" and alone.get("rose/run/2-1/MANIFEST") == b"manifest"
    for relay in (alone, near, both):
        relay.close()


@pytest.mark.mooncake
def test_frames_that_nobody_fetches_are_written_before_their_version_counts(
    start_relay: StartRelay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicated_relay, "MOST_OWED_BYTES", 2000)
    first, second = start_relay("mooncake"), start_relay("mooncake")
    # The second URL says that its store copies frames from the first, but nothing does so.
    both = open_relay(f"{first.url},{add_beside(second.url, first.url)}")
    near = open_relay(second.url)
    both.put("rose/run/1-0/9", b"of an attempt that is taken back")
    both.remove(["rose/run/1-0/9"])
    for key, data in FRAMES.items():
        both.put(key, data)
    # At most MOST_OWED_BYTES of the frames wait in the trainer's memory.
    assert len(near.keys("rose/run/1-0/")) > 2
    both.put(MANIFEST, b"manifest")
    assert near.keys("rose/run/1-0/") == sorted([*FRAMES, MANIFEST])
    assert all(near.get(key) == data for key, data in FRAMES.items())
    both.close()
    # Frames that only the first store had are not lost either.
    both = open_relay(f"{first.url},{add_beside(second.url, first.url)}")
    both.put("rose/run/2-1/0", b"frame")
    assert near.get("rose/run/2-1/0") is None
    alone = open_relay(first.url)
    first.kill()
    calls: list[Callable[[], object]] = [
        lambda: alone.put("a", b"a"),
        lambda: alone.get("a"),
        lambda: alone.remove(["a"]),
    ]
    for call in calls:
        with pytest.raises(RelayUnreachable):
            call()
    both.put("rose/run/2-1/MANIFEST", b"manifest")
    assert near.get("rose/run/2-1/0") == b"frame" and near.get("rose/run/2-1/MANIFEST") == b"manifest"
    for relay in (alone, near, both):
        relay.close()
