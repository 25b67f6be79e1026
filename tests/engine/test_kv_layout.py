"""Rewriting vLLM's KV cache configuration for slabs."""

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)

from rose.engine.kv_layout import place_on_slabs
from rose.errors import ConfigError

LAYERS = ["layer.0", "layer.1", "layer.2"]
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
PAGE_BYTES = 2 * 16 * 2 * 32 * 4


def config_of(*groups: KVCacheGroupSpec, num_tensors: int = 1) -> KVCacheConfig:
    """As vLLM makes it: layer after layer, 1,000 blocks each."""
    tensor = KVCacheTensor(
        size=3000 * PAGE_BYTES, layers=LAYERS, layer_stride=1000 * PAGE_BYTES, block_stride=PAGE_BYTES
    )
    return KVCacheConfig(
        num_blocks=1000, kv_cache_tensors=[tensor] * num_tensors, kv_cache_groups=list(groups)
    )


def test_every_layer_of_a_block_lies_in_its_slab() -> None:
    config = config_of(KVCacheGroupSpec(LAYERS, SPEC))
    slab_bytes, num_positions = 8 * PAGE_BYTES, 5
    layout = place_on_slabs(config, slab_bytes=slab_bytes, num_positions=num_positions)
    (tensor,) = config.kv_cache_tensors
    assert tensor.size == num_positions * slab_bytes
    assert layout.blocks_per_slab == 2  # of 3 layers: 6 of the slab's 8 pages
    for position in range(num_positions):
        for block in layout.block_ids(position):
            assert block < config.num_blocks
            for layer in range(len(LAYERS)):
                start = tensor.offset + layer * tensor.layer_stride + block * tensor.block_stride
                assert position * slab_bytes <= start <= (position + 1) * slab_bytes - PAGE_BYTES


def test_blocks_never_overlap() -> None:
    config = config_of(KVCacheGroupSpec(LAYERS, SPEC))
    layout = place_on_slabs(config, slab_bytes=8 * PAGE_BYTES, num_positions=4)
    (tensor,) = config.kv_cache_tensors
    starts = [
        layer * tensor.layer_stride + block * tensor.block_stride
        for position in range(4)
        for block in layout.block_ids(position)
        for layer in range(len(LAYERS))
    ]
    assert len(set(starts)) == len(starts) == 4 * 2 * 3
    assert all(start % PAGE_BYTES == 0 for start in starts)


def test_two_processes_place_alike() -> None:
    first, second = (config_of(KVCacheGroupSpec(LAYERS, SPEC)) for _ in range(2))
    for config in (first, second):
        place_on_slabs(config, slab_bytes=8 * PAGE_BYTES, num_positions=4)
    assert first == second


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            config_of(KVCacheGroupSpec(LAYERS[:1], SPEC), KVCacheGroupSpec(LAYERS[1:], SPEC)),
            "2 groups (FullAttentionSpec) in 1 tensors: serve it without --pool",
        ),
        (
            config_of(
                KVCacheGroupSpec(
                    LAYERS,
                    SlidingWindowSpec(
                        block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64
                    ),
                )
            ),
            "SlidingWindowSpec",
        ),
        (config_of(KVCacheGroupSpec(LAYERS, SPEC), num_tensors=2), "in 2 tensors"),
    ],
    ids=["groups", "window", "tensors"],
)
def test_models_that_slabs_cannot_hold_are_refused(config: KVCacheConfig, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        place_on_slabs(config, slab_bytes=8 * PAGE_BYTES, num_positions=4)
    assert message in str(error.value)


def test_blocks_larger_than_a_slab_are_refused_with_the_size_that_works() -> None:
    config = config_of(KVCacheGroupSpec(LAYERS, SPEC))
    with pytest.raises(ConfigError, match=f"--slab-bytes {4 * PAGE_BYTES}"):
        place_on_slabs(config, slab_bytes=2 * PAGE_BYTES, num_positions=4)
