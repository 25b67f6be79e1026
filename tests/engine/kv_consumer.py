"""A consumer of vLLM's KV events: what a KV-aware router knows of an engine's prefix cache."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import zmq
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, maybe_convert_block_hash

from rose.ports import free_port

CacheKey = tuple[int | None, Any]
"""(cache group, hash)"""


class CacheView:
    """What is cached, by the events alone."""

    def __init__(self) -> None:
        self._blocks: Counter[CacheKey] = Counter()
        """Blocks that hold it: equal prompts at once make several of one hash."""
        self.num_events: Counter[type] = Counter()

    def apply(self, events: Iterable[BlockStored | BlockRemoved | AllBlocksCleared]) -> None:
        for event in events:
            self.num_events[type(event)] += 1
            if isinstance(event, AllBlocksCleared):
                self._blocks.clear()
                continue
            for block_hash in event.block_hashes:
                key = (event.group_idx, block_hash)
                self._blocks[key] += 1 if isinstance(event, BlockStored) else -1
                assert self._blocks[key] >= 0, f"removed but never stored: {key}"

    def cached(self) -> set[CacheKey]:
        return {key for key, count in self._blocks.items() if count}


class KVConsumer:
    """A context manager: asks vLLM's publisher on loopback for the batches that it hasn't seen.

    By the replay port, as a subscriber misses what is published before its subscription has arrived.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        replay = f"tcp://127.0.0.1:{free_port()}"
        self._socket.connect(replay)
        self.config = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=f"tcp://127.0.0.1:{free_port()}",
            replay_endpoint=replay,
        )
        self._decoder = msgspec.msgpack.Decoder(type=KVEventBatch)
        self._next_seq = 0
        self.view = CacheView()

    def cached(self) -> set[CacheKey]:
        """What the events so far say is cached. Raises AssertionError where a batch is missing."""
        self._socket.send_multipart((b"", self._next_seq.to_bytes(8, "big")))
        while True:
            assert self._socket.poll(300_000), "the publisher does not answer"
            _, _, seq, payload = self._socket.recv_multipart()
            if seq == ZmqEventPublisher.END_SEQ:
                return self.view.cached()
            assert int.from_bytes(seq, "big") == self._next_seq
            self._next_seq += 1
            self.view.apply(self._decoder.decode(payload).events)

    def __enter__(self) -> "KVConsumer":
        return self

    def __exit__(self, *_: Any) -> None:
        self._socket.close(linger=0)
        self._context.term()


def really_cached(pool: BlockPool) -> set[CacheKey]:
    """What prefix cache can be found in, from the block pool itself."""
    keys = pool.cached_block_hash_to_block._cache
    return {(get_group_id(key), maybe_convert_block_hash(get_block_hash(key))) for key in keys}
