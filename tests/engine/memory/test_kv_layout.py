"""Rewriting vLLM's KV cache configuration for slabs."""

from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

import torch
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from rose.engine.memory.kv_layout import block_layouts, largest_block, place_on_slabs
from rose.errors import ConfigError

LAYERS = ["layer.0", "layer.1", "layer.2"]
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32)
PAGE_BYTES = 2 * 16 * 2 * 32 * 4


WINDOW = SlidingWindowSpec(
    block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32, sliding_window=64
)


def config_of(*groups: KVCacheGroupSpec) -> KVCacheConfig:
    """Returns what vLLM makes: a tensor for each group, of 1,000 blocks with all their layers."""
    stride = max((len(one.layer_names) * one.kv_cache_spec.page_size_bytes for one in groups), default=0)
    tensors = [
        KVCacheTensor(
            size=1000 * stride,
            layers=group.layer_names,
            layer_stride=group.kv_cache_spec.page_size_bytes,
            block_stride=stride,
        )
        for group in groups
    ]
    return KVCacheConfig(num_blocks=1000, kv_cache_tensors=tensors, kv_cache_groups=list(groups))


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


@pytest.mark.parametrize("slab_pages", [6, 7])
def test_stages_of_different_sizes_have_the_same_blocks_in_a_slab(slab_pages: int) -> None:
    """Also where a stage has no layer of a group, as happens with a hybrid model's few attention layers."""
    layers = [LAYERS[:1], LAYERS]
    configs = [config_of(KVCacheGroupSpec(own, SPEC), KVCacheGroupSpec([], WINDOW)) for own in layers]
    for config in configs:
        config.kv_cache_tensors = config.kv_cache_tensors[:1]  # vLLM makes none for a group without layers
    block = largest_block(configs)
    layouts = [
        place_on_slabs(config, slab_bytes=slab_pages * PAGE_BYTES, num_positions=4, block=block)
        for config in configs
    ]
    assert layouts[0] == layouts[1] and layouts[0].blocks_per_slab == 2 - slab_pages % 2
    assert len({config.num_blocks for config in configs}) == 1
    strides = [tensor.block_stride for config in configs for tensor in config.kv_cache_tensors]
    assert strides == [layouts[0].block_stride] * 2
    assert layouts[0].block_stride >= len(LAYERS) * PAGE_BYTES


def test_cache_groups_overlay_each_other() -> None:
    """A block belongs to one group at a time, so the slab holds the larger group's layers, not the sum."""
    full, window = KVCacheGroupSpec(LAYERS[:1], SPEC), KVCacheGroupSpec(LAYERS[1:], WINDOW)
    config = config_of(full, window)
    layout = place_on_slabs(config, slab_bytes=8 * PAGE_BYTES, num_positions=4)
    assert layout.blocks_per_slab == 4
    first, second = config.kv_cache_tensors
    assert (first.offset, first.layer_stride, first.block_stride, first.size) == (
        *(second.offset, second.layer_stride, second.block_stride),
        second.size,
    )


def test_padded_states_overlay_attention() -> None:
    state = MambaSpec(
        block_size=16, shapes=((4, 4),), dtypes=(torch.float32,), page_size_padded=SPEC.page_size_bytes
    )
    config = config_of(KVCacheGroupSpec(LAYERS[:1], SPEC), KVCacheGroupSpec(LAYERS[1:2], state))
    layout = place_on_slabs(config, slab_bytes=8 * PAGE_BYTES, num_positions=4)
    assert layout.blocks_per_slab == 8
    assert {(one.offset, one.block_stride) for one in config.kv_cache_tensors} == {(0, PAGE_BYTES)}


def test_mla_blocks_of_any_size_fit() -> None:
    spec = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    config = config_of(KVCacheGroupSpec(LAYERS, spec))
    layout = place_on_slabs(config, slab_bytes=1 << 21, num_positions=4)
    assert (layout.block_stride, layout.blocks_per_slab) == (3 * 73_728, 8)
    (tensor,) = config.kv_cache_tensors
    last = layout.address(config.num_blocks - 1) + 2 * tensor.layer_stride
    assert last + spec.page_size_bytes <= tensor.size == 4 << 21


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (
            [
                KVCacheGroupSpec(
                    LAYERS,
                    CrossAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.float32),
                )
            ],
            "the KV of decoder attention, with states beside it; this model has CrossAttentionSpec",
        ),
        (
            [
                KVCacheGroupSpec(LAYERS[:1], SPEC),
                KVCacheGroupSpec(LAYERS[1:], SPEC.copy_with_new_block_size(32)),
            ],
            f"blocks of {PAGE_BYTES}, {2 * PAGE_BYTES} bytes in 2 tensors",
        ),
        (
            [
                KVCacheGroupSpec(
                    LAYERS,
                    UniformTypeKVCacheSpecs(
                        block_size=16,
                        kv_cache_specs={"model": SPEC, "drafter": replace(SPEC, num_kv_heads=1)},
                    ),
                )
            ],
            f"blocks of {PAGE_BYTES // 2}, {PAGE_BYTES} bytes in 1 tensors",
        ),
        ([], "this model has none"),
    ],
    ids=["cross-attention", "sizes", "drafter", "none"],
)
def test_models_that_slabs_cannot_hold_are_refused(groups: list[KVCacheGroupSpec], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        place_on_slabs(config_of(*groups), slab_bytes=8 * PAGE_BYTES, num_positions=4)
    assert message in str(error.value)


def test_a_config_with_the_layers_apart_is_refused() -> None:
    config = config_of(KVCacheGroupSpec(LAYERS, SPEC))
    (tensor,) = config.kv_cache_tensors
    tensor.block_stride, tensor.layer_stride = PAGE_BYTES, 1000 * PAGE_BYTES
    with pytest.raises(ConfigError, match="vLLM did not lay out KV blocks as rose asked it to"):
        place_on_slabs(config, slab_bytes=8 * PAGE_BYTES, num_positions=4)


def test_of_vllms_layouts_those_with_whole_blocks_are_offered() -> None:
    assert block_layouts(["LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC"]) == ["BLNHC", "BLHNC"]
    assert block_layouts(["LBNHC", "LBHNC", "BLNHC", "BLHNC"], "LBHNC") == ["BLHNC", "BLNHC"]
    assert block_layouts(["BLNHC"], "LBHNC") == ["BLNHC"]
    with pytest.raises(ConfigError, match=r"read the KV layouts LBNHC alone, .* --attention-backend"):
        block_layouts(["LBNHC"])


def test_blocks_larger_than_a_slab_are_refused_with_the_size_that_works() -> None:
    config = config_of(KVCacheGroupSpec(LAYERS, SPEC))
    with pytest.raises(ConfigError, match=f"--slab-bytes {4 * PAGE_BYTES}"):
        place_on_slabs(config, slab_bytes=2 * PAGE_BYTES, num_positions=4)
