"""Lays vLLM's KV cache out in slabs.

Owns the choice of vLLM's layout, in which a block has all layers side by side, and the rewriting of
``KVCacheConfig`` so that one slab backs G whole blocks. The ranks and the scheduler each rewrite their own
copy. They agree, because the result depends on the largest rank's block alone. Never allocates memory.
"""

import logging
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from rose.errors import ConfigError, PoolError
from rose.memory.pool.pool_memory import KEPT_BY_OTHERS
from rose.memory.slabs.layout import SlabLayout

logger = logging.getLogger(__name__)

SUPPORTED = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MambaSpec)
"""Dense and grouped-query attention, MLA (a subclass of full attention), sliding windows and chunks; and the
states of other layers, whose blocks vLLM makes as large as attention's."""
BLOCK_LAYOUTS = ("BLNHC", "BLHNC")
"""vLLM's names of the layouts in which a block is one piece of memory: block, layer, then a layer's own
part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSize:
    """A block of one rank, in all layers that the rank has."""

    num_bytes: int
    alignment: int
    """What the distance between two blocks has to be a multiple of, in bytes."""


def largest_block(configs: Sequence[KVCacheConfig]) -> BlockSize:
    """Returns what a block takes on the rank with the largest ones, for the configurations of all ranks.

    The stages of a pipeline have different layers, and maybe different numbers of them.
    Raises: ConfigError as place_on_slabs() does.
    """
    specs = [one for config in configs for one in _specs(config)]
    alignment = math.lcm(*(number for one in specs for number in _multiples(one)))
    return BlockSize(num_bytes=max(map(_block_bytes, configs)), alignment=alignment)


def block_layouts(supported: Sequence[str], preferred: str | None = None) -> list[str]:
    """Returns those of vLLM's KV layouts that keep a block of all layers in one piece.

    The first one has a layer's part in the order of ``preferred``, if there is such a one. A KV connector
    prefers a layout, and moves a layer's part as bytes from and to engines that have it.
    Raises: ConfigError if the model's attention kernels read none of them.
    """
    found = [name for name in supported if name in BLOCK_LAYOUTS]
    if not found:
        raise ConfigError(
            f"the model's attention kernels read the KV layouts {', '.join(supported)} alone, and in a slab "
            f"pool a block has all layers side by side ({' or '.join(BLOCK_LAYOUTS)}): choose another "
            f"--attention-backend, or serve without --pool"
        )
    return sorted(found, key=lambda name: layer_layout(name) != preferred)


def layer_layout(name: str) -> str:
    """Returns the layout that keeps the layers apart and has the same bytes in a layer's part of a block."""
    return f"LB{name[2:]}" if name in BLOCK_LAYOUTS else name


def compare_layers_alone(connector: Any) -> None:
    """Has NixlConnector compare the order within a layer's part of a block with its peer's, and not whether
    the layers lie side by side. Call before it registers the KV cache.

    Why: it refuses a peer with another layout by the layout's name, and an engine without slabs has the
    layers apart. Both tell each other where each layer's parts lie and how far apart. vLLM 0.30-0.33.
    Raises: PoolError for a version that keeps the names elsewhere.
    """
    for child in getattr(connector, "_connectors", ()):  # a MultiConnector's
        compare_layers_alone(child)
    if "NixlBaseConnector" not in {base.__name__ for base in type(connector).__mro__}:
        return
    for name in ("kv_cache_layout", "host_buffer_kv_cache_layout"):
        if not isinstance(layout := getattr(connector.connector_worker, name, None), str):
            raise PoolError(f"vLLM's NixlConnector has no {name} where rose looks: unsupported version")
        setattr(connector.connector_worker, name, layer_layout(layout))


def place_on_slabs(
    config: KVCacheConfig, *, slab_bytes: int, num_positions: int, block: BlockSize | None = None
) -> SlabLayout:
    """Rewrites ``config`` in place for an address range of ``num_positions`` slabs; returns the layout.

    Every cache group begins at a block's start. Groups overlay each other, as in vLLM's own layouts, because
    a block belongs to one group at a time. Only the ids of ``layout.block_ids`` are ever used.
    ``block`` is the largest one of all ranks; None for an engine with one rank. Smaller ones lie as far
    apart, so that an id means the same slab on all ranks.

    Raises:
        ConfigError: the model's KV cache can't be kept in slabs: it has cross-attention layers, layers
            whose blocks differ in size, or blocks larger than a slab.
    """
    if block is None:
        block = largest_block([config])
    layout = SlabLayout.plan(
        block_bytes=block.num_bytes,
        slab_bytes=slab_bytes,
        # A padded block is this many layers, as if it had some more: kernels that see rows count on it.
        alignment=block.alignment,
    )
    for tensor in config.kv_cache_tensors:
        tensor.size = num_positions * slab_bytes
        tensor.block_stride = layout.block_stride
    config.num_blocks = layout.num_ids(num_positions)
    return layout


def fit_longest(config: KVCacheConfig, vllm_config: Any, layout: SlabLayout, num_slabs: int) -> None:
    """Refuses a --max-model-len of which a request might never get its memory, because it would wait at the
    head of the queue, and all others behind it. Lowers one that vLLM has chosen itself ("auto"). ``config``
    is on slabs of this ``layout``.

    vLLM's own check counts bytes, and knows neither its padding block nor unused parts of slabs.
    Raises: ConfigError.
    """
    model, most = vllm_config.model_config, num_slabs - KEPT_BY_OTHERS
    length = model.max_model_len
    needed = _slabs_of_longest(config, vllm_config, layout, length)
    if needed <= most:
        return
    slabs_of = partial(_slabs_of_longest, config, vllm_config, layout)
    fitting = bisect_right(range(1, length + 1), most, key=slabs_of)
    model.max_model_len = length
    if fitting and getattr(model, "original_max_model_len", None) == -1:
        model.max_model_len = fitting
        logger.info("max_model_len=%d->%d, which fits into %d slabs", length, fitting, most)
        return
    raise ConfigError(
        f"--max-model-len {length}: such a request needs {needed} slabs, and of the pool's {num_slabs} "
        f"another engine keeps one for good: start the pool with --num-slabs {needed + KEPT_BY_OTHERS} or "
        f"more, or the engine with --max-model-len {fitting} or less"
    )


def _slabs_of_longest(config: KVCacheConfig, vllm_config: Any, layout: SlabLayout, length: int) -> int:
    """Returns the slabs that a request of ``length`` tokens and the padding block need. Leaves ``length`` in
    ``vllm_config``, where vLLM's specifications look it up."""
    vllm_config.model_config.max_model_len = length
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    blocks = sum(-(-spec.max_memory_usage_bytes(vllm_config) // spec.page_size_bytes) for spec in specs)
    return math.ceil((blocks + 1) / layout.blocks_per_slab)


def _multiples(spec: KVCacheSpec) -> tuple[int, int]:
    return spec.page_size_bytes, spec.get_block_stride_alignment()


def _specs(config: KVCacheConfig) -> list[KVCacheSpec]:
    """Returns the specification of each cache group of which the rank has layers. Raises: ConfigError for one
    that slabs can't hold."""
    groups = [group for group in config.kv_cache_groups if group.layer_names]
    specs = [spec for group in groups for spec in _layer_specs(group.kv_cache_spec)]
    kinds = ", ".join(sorted({type(spec).__name__ for spec in specs})) or "none"
    if not specs or not all(isinstance(spec, SUPPORTED) for spec in specs):
        raise ConfigError(
            f"a slab pool holds models whose layers keep the KV of decoder attention, with states beside it; "
            f"this model has {kinds}: serve it without --pool"
        )
    sizes = sorted({spec.page_size_bytes for spec in specs})
    if len(sizes) > 1 or len(config.kv_cache_tensors) != len(specs):
        raise ConfigError(
            f"a slab pool holds models whose layers, a drafter's included, have KV blocks of one size; this "
            f"model ({kinds}) has blocks of {', '.join(map(str, sizes))} bytes in "
            f"{len(config.kv_cache_tensors)} tensors: serve it without --pool"
        )
    return specs


def _layer_specs(spec: KVCacheSpec) -> list[KVCacheSpec]:
    """Returns a group's specification, or those of its layers where these differ, as a drafter's may."""
    return list(spec.kv_cache_specs.values()) if isinstance(spec, UniformTypeKVCacheSpecs) else [spec]


def _block_bytes(config: KVCacheConfig) -> int:
    """Returns the bytes of one block in all layers.

    Raises: ConfigError if vLLM has not put a block's layers side by side, which EngineRank asked it to do.
    """
    tensors = config.kv_cache_tensors
    strides = {tensor.block_stride for tensor in tensors}
    needed = max(tensor.offset + len(tensor.layers) * tensor.layer_stride for tensor in tensors)
    if len(strides) > 1 or needed > min(strides):
        raise ConfigError("vLLM did not lay out KV blocks as rose asked it to: this version is not supported")
    return strides.pop()
