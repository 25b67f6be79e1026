"""An engine's tenancy in the slab pool, as its scheduler sees it.

Owns the engine's block pool and the slab operations that wait for the next step. Promises that a slab is
acquired in the ledger before one of its blocks is handed out, and that the workers unmap it before it goes
back. Never decides which slabs to take or to give back: the policies do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from rose.engine.memory.block_pool import PINNED_POSITION, SlabBlockPool, SlabKVCacheManager, position_of
from rose.engine.memory.connector_holds import ConnectorHolds
from rose.engine.memory.kv_layout import BlockSize, place_on_slabs
from rose.engine.memory.kv_range import SlabOps, pinned_slab
from rose.engine.memory.states import is_about_to_copy, most_new_states, speculative_states
from rose.engine.memory.step_fence import StepFence
from rose.memory.policy.cached import CacheTable, recompute_cost
from rose.memory.policy.leases import LeaseTable
from rose.memory.policy.spread import Spread
from rose.memory.policy.victims import PositionUse
from rose.memory.pool.pool import PoolClient
from rose.memory.pool.wire import Kind
from rose.types import Role

MAX_LOOKUP_BLOCKS = 2048
"""The prefixes of waiting requests are looked up until these have that many block hashes together; of the
others the same share counts as cached. A long queue must not cost milliseconds in every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """How many slabs an engine lacks for its next steps."""

    keeping_cache: int
    """If none of its prefix cache is evicted."""
    evicting_cache: int
    """If all of it is, but what the requests themselves hit."""
    hit_positions: frozenset[int]
    """The idle positions that waiting requests hit."""
    from_uncached: int
    """The slabs' worth of free blocks without cache that the next steps will take."""


class Tenant:
    """One engine in one pool. Runs in the engine core's thread alone."""

    def __init__(
        self,
        name: str,
        config: KVCacheConfig,
        *,
        role: Role,
        engine_id: str,
        world_size: int,
        block: BlockSize | None = None,
        lease_s: float | None = None,
    ) -> None:
        """Attaches to the pool and rewrites ``config`` in place; ``block`` is the largest one of all ranks.
        A serving engine has no leases: its ``lease_s`` is None, and its cache stays until rollouts want the
        memory."""
        self.client = PoolClient.attach(
            name, role=role, engine_id=engine_id, kind=Kind.SCHEDULER, world_size=world_size
        )
        self.ledger = self.client.ledger
        self.layout = place_on_slabs(
            config, slab_bytes=self.client.slab_bytes, num_positions=self.client.num_slabs, block=block
        )
        self.leases = LeaseTable(lease_s) if lease_s is not None else None
        self.cache = CacheTable()
        self.holds: ConnectorHolds | None = None
        """What a KV connector may still use; None without one."""
        self.fence = StepFence()
        self.outlives_output = False
        """Whether the device may use a slab behind the output of the last step that knew it: a drafter or a
        KV connector does."""
        self._world_size = world_size
        self._ops = SlabOps()
        self._pool: SlabBlockPool | None = None

    def adopt(self, manager: KVCacheManager, num_draft_slots: int = 0, watermark: float = 0.0) -> None:
        """Takes over vLLM's block pool. Call once, right after the scheduler was made.

        ``num_draft_slots``: how far a step may write behind a request's last token: its draft tokens, and the
        drafter's lookahead. ``watermark``: the share of the engine's blocks that stays free when a waiting
        request gets blocks beside others.
        """
        self._watermark = watermark
        self._num_slots_ahead = num_draft_slots + 1
        self._max_model_len = manager.max_model_len
        SlabKVCacheManager.adopt(manager, watermark)
        self._coordinator = manager.coordinator
        self._groups = manager.coordinator.single_type_managers
        self._pinned_slab = pinned_slab(self.client, acquire=False)
        self._pool = SlabBlockPool.adopt(
            manager.block_pool,
            self.layout,
            self.client.num_slabs,
            self._pinned_slab,
            Spread.DENSE if self.leases is None else Spread.AFFINE,
        )
        self._pool.listener = self
        if self.leases is None:
            self._pool.eviction_order = self.cache.oldest

    @property
    def pool(self) -> SlabBlockPool:
        assert self._pool is not None, "adopt() comes first"
        return self._pool

    @property
    def num_owned(self) -> int:
        return self.ledger.num_owned(self.client.slot)

    @property
    def has_unmaps(self) -> bool:
        """Whether slabs can be unmapped, which others may need. Slabs to map wait for a step."""
        return self.fence.has_passed

    def take_ops(self, *, uses_memory: bool) -> SlabOps:
        """Returns the operations for the pass that was just scheduled, and forgets them.

        A pass that does not use new memory maps none: zeroing computes on the GPU, where such a pass of a
        rollout engine has no grant.
        """
        ops, self._ops = self._ops, SlabOps()
        ops.unmap, ops.waits = self.fence.take_passed(), self.outlives_output
        if not uses_memory:
            ops.map, self._ops.map = [], ops.map
        return ops

    def slabs_for(self, num_blocks: int) -> int:
        return math.ceil(num_blocks / self.layout.blocks_per_slab)

    def blocks_wanted(self, running: Sequence[Request], waiting: Sequence[Request]) -> int:
        """Returns how many blocks the next steps need beyond those that the requests hold.

        That is one more for each running request that is about to fill its last block, with the tokens of
        steps in flight and its drafts, and the whole prompt of each waiting one, prefix hits included. Every
        cache group counts; a sliding window counts as if it kept all its tokens. So do the free blocks that
        the watermark demands.
        """
        requests = [*running, *waiting]
        wanted = 0
        for group in self._groups:
            held, most_new, extra = group.req_to_blocks, most_new_states(group), speculative_states(group)
            for request in requests:
                have = len(held.get(request.request_id, ()))
                num_tokens = request.num_tokens + request.num_output_placeholders + self._num_slots_ahead
                num_tokens = min(num_tokens, self._max_model_len)
                new = max(0, math.ceil(num_tokens / group.block_size) + extra - have)
                wanted += min(new, most_new) + is_about_to_copy(group, request)
        if not (running and waiting):
            return wanted
        num_used = int(self.pool.num_used.sum())
        return math.ceil((wanted + self._watermark * num_used) / (1 - self._watermark))

    def fits_alone(self, request: Request) -> bool:
        """Returns whether the engine's slabs hold a waiting request as soon as other requests have left
        them."""
        return self.blocks_wanted((), [request]) < self.pool.num_gpu_blocks  # one of them is the null block

    def slabs_of_longest(self, requests: Sequence[Request]) -> int:
        """Returns how many slabs the request with the most tokens needs to go on alone; 0 without one."""
        longest = max(requests, key=lambda request: request.num_tokens, default=None)
        if longest is None:
            return 0
        held = sum(len(group.req_to_blocks.get(longest.request_id, ())) for group in self._groups)
        return self.slabs_for(held + self.blocks_wanted((), [longest]) + 1)  # and the null block

    def missing_slabs(self, num_blocks: int) -> int:
        """Returns how many slabs to add so that ``num_blocks`` fit without evicting prefix cache."""
        if num_blocks == 0:
            return 0
        free = self.pool.get_num_free_blocks()
        if free >= num_blocks:
            free -= self.pool.num_free_cached
        return self.slabs_for(max(0, num_blocks - free))

    def shortage(self, running: Sequence[Request], waiting: Sequence[Request]) -> Shortage:
        """Returns how many slabs the next steps lack. Prefixes that are cached need no new blocks."""
        pool = self.pool
        num_hits, free_hits = self._hits(waiting)
        wanted = self.blocks_wanted(running, waiting) - num_hits
        free = pool.get_num_free_blocks()
        uncached = free - pool.num_free_cached
        positions = {self.layout.position_of(block_id) for block_id in free_hits}
        return Shortage(
            keeping_cache=self.slabs_for(max(0, wanted - uncached)),
            evicting_cache=self.slabs_for(max(0, wanted - (free - len(free_hits)))),
            hit_positions=frozenset(position for position in positions if pool.num_used[position] == 0),
            from_uncached=self.slabs_for(max(0, min(wanted, uncached))),
        )

    def _hits(self, waiting: Sequence[Request]) -> tuple[int, set[int]]:
        """Returns how many blocks the waiting requests hit, and the ids of those hit that nobody uses.

        The number is extrapolated from the requests that are looked up, and the ids are of these alone.
        """
        readers = [request for request in waiting if self._reads_cache(request)]
        hits: list[KVCacheBlock] = []
        num_hits = num_looked_up = num_hashes = 0
        for request in readers:
            if num_hashes >= MAX_LOOKUP_BLOCKS:
                break
            blocks, num_copied = self._cached_prefix(request)
            hits += blocks
            num_hits += len(blocks) - num_copied
            num_looked_up += 1
            num_hashes += len(request.block_hashes)
        if num_hits and num_looked_up < len(readers):
            sample = self.blocks_wanted((), readers[:num_looked_up])
            num_hits += num_hits * self.blocks_wanted((), readers[num_looked_up:]) // sample
        return num_hits, {block.block_id for block in hits if block.ref_cnt == 0}

    def _reads_cache(self, request: Request) -> bool:
        """Whether vLLM will look the request up. It doesn't if the prompt's log probabilities are wanted."""
        if not self.pool.enable_caching or request.skip_reading_prefix_cache:
            return False
        # vLLM leaves an empty list of states for a request that found no memory.
        holds_blocks = any(group.req_to_blocks.get(request.request_id) for group in self._groups)
        return bool(request.block_hashes) and not holds_blocks

    def _cached_prefix(self, request: Request) -> tuple[list[KVCacheBlock], int]:
        """Returns the cached blocks that the request would read, and how many of them it would copy into
        blocks of its own, because the cached prefix ends inside them."""
        groups, num_tokens, *_ = self._coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        found = zip(groups, self._groups, strict=True)
        num_copied = sum(bool(blocks) and num_tokens % group.block_size > 0 for blocks, group in found)
        return [block for blocks in groups for block in blocks if not block.is_null], num_copied

    def grow(self, num_slabs: int) -> int:
        """Acquires up to ``num_slabs`` slabs from the pool; returns how many it got."""
        slabs = self.ledger.acquire(self.client.slot, num_slabs)
        for slab in slabs:
            position = position_of(slab, self._pinned_slab)
            self.pool.back(slab, position)
            self._ops.map.append((position, slab))
            # It may turn out not to be needed, if the prefix was cached, and must then go back as well.
            if self.leases is not None:
                self.leases.start(position, time.monotonic())
        return len(slabs)

    def give_back(self, positions: Iterable[int]) -> int:
        """Sends the slabs at idle positions back to the pool; returns how many there were."""
        given = [(position, self.pool.unback(position)) for position in positions]
        # No worker has mapped a slab whose map operation has not been shipped yet.
        unshipped = set(self._ops.map)
        never_mapped = [pair for pair in given if pair in unshipped]
        mapped = [pair for pair in given if pair not in unshipped]
        self._ops.map = [pair for pair in self._ops.map if pair not in never_mapped]
        # Only if there are some: a drain of unmapped slabs wakes every idle engine, this one included.
        if never_mapped:
            self.ledger.drain([slab for _, slab in never_mapped], 0)
        self.ledger.drain([slab for _, slab in mapped], self._world_size)
        self.fence.hold(mapped)
        for position, _ in given:
            self.cache.forget(position)
            if self.leases is not None:
                self.leases.cancel(position)
        return len(given)

    def least_valuable(
        self, count: int, keep: AbstractSet[int], now: float, tokens_per_pair: float
    ) -> list[int]:
        """Returns up to ``count`` idle positions whose loss costs least, without ``keep``: those that hold
        nothing, then serving's prefix cache by its value. ``tokens_per_pair``: see recompute_cost."""
        pool = self.pool

        def cost(position: int) -> float:
            end_tokens = pool.hashed_end_tokens.item(position)
            return recompute_cost(pool.num_hashed.item(position), end_tokens, tokens_per_pair)

        empty = [position for position in pool.empty_positions() if position not in keep][:count]
        return empty + self.cache.draw_least_valuable(count - len(empty), cost, now, keep | {PINNED_POSITION})

    def idle_positions(self) -> list[int]:
        return [
            position
            for position in self.pool.backed_positions()
            if position != PINNED_POSITION and self.pool.num_used[position] == 0
        ]

    def uses(self, requests: Iterable[Request]) -> list[PositionUse]:
        """Returns what each backed position holds, for the choice of victims.

        ``requests`` are those that may be ended, which frees their blocks. A position with blocks that none
        of them holds, as when a connector still reads them, counts as pinned.
        """
        users: dict[int, set[str]] = {}
        blocks: dict[int, set[int]] = {}
        for request in requests:
            for group in self._groups:
                for block in group.req_to_blocks.get(request.request_id, ()):
                    if not block.is_null:
                        position = self.layout.position_of(block.block_id)
                        users.setdefault(position, set()).add(request.request_id)
                        blocks.setdefault(position, set()).add(block.block_id)
        return [
            PositionUse(
                position=position,
                request_ids=frozenset(users.get(position, ())),
                lease_expiry=self._lease_expiry(position),
                is_pinned=position == PINNED_POSITION
                or self.pool.num_used[position] > len(blocks.get(position, ())),
            )
            for position in self.pool.backed_positions()
        ]

    def positions_of(self, request_id: str) -> set[int]:
        """Returns the positions with blocks of a request."""
        held = (group.req_to_blocks.get(request_id, ()) for group in self._groups)
        return {
            self.layout.position_of(block.block_id)
            for blocks in held
            for block in blocks
            if not block.is_null
        }

    def _lease_expiry(self, position: int) -> float | None:
        """Returns None for a position without cache, whose slab is the first to go."""
        if self.leases is None or not self.pool.is_caching(position):
            return None
        return self.leases.expiry(position)

    # The block pool's IdleListener ----------------------------------------------------------------

    def positions_idle(self, positions: Sequence[int]) -> None:
        now = time.monotonic()
        if self.holds is not None:
            self.holds.fell_idle(positions)
        if self.leases is None:
            self.cache.fell_idle(positions, now)
            return
        for position in positions:
            if position != PINNED_POSITION:
                self.leases.start(position, now)

    def position_busy(self, position: int) -> None:
        self.cache.fell_busy(position)
        if self.leases is not None:
            self.leases.cancel(position)

    def positions_hit(self, positions: Iterable[int]) -> None:
        if self.leases is None:
            now = time.monotonic()
            for position in positions:
                self.cache.hit(position, now)

    def position_cleared(self, position: int) -> None:
        self.cache.cleared(position)

    def close(self) -> None:
        self.client.close()
