"""vLLM's block pool, restricted to the blocks that a slab backs right now.

Owns which positions of the address range are backed, and how many of each position's blocks are in use.
Promises that a block without memory is never handed out: it is *parked* (out of the free queue, with a
reference that nobody drops). Never maps memory: it returns the operations for the workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from rose.memory.layout import SlabLayout

PINNED_POSITION = 0
"""Holds block 0, which vLLM uses for padding, so it stays backed for the engine's life."""


class IdleListener(Protocol):
    """Told when the last block of a position falls idle and when an idle position is used again."""

    def position_idle(self, position: int) -> None: ...
    def position_busy(self, position: int) -> None: ...


class SlabBlockPool(BlockPool):
    """A ``BlockPool`` whose blocks come and go with slabs. Made by :meth:`adopt`, never constructed."""

    layout: SlabLayout
    slab_of: list[int | None]
    num_used: list[int]
    listener: IdleListener | None

    @classmethod
    def adopt(
        cls, pool: BlockPool, layout: SlabLayout, num_positions: int, pinned_slab: int
    ) -> SlabBlockPool:
        """Turn vLLM's freshly made pool into one with only the pinned position backed.

        The class of the existing object is changed instead of making a second pool, because vLLM's
        coordinator and its per-type managers already hold references to it.
        """
        pool.__class__ = cls
        assert isinstance(pool, cls)
        pool.layout = layout
        pool.slab_of = [None] * num_positions
        pool.num_used = [0] * num_positions
        pool.listener = None
        for block in pool.blocks:
            if not block.is_null:
                pool.free_block_queue.remove(block)
                block.ref_cnt = 1
        pool.num_gpu_blocks = 1
        pool._unpark(PINNED_POSITION, pinned_slab)
        return pool

    # Positions ---------------------------------------------------------------------------------

    def back(self, slab: int) -> int:
        """Give the lowest free position the memory of ``slab``; return the position."""
        position = self.slab_of.index(None)
        self._unpark(position, slab)
        return position

    def unback(self, position: int) -> int:
        """Take an idle position's blocks out of use, forgetting what they cached; return its slab."""
        slab = self.slab_of[position]
        assert slab is not None and position != PINNED_POSITION and self.num_used[position] == 0
        blocks = self.blocks_at(position)
        for block in blocks:
            self._maybe_evict_cached_block(block)
            self.free_block_queue.remove(block)
            block.ref_cnt = 1
        self.slab_of[position] = None
        self.num_gpu_blocks -= len(blocks)
        return slab

    def blocks_at(self, position: int) -> list[KVCacheBlock]:
        ids = self.layout.block_ids(position)
        return [self.blocks[i] for i in ids if not self.blocks[i].is_null]

    def backed_positions(self) -> list[int]:
        return [p for p, slab in enumerate(self.slab_of) if slab is not None]

    def num_positions_in_use(self) -> int:
        return sum(1 for used in self.num_used if used)

    def num_cached_blocks(self) -> int:
        return len(self.cached_block_hash_to_block)

    def is_caching(self, position: int) -> bool:
        return any(block.block_hash is not None for block in self.blocks_at(position))

    def _unpark(self, position: int, slab: int) -> None:
        blocks = self.blocks_at(position)
        for block in blocks:
            assert block.ref_cnt == 1 and block.block_hash is None
            block.ref_cnt = 0
        self.free_block_queue.append_n(blocks)
        self.slab_of[position] = slab
        self.num_gpu_blocks += len(blocks)

    # Use counts: every way a block starts or stops being referenced ------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        blocks = super().get_new_blocks(num_blocks)
        self._count_used(blocks)
        return blocks

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._count_used([block for block in blocks if block.ref_cnt == 0 and not block.is_null])
        super().touch(blocks)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(ordered_blocks)
        super().free_blocks(blocks)
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self._count_idle(block)

    def _count_used(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            position = self.layout.position_of(block.block_id)
            self.num_used[position] += 1
            if self.num_used[position] == 1 and self.listener is not None:
                self.listener.position_busy(position)

    def _count_idle(self, block: KVCacheBlock) -> None:
        position = self.layout.position_of(block.block_id)
        self.num_used[position] -= 1
        if self.num_used[position] == 0 and self.listener is not None:
            self.listener.position_idle(position)

    def check_integrity(self) -> None:
        """Raise AssertionError where counts and blocks disagree. For tests and idle engines."""
        num_backed = 1
        for position, slab in enumerate(self.slab_of):
            blocks = self.blocks_at(position)
            if slab is None:
                assert all(b.ref_cnt == 1 and b.block_hash is None for b in blocks), position
                continue
            num_backed += len(blocks)
            assert self.num_used[position] == sum(b.ref_cnt > 0 for b in blocks), position
        assert num_backed == self.num_gpu_blocks, (num_backed, self.num_gpu_blocks)
