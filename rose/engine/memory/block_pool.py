"""vLLM's block pool, restricted to the blocks that a slab backs right now.

Owns which positions of the address range are backed, how many of each position's blocks are in use or hold
prefix cache, and which position a new block comes from. Promises that a block without memory is never handed
out: it is *parked*, that is out of the free queue and with a reference that nobody drops. Never maps memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.request import Request

from rose.memory.policy.spread import Spread, preferred_positions
from rose.memory.slabs.layout import SlabLayout

PINNED_POSITION = 0
"""The position of block 0. vLLM uses that block for padding, so the position always has a slab."""


def position_of(slab: int, pinned_slab: int) -> int:
    """Returns the one position at which an engine ever maps a slab: that of its own number, but the pinned
    slab and slab 0 change places. So a block id means the same bytes for as long as the engine lives."""
    return {pinned_slab: PINNED_POSITION, 0: pinned_slab}.get(slab, slab)


class IdleListener(Protocol):
    """Is told when the last block of a position falls idle, when an idle position is used again, when a
    request finds its prefix in the cache, and when a position has no cache any more."""

    def positions_idle(self, positions: Sequence[int]) -> None:
        """Their last blocks were freed together, in this order: the end of a context first."""

    def position_busy(self, position: int) -> None: ...
    def positions_hit(self, positions: Iterable[int]) -> None: ...
    def position_cleared(self, position: int) -> None: ...


class SlabBlockPool(BlockPool):
    """A ``BlockPool`` whose blocks come and go with slabs. Only :meth:`adopt` makes one."""

    layout: SlabLayout
    spread: Spread
    beside: int | None
    """The position of the last block of the request that is about to get blocks, if it has any."""
    slab_of: list[int | None]
    """The slab at each position, None where there is none."""
    num_used: npt.NDArray[np.int32]
    num_hashed: npt.NDArray[np.int32]
    """The number of blocks at each position that hold prefix cache, in use or not."""
    hashed_end_tokens: npt.NDArray[np.int64]
    """The sum over those blocks of the tokens of their contexts up to each block's end."""
    num_spare: npt.NDArray[np.int32]
    """The number of blocks at each position that nobody uses and that hold no prefix cache."""
    num_free_cached: int
    """The number of blocks that nobody uses and that hold prefix cache."""
    listener: IdleListener | None
    eviction_order: Callable[[], Iterable[int]] | None
    """The idle positions in the order in which they lose their cache to new blocks; None for vLLM's own
    order, which is of blocks and strews a request's over many slabs."""

    @classmethod
    def adopt(
        cls,
        pool: BlockPool,
        layout: SlabLayout,
        num_positions: int,
        pinned_slab: int,
        spread: Spread = Spread.DENSE,
    ) -> SlabBlockPool:
        """Turns vLLM's new pool into one in which only the pinned position is backed.

        It changes the class of the existing object, because vLLM's coordinator and its per-type managers
        already hold references to it.
        """
        pool.__class__ = cls
        assert isinstance(pool, cls)
        pool.layout = layout
        pool.spread = spread
        pool.beside = None
        pool.slab_of = [None] * num_positions
        pool.num_used = np.zeros(num_positions, dtype=np.int32)
        pool.num_hashed = np.zeros(num_positions, dtype=np.int32)
        pool.hashed_end_tokens = np.zeros(num_positions, dtype=np.int64)
        pool.num_spare = np.zeros(num_positions, dtype=np.int32)
        pool.num_free_cached = 0
        pool.listener = None
        pool.eviction_order = None
        # Ids in the gaps between positions name no block. They share one object; large pools have millions.
        gap = KVCacheBlock(-1, ref_cnt=1, pool=pool)
        for block in list(pool.blocks):
            if not block.is_null:
                pool.free_block_queue.remove(block)
                block.ref_cnt = 1
            if not layout.is_valid(block.block_id):
                pool.blocks[block.block_id] = gap
        pool.num_gpu_blocks = 1
        pool._unpark(PINNED_POSITION, pinned_slab)
        return pool

    # Positions ---------------------------------------------------------------------------------

    def back(self, slab: int, position: int) -> None:
        """Puts ``slab`` at a free position."""
        assert self.slab_of[position] is None, (position, self.slab_of[position])
        self._unpark(position, slab)

    def unback(self, position: int) -> int:
        """Takes the blocks of an idle position out of use, with what they cache; returns the slab there."""
        slab = self.slab_of[position]
        assert slab is not None and position != PINNED_POSITION and self.num_used[position] == 0
        blocks = self.blocks_at(position)
        for block in blocks:
            self._maybe_evict_cached_block(block)
            self.free_block_queue.remove(block)
            block.ref_cnt = 1
        self.num_spare[position] = 0
        self.slab_of[position] = None
        self.num_gpu_blocks -= len(blocks)
        return slab

    def blocks_at(self, position: int) -> list[KVCacheBlock]:
        ids = self.layout.block_ids(position)
        return [self.blocks[i] for i in ids if not self.blocks[i].is_null]

    def backed_positions(self) -> list[int]:
        return [p for p, slab in enumerate(self.slab_of) if slab is not None]

    def num_positions_in_use(self) -> int:
        return int(np.count_nonzero(self.num_used))

    def num_cached_blocks(self) -> int:
        return len(self.cached_block_hash_to_block)

    def num_live_blocks(self) -> int:
        """Returns the number of blocks that are in use or hold prefix cache."""
        return int(self.num_used.sum()) + self.num_free_cached

    def is_caching(self, position: int) -> bool:
        return bool(self.num_hashed[position])

    def empty_positions(self) -> list[int]:
        """Returns the backed positions without used or cached blocks, ascending, but the pinned one."""
        # The pinned position never has all its blocks to spare: block 0 is vLLM's.
        empty: list[int] = np.flatnonzero(self.num_spare == self.layout.blocks_per_slab).tolist()
        return empty

    def _unpark(self, position: int, slab: int) -> None:
        blocks = self.blocks_at(position)
        for block in blocks:
            assert block.ref_cnt == 1 and block.block_hash is None
            block.ref_cnt = 0
        self.free_block_queue.append_n(blocks)
        self.num_spare[position] = len(blocks)
        self.slab_of[position] = slab
        self.num_gpu_blocks += len(blocks)

    # Where blocks come from -------------------------------------------------------------------------

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        if num_blocks <= self.get_num_free_blocks():
            self._bring_forward(num_blocks)
        blocks = super().get_new_blocks(num_blocks)
        self._count_used(blocks)
        return blocks

    def _bring_forward(self, num_blocks: int) -> None:
        """Moves the blocks that the spread prefers to the head of the free queue, where vLLM takes blocks.

        Free blocks without cache come first, then the slabs of the eviction order. If these don't suffice,
        vLLM's own order decides which cache is evicted.
        """
        positions = preferred_positions(
            self.spread,
            num_spare=self.num_spare,
            num_used=self.num_used,
            num_hashed=self.num_hashed,
            beside=self.beside,
        )
        spare = (block for position in positions for block in self._spare_blocks(position))
        chosen = list(islice(spare, num_blocks))
        if len(chosen) < num_blocks and self.eviction_order is not None:
            chosen += self._evict_slabs(self.eviction_order(), num_blocks - len(chosen))
        for block in chosen:
            self.free_block_queue.remove(block)
        self.free_block_queue.prepend_n(chosen)

    def _evict_slabs(self, positions: Iterable[int], num_blocks: int) -> list[KVCacheBlock]:
        """Drops the cache of idle slabs, each as a whole, until they yield ``num_blocks`` blocks or end."""
        evicted: list[KVCacheBlock] = []
        for position in positions:
            if len(evicted) >= num_blocks:
                break
            if not self.num_hashed[position]:
                continue
            for block in self.blocks_at(position):
                if block.block_hash is not None:
                    self._maybe_evict_cached_block(block)
                    evicted.append(block)
        return evicted[:num_blocks]

    def _spare_blocks(self, position: int) -> list[KVCacheBlock]:
        return [b for b in self.blocks_at(position) if b.ref_cnt == 0 and b.block_hash is None]

    # Cache counts: every way in which a block's prefix cache comes and goes ---------------------------

    def _insert_block_hash(
        self, block_hash_with_group_id: BlockHashWithGroupId, block: KVCacheBlock, num_tokens: int | None
    ) -> None:
        was_hashed = block.block_hash is not None
        super()._insert_block_hash(block_hash_with_group_id, block, num_tokens)
        if not was_hashed and block.block_hash is not None:
            position = self.layout.position_of(block.block_id)
            self.num_hashed[position] += 1
            self.hashed_end_tokens[position] += block.block_hash_num_tokens or 0
            if block.ref_cnt == 0:
                self.num_free_cached += 1
                self.num_spare[position] -= 1

    def _remove_cached_block_hashes(self, block: KVCacheBlock) -> list[BlockHashWithGroupId]:
        was_hashed, end_tokens = block.block_hash is not None, block.block_hash_num_tokens or 0
        removed = super()._remove_cached_block_hashes(block)
        if was_hashed and block.block_hash is None:
            position = self.layout.position_of(block.block_id)
            self.num_hashed[position] -= 1
            self.hashed_end_tokens[position] -= end_tokens
            if block.ref_cnt == 0:
                self.num_free_cached -= 1
                self.num_spare[position] += 1
            if self.num_hashed[position] == 0 and self.listener is not None:
                self.listener.position_cleared(position)
        return removed

    def reset_prefix_cache(self) -> bool:
        is_done = super().reset_prefix_cache()
        if is_done:
            self.num_spare += self.num_hashed  # no block is in use
            self.num_hashed[:] = 0
            self.hashed_end_tokens[:] = 0
            self.num_free_cached = 0
        return is_done

    # Use counts: every way in which a block gains its first or loses its last reference ----------

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._count_used([block for block in blocks if block.ref_cnt == 0 and not block.is_null])
        super().touch(blocks)
        if self.listener is not None:
            found = (self.layout.position_of(block.block_id) for block in blocks if not block.is_null)
            self.listener.positions_hit(dict.fromkeys(found))

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        blocks = list(ordered_blocks)
        super().free_blocks(blocks)
        # One that several requests have just copied is in the list once for each of them.
        idle = [
            position
            for block in {block.block_id: block for block in blocks}.values()
            if block.ref_cnt == 0 and not block.is_null and (position := self._count_idle(block)) is not None
        ]
        if idle and self.listener is not None:
            self.listener.positions_idle(idle)

    def _count_used(self, blocks: Iterable[KVCacheBlock]) -> None:
        for block in blocks:
            position = self.layout.position_of(block.block_id)
            self.num_used[position] += 1
            self._count_free(block, position, -1)
            if self.num_used[position] == 1 and self.listener is not None:
                self.listener.position_busy(position)

    def _count_idle(self, block: KVCacheBlock) -> int | None:
        """Returns the position if this was its last block in use."""
        position = self.layout.position_of(block.block_id)
        self.num_used[position] -= 1
        self._count_free(block, position, 1)
        return position if self.num_used[position] == 0 else None

    def _count_free(self, block: KVCacheBlock, position: int, change: int) -> None:
        if block.block_hash is not None:
            self.num_free_cached += change
        else:
            self.num_spare[position] += change

    def check_integrity(self) -> None:
        """Raises AssertionError if the counts disagree with the blocks."""
        num_backed, num_free_cached = 1, 0
        for position, slab in enumerate(self.slab_of):
            blocks = self.blocks_at(position)
            assert self.num_spare[position] == len(self._spare_blocks(position)), position
            if slab is None:
                assert all(b.ref_cnt == 1 and b.block_hash is None for b in blocks), position
                continue
            num_backed += len(blocks)
            num_free_cached += sum(b.ref_cnt == 0 and b.block_hash is not None for b in blocks)
            assert self.num_used[position] == sum(b.ref_cnt > 0 for b in blocks), position
            hashed = [b.block_hash_num_tokens or 0 for b in blocks if b.block_hash is not None]
            assert self.num_hashed[position] == len(hashed), position
            assert self.hashed_end_tokens[position] == sum(hashed), position
        assert num_backed == self.num_gpu_blocks, (num_backed, self.num_gpu_blocks)
        assert num_free_cached == self.num_free_cached, (num_free_cached, self.num_free_cached)


class SlabKVCacheManager(KVCacheManager):
    """A ``KVCacheManager`` that tells its block pool whose blocks it is about to ask for."""

    watermark: float
    """The share of the engine's blocks that stays free when a waiting request gets blocks."""

    @classmethod
    def adopt(cls, manager: KVCacheManager, watermark: float) -> None:
        """Changes the class of the existing object, which the scheduler and KV connectors refer to."""
        manager.__class__ = cls
        assert isinstance(manager, cls)
        manager.watermark = watermark

    def allocate_slots(self, request: Request, *args: Any, **kwargs: Any) -> KVCacheBlocks | None:
        pool = self.block_pool
        assert isinstance(pool, SlabBlockPool)
        pool.beside = self._last_position(request.request_id, pool.layout)
        # vLLM has counted the blocks of the whole address range.
        self.watermark_blocks = int(self.watermark * pool.num_gpu_blocks)
        return super().allocate_slots(request, *args, **kwargs)

    def _last_position(self, request_id: str, layout: SlabLayout) -> int | None:
        for manager in self.coordinator.single_type_managers:
            held = manager.req_to_blocks.get(request_id)
            if held and not held[-1].is_null:
                return layout.position_of(held[-1].block_id)
        return None
