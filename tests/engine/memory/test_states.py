"""How many states a request takes: as many as vLLM's own managers hand out, step by step."""

import math
import sys

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

from rose.engine.memory.states import most_new_states, speculative_states

pytestmark = pytest.mark.vllm

BLOCK_TOKENS = 16
MAX_MODEL_LEN = 512
NUM_DRAFTS = 2
PROMPT_TOKENS = 210
STEP_TOKENS = 64


def manager_of(mode: str) -> KVCacheManager:
    attention = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=16, dtype=torch.float32)
    states = MambaSpec(
        block_size=BLOCK_TOKENS if mode == "align" else MAX_MODEL_LEN,
        shapes=((4, 4),),
        dtypes=(torch.float32,),
        page_size_padded=attention.page_size_bytes,
        mamba_cache_mode=mode,
        num_speculative_blocks=NUM_DRAFTS,
    )
    groups = [KVCacheGroupSpec(["a"], attention), KVCacheGroupSpec(["s"], states)]
    return KVCacheManager(
        KVCacheConfig(num_blocks=99, kv_cache_tensors=[], kv_cache_groups=groups),
        max_model_len=MAX_MODEL_LEN,
        scheduler_block_size=states.block_size,
        hash_block_size=BLOCK_TOKENS,
        enable_caching=mode == "align",
    )


def states_of(group: SingleTypeKVCacheManager, request: Request) -> set[int]:
    return {block.block_id for block in group.req_to_blocks[request.request_id] if not block.is_null}


@pytest.mark.parametrize("mode", ["none", "align"])
def test_no_step_takes_more_states_than_are_counted_ahead_of_it(mode: str) -> None:
    manager = manager_of(mode)
    attention, states = manager.coordinator.single_type_managers
    assert (most_new_states(attention), speculative_states(attention)) == (sys.maxsize, 0)
    init_none_hash(sha256)
    request = Request(
        "r",
        list(range(PROMPT_TOKENS)),
        SamplingParams(max_tokens=4),
        None,
        block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
    )
    taken = []
    while request.num_computed_tokens < PROMPT_TOKENS:
        computed = min(request.num_computed_tokens + STEP_TOKENS, PROMPT_TOKENS)
        places = math.ceil(computed / states.block_size) + speculative_states(states)
        counted = min(places - len(states.req_to_blocks["r"]), most_new_states(states))
        before = states_of(states, request)
        assert manager.allocate_slots(request, computed - request.num_computed_tokens) is not None
        taken.append(len(states_of(states, request) - before))
        assert taken[-1] <= counted
        request.num_computed_tokens = computed
    assert taken == ([1 + NUM_DRAFTS, 1, 1, 1] if mode == "align" else [1 + NUM_DRAFTS, 0, 0, 0])
