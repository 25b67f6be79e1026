"""A version's frames reach the relay, all of them once, whatever the relay has room for at the moment."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count

import numpy as np
from relay_process import stored

from rose.errors import RelayFull
from rose.transfer.format import manifest as keys
from rose.transfer.format.frame import Frame
from rose.transfer.format.layout import Layout, TensorSpec
from rose.transfer.format.state_hash import StateHash
from rose.transfer.publish.version_writer import VersionWriter
from rose.transfer.relay.protocol import Relay

FRAMES = 6
FRAME_ELEMENTS = 1 << 19
BLOCK_BYTES = 1_100_000
"""More than a frame takes."""
ROOM = 3


def fill(relay: Relay) -> list[str]:
    """Puts blocks until no further one has room, and returns their keys."""
    names: list[str] = []
    for number in count():
        try:
            relay.put(f"filler/{number}", os.urandom(BLOCK_BYTES))
        except RelayFull:
            return names
        names.append(f"filler/{number}")
    raise AssertionError


def test_the_rest_of_a_batch_is_put_when_a_relay_with_room_for_a_part_of_it_has_room_again(
    relay: Relay,
) -> None:
    specs = [TensorSpec(name="w", dtype="BF16", shape=(2 * FRAMES, FRAME_ELEMENTS))]
    layout = Layout(specs, bucket_bytes=2 * FRAME_ELEMENTS)
    buckets = [bucket for bucket in layout.buckets if bucket.num_elements == FRAME_ELEMENTS][:FRAMES]
    weights = np.random.default_rng(0).integers(0, 65536, (FRAMES, FRAME_ELEMENTS), np.uint16)
    blocks = fill(relay)
    relay.remove(blocks[:ROOM])
    prefix = keys.version_prefix("run", 0, None)
    arrived: list[int] = []

    def make_room() -> None:
        arrived.append(len(relay.keys(prefix)))
        relay.remove(blocks)

    may_put = threading.Event()
    with ThreadPoolExecutor(1) as executor, ExitStack() as undo:
        undo.callback(may_put.set)  # the executor waits for its thread also if the test fails
        executor.submit(may_put.wait)
        writer = VersionWriter(
            relay,
            executor,
            "run",
            layout,
            0,
            None,
            written=[],
            make_room=make_room,
            full_wait_s=300.0,
            signer=None,
        )
        for bucket, bits in zip(buckets, weights, strict=True):
            writer.put_dense(bucket, bits, StateHash())
        may_put.set()
        entries = writer.finish_frames()
    assert len(arrived) == 1 and ROOM <= arrived[0] < FRAMES
    assert relay.keys("") == sorted(entry.key for entry in entries)
    for entry, bits in zip(entries, weights, strict=True):
        assert Frame.unpack(stored(relay, entry.key)).payload == bits.tobytes()
