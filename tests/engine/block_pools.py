"""vLLM's own block pool on slabs, for property tests: made as an engine makes it, without the engine."""

from collections.abc import Sequence

from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from rose.engine.memory.block_pool import SlabBlockPool
from rose.memory.policy.spread import Spread
from rose.memory.slabs.layout import SlabLayout

BLOCK_TOKENS = 4
NUM_POSITIONS = 6
PINNED_SLAB = 100
# Four blocks fit into a slab wherever it begins, and there are gaps of one or two ids between positions.
LAYOUT = SlabLayout.plan(block_bytes=200, slab_bytes=1021)
assert [LAYOUT.first_id(k) for k in range(3)] == [0, 6, 11] and LAYOUT.blocks_per_slab == 4


def adopted_pool(spread: Spread = Spread.DENSE) -> SlabBlockPool:
    """A pool with only the pinned position backed."""
    pool = BlockPool(
        LAYOUT.num_ids(NUM_POSITIONS),
        enable_caching=True,
        hash_block_size=BLOCK_TOKENS,
        enable_kv_cache_events=True,
    )
    return SlabBlockPool.adopt(pool, LAYOUT, NUM_POSITIONS, PINNED_SLAB, spread)


def cache(pool: SlabBlockPool, blocks: Sequence[KVCacheBlock], seed: int) -> None:
    """Enters full blocks into the prefix cache, as the content of one prompt drawn from ``seed``."""
    init_none_hash(sha256)
    request = Request(
        request_id=f"request-{seed}",
        prompt_token_ids=[seed + i for i in range(len(blocks) * BLOCK_TOKENS)],
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
    )
    pool.cache_full_blocks(request, list(blocks), 0, len(blocks), BLOCK_TOKENS, 0)
