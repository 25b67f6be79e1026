"""Moves vLLM's KV cache configuration onto slabs.

Owns the rewriting of ``KVCacheConfig`` so that one slab backs G blocks of *all* layers. The worker and the
scheduler both apply it to their own copy, and it is a pure function of the copy, so they agree.
Never allocates memory.
"""

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheTensor

from rose.errors import ConfigError
from rose.memory.layout import SlabLayout


def place_on_slabs(config: KVCacheConfig, *, slab_bytes: int, num_positions: int) -> SlabLayout:
    """Rewrite ``config`` in place for an address range of ``num_positions`` slabs; return the layout.

    Block ids become sparse: of the ``slab_bytes // block_bytes`` ids of a position only the first
    ``layout.blocks_per_slab`` are ever used (see rose/memory/layout.py).

    Raises:
        ConfigError: the model's KV cache can't live in slabs (several cache groups, sliding window or
            state-space layers, or blocks that don't fit).
    """
    tensor, spec = _only_tensor(config)
    layout = SlabLayout.plan(
        block_bytes_per_layer=spec.page_size_bytes, num_layers=len(tensor.layers), slab_bytes=slab_bytes
    )
    tensor.size = num_positions * slab_bytes
    tensor.offset = 0
    tensor.layer_stride = layout.layer_stride
    tensor.block_stride = layout.block_stride
    config.num_blocks = (num_positions - 1) * layout.ids_per_slab + layout.blocks_per_slab
    return layout


def _only_tensor(config: KVCacheConfig) -> tuple[KVCacheTensor, FullAttentionSpec]:
    groups, tensors = config.kv_cache_groups, config.kv_cache_tensors
    if len(groups) != 1 or len(tensors) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        raise ConfigError(
            f"a slab pool holds models with full attention in one KV cache group; this one has "
            f"{len(groups)} groups ({', '.join(kinds)}) in {len(tensors)} tensors: serve it without --pool"
        )
    return tensors[0], groups[0].kv_cache_spec
