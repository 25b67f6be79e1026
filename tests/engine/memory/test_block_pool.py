"""vLLM's block pool on slabs: a block without memory is never handed out, whatever the order of calls."""

from collections.abc import Iterable, Sequence

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from block_pools import LAYOUT, NUM_POSITIONS, PINNED_SLAB, adopted_pool, cache
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_consumer import CacheView, really_cached
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from rose.engine.memory.block_pool import PINNED_POSITION, SlabBlockPool, position_of
from rose.memory.policy.spread import Spread


class PoolMachine(RuleBasedStateMachine):
    """Slabs come and go while requests take, share, cache and free blocks."""

    pool: SlabBlockPool

    @initialize(spread=st.sampled_from(Spread))
    def adopt(self, spread: Spread) -> None:
        self.pool = adopted_pool(spread)
        self.pool.listener = self
        if spread is Spread.DENSE:
            self.pool.eviction_order = self.idle
        self.view = CacheView()
        self.busy: set[int] = set()
        self.held: list[list[KVCacheBlock]] = []
        self.next_slab = 0

    # IdleListener: what it was told must match what is in use.

    def position_busy(self, position: int) -> None:
        assert position not in self.busy
        self.busy.add(position)

    def positions_idle(self, positions: Sequence[int]) -> None:
        assert len(set(positions)) == len(positions)
        self.busy -= set(positions)

    def position_cleared(self, position: int) -> None:
        assert not self.pool.is_caching(position)

    def positions_hit(self, positions: Iterable[int]) -> None:
        assert set(positions) <= self.busy

    def idle(self) -> list[int]:
        return [p for p in self.pool.backed_positions() if p not in self.busy and p != PINNED_POSITION]

    @precondition(lambda self: None in self.pool.slab_of)
    @rule(data=st.data())
    def back(self, data: st.DataObject) -> None:
        free = [position for position, slab in enumerate(self.pool.slab_of) if slab is None]
        self.pool.back(self.next_slab, data.draw(st.sampled_from(free)))
        self.next_slab += 1

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def unback(self, data: st.DataObject) -> None:
        position = data.draw(st.sampled_from(self.idle()))
        slab = self.pool.slab_of[position]
        assert self.pool.unback(position) == slab

    @rule(count=st.integers(1, 9), beside=st.none() | st.integers(0, NUM_POSITIONS - 1))
    def get_new_blocks(self, count: int, beside: int | None) -> None:
        self.pool.beside = beside
        if count > self.pool.get_num_free_blocks():
            with pytest.raises(ValueError, match=f"Cannot get {count} free blocks"):
                self.pool.get_new_blocks(count)
            return
        blocks = self.pool.get_new_blocks(count)
        for block in blocks:
            assert self.pool.slab_of[LAYOUT.position_of(block.block_id)] is not None
            assert block.block_id != 0
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), seed=st.integers(0, 3))
    def cache(self, data: st.DataObject, seed: int) -> None:
        blocks = data.draw(st.sampled_from(self.held))
        if all(block.block_hash is None for block in blocks):
            cache(self.pool, blocks, seed)

    @precondition(lambda self: self.pool.num_cached_blocks())
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        """Another request finds cached blocks, whether in use or only kept."""
        cached = [block for block in self.pool.blocks if block.block_hash is not None]
        blocks = data.draw(st.lists(st.sampled_from(cached), min_size=1, unique_by=id))
        assert all(self.pool.slab_of[LAYOUT.position_of(block.block_id)] is not None for block in blocks)
        self.pool.touch(blocks)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.pool.free_blocks(reversed(self.held.pop(index)))

    @precondition(lambda self: not self.held)
    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache()

    @invariant()
    def kv_events_say_what_is_cached(self) -> None:
        self.view.apply(self.pool.take_events())
        assert self.view.cached() == really_cached(self.pool)

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check_integrity()
        assert self.busy == {p for p, used in enumerate(self.pool.num_used) if used}
        in_use = {id(block) for blocks in self.held for block in blocks}
        assert self.pool.num_gpu_blocks - self.pool.get_num_free_blocks() == 1 + len(in_use)
        live = {b.block_id for b in self.pool.blocks if id(b) in in_use or b.block_hash is not None}
        assert self.pool.num_live_blocks() == len(live)
        holding = {LAYOUT.position_of(block_id) for block_id in live}
        assert self.pool.empty_positions() == [
            p for p in self.pool.backed_positions() if p not in holding and p != PINNED_POSITION
        ]


TestAnyOrderOfCalls = PoolMachine.TestCase
TestAnyOrderOfCalls.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("pinned_slab", range(4))
def test_every_slab_has_a_position_of_its_own_and_the_pinned_one_has_that_of_block_0(
    pinned_slab: int,
) -> None:
    assert sorted(position_of(slab, pinned_slab) for slab in range(4)) == list(range(4))
    assert position_of(pinned_slab, pinned_slab) == PINNED_POSITION


def test_only_the_pinned_position_is_backed_at_first() -> None:
    pool = adopted_pool()
    assert pool.slab_of == [PINNED_SLAB] + [None] * (NUM_POSITIONS - 1)
    assert pool.get_num_free_blocks() == LAYOUT.blocks_per_slab - 1  # block 0 is vLLM's padding
    pool.check_integrity()


def test_blocks_of_a_returned_slab_are_not_found_in_the_cache() -> None:
    pool = adopted_pool()
    position = 1
    pool.back(7, position)
    blocks = pool.get_new_blocks(pool.get_num_free_blocks())
    cache(pool, blocks, seed=0)
    pool.free_blocks(blocks)
    assert pool.is_caching(position)
    cached_before = pool.num_cached_blocks()
    assert pool.unback(position) == 7
    assert pool.num_cached_blocks() == cached_before - LAYOUT.blocks_per_slab
    assert not pool.is_caching(position)


def test_a_position_in_use_is_never_taken() -> None:
    pool = adopted_pool()
    position = 1
    pool.back(7, position)
    pool.get_new_blocks(pool.get_num_free_blocks())
    with pytest.raises(AssertionError):
        pool.unback(position)


def test_vllms_own_cache_reset_succeeds_with_parked_blocks() -> None:
    pool = adopted_pool()
    pool.back(7, 1)
    blocks = pool.get_new_blocks(5)
    cache(pool, blocks, seed=0)
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert pool.num_cached_blocks() == 0
    pool.check_integrity()


def positions_of(blocks: list[KVCacheBlock]) -> list[int]:
    return [LAYOUT.position_of(block.block_id) for block in blocks]


def test_affine_placement_keeps_two_requests_in_slabs_of_their_own() -> None:
    pool = adopted_pool(Spread.AFFINE)
    for position in (1, 2, 3):
        pool.back(7, position)
    first = pool.get_new_blocks(2)
    second = pool.get_new_blocks(2)
    pool.beside = positions_of(first)[-1]
    first += pool.get_new_blocks(2)
    pool.beside = positions_of(second)[-1]
    second += pool.get_new_blocks(2)
    assert not set(positions_of(first)) & set(positions_of(second))
    assert len(set(positions_of(second))) == 1


def test_dense_placement_leaves_whole_slabs_to_give_back() -> None:
    pool = adopted_pool(Spread.DENSE)
    for position in (1, 2, 3):
        pool.back(7, position)
    pool.get_new_blocks(3)  # what the pinned slab has beside block 0
    gone = pool.get_new_blocks(3)
    stays = pool.get_new_blocks(3)
    assert pool.num_positions_in_use() == 3
    pool.free_blocks(gone)
    assert set(positions_of(pool.get_new_blocks(2))) == {positions_of(stays)[-1]}


def test_prefix_cache_is_evicted_last() -> None:
    pool = adopted_pool(Spread.AFFINE)
    pool.back(7, 1)
    cached = pool.get_new_blocks(4)
    cache(pool, cached, seed=0)
    pool.free_blocks(cached)
    fresh = pool.get_new_blocks(pool.get_num_free_blocks() - 4)
    assert all(block.block_hash is not None for block in cached)
    pool.get_new_blocks(1)
    assert sum(block.block_hash is None for block in cached) == 1
    assert len({id(block) for block in fresh}) == len(fresh)
    pool.check_integrity()


def test_evicted_cache_goes_by_whole_slabs_in_the_order_given() -> None:
    pool = adopted_pool(Spread.DENSE)
    positions = [1, 2, 3]
    for position in positions:
        pool.back(7 + position, position)
    pool.get_new_blocks(3)  # what the pinned slab has beside block 0
    for seed, position in enumerate(positions):
        blocks = pool.get_new_blocks(4)
        assert set(positions_of(blocks)) == {position}
        cache(pool, blocks, seed=1000 * seed)
        pool.free_blocks(reversed(blocks))
    pool.eviction_order = lambda: [positions[1], positions[2], positions[0]]
    assert set(positions_of(pool.get_new_blocks(1))) == {positions[1]}
    assert not pool.is_caching(positions[1])
    # The rest of that slab comes first, and the others keep all of theirs until it is used up.
    assert set(positions_of(pool.get_new_blocks(3))) == {positions[1]}
    assert pool.num_hashed[positions[2]] == pool.num_hashed[positions[0]] == 4
    assert set(positions_of(pool.get_new_blocks(4))) == {positions[2]}
    pool.check_integrity()
