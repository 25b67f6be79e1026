"""Lays vLLM's KV cache out in slabs.

Owns the rewriting of ``KVCacheConfig`` so that one slab backs G blocks of *all* layers. The worker and the
scheduler each rewrite their own copy. They agree, because the result depends on the copy alone. Never
allocates memory.
"""

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    SlidingWindowSpec,
)

from rose.errors import ConfigError
from rose.memory.slabs.layout import SlabLayout

SUPPORTED = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
"""Dense and grouped-query attention, MLA (a subclass of full attention), sliding windows and chunks."""


def place_on_slabs(config: KVCacheConfig, *, slab_bytes: int, num_positions: int) -> SlabLayout:
    """Rewrites ``config`` in place for an address range of ``num_positions`` slabs; returns the layout.

    The layers of every cache group are laid out from the slab's start. Groups overlay each other, as in
    vLLM's own layouts, because a block belongs to one group at a time. Block ids become sparse: only the ids
    of ``layout.block_ids`` are ever used (see rose/memory/slabs/layout.py).

    Raises:
        ConfigError: the model's KV cache can't be kept in slabs: it has state-space or cross-attention
            layers, layers whose blocks differ in size, or blocks larger than a slab.
    """
    layout = SlabLayout.plan(
        block_bytes_per_layer=_block_bytes(config),
        num_layers=max(len(tensor.layers) for tensor in config.kv_cache_tensors),
        slab_bytes=slab_bytes,
    )
    for tensor in config.kv_cache_tensors:
        tensor.size = num_positions * slab_bytes
        tensor.offset = 0
        tensor.layer_stride = layout.layer_stride
        tensor.block_stride = layout.block_stride
    config.num_blocks = layout.num_ids(num_positions)
    return layout


def _block_bytes(config: KVCacheConfig) -> int:
    """Returns the bytes of one block in one layer. Raises: ConfigError if layers differ in it."""
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    kinds = ", ".join(sorted({type(spec).__name__ for spec in specs})) or "none"
    if not specs or not all(isinstance(spec, SUPPORTED) for spec in specs):
        raise ConfigError(
            f"a slab pool holds models whose layers all keep attention KV; this model has {kinds}: serve it "
            f"without --pool"
        )
    sizes = sorted({spec.page_size_bytes for spec in specs})
    if len(sizes) > 1 or len(config.kv_cache_tensors) != len(specs):
        raise ConfigError(
            f"a slab pool holds models whose layers have KV blocks of one size; this model ({kinds}) has "
            f"blocks of {', '.join(map(str, sizes))} bytes in {len(config.kv_cache_tensors)} tensors: serve "
            f"it without --pool"
        )
    alignment = max(spec.get_block_stride_alignment() for spec in specs)
    return -(-sizes[0] // alignment) * alignment
