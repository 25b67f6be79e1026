"""How many blocks vLLM takes for the states of state-space, linear-attention and convolution layers.

A state stands for all tokens so far, so even a long request needs few of them. With prefix caching vLLM keeps
a state at the end of each block (its cache mode "align"). The request's list of blocks then has a place for
every block of tokens, and most places are empty. Owns this arithmetic; never takes a block.
"""

from __future__ import annotations

import sys

from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SingleTypeKVCacheManager
from vllm.v1.request import Request


def most_new_states(group: SingleTypeKVCacheManager) -> int:
    """Returns the most blocks that a request newly takes in this cache group ahead of its next steps.

    In the mode "align" these are the state that a step reads and the one that it writes, and what speculation
    and checkpoints add. Every other group takes a block for each block of tokens, without a limit.
    """
    if not isinstance(group, MambaManager) or group.mamba_cache_mode != "align":
        return sys.maxsize
    return 2 + group.num_speculative_blocks + group.has_prefill_checkpoint_blocks


def speculative_states(group: SingleTypeKVCacheManager) -> int:
    """Returns how many states a request has beside the one for its tokens: one per draft token."""
    return group.num_speculative_blocks if isinstance(group, MambaManager) else 0


def is_about_to_copy(group: SingleTypeKVCacheManager, request: Request) -> bool:
    """Returns whether the request's next step copies a block that it shares with the prefix cache, which
    takes one more. vLLM 0.30-0.33 keep these requests by their id."""
    return request.request_id in group._partial_hit_reqs
