"""How large a block is in the largest stage of a pipeline, for the other stages and the scheduler.

The stages of a pipeline may have different numbers of layers, and vLLM gives each rank the KV cache
configuration of its own stage, and the scheduler a copy of the first one. A block id has to mean the same
slab for all of them, so blocks lie as far apart as those of the largest stage. Owns how they learn of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from vllm.v1.kv_cache_interface import KVCacheConfig

from rose.engine.memory.kv_layout import BlockSize, largest_block

_NAME = "rose_largest_block"
"""In the engine core's ``additional_config``, and an attribute of each rank's configuration."""


def tell_largest_block(configs: Sequence[KVCacheConfig], vllm_config: Any) -> None:
    """Adds the size to the configurations of all ranks and to the engine core's. Call before the ranks get
    theirs, and before the scheduler is made. Raises: ConfigError for a model that slabs can't hold."""
    block = largest_block(configs)
    vllm_config.additional_config[_NAME] = asdict(block)  # vLLM hashes this as JSON
    for config in configs:
        setattr(config, _NAME, block)


def block_of_core(vllm_config: Any) -> BlockSize | None:
    """Returns the size, in an engine core that has initialized its ranks; None with a single rank."""
    told = vllm_config.additional_config.get(_NAME)
    return BlockSize(**told) if told is not None else None


def block_of_rank(config: KVCacheConfig) -> BlockSize | None:
    """Returns the size, in a rank; None if it is the only one."""
    block: BlockSize | None = getattr(config, _NAME, None)
    return block
