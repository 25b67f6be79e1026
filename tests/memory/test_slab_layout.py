"""SlabLayout: no block crosses a slab or another block, and bad shapes name their fix."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import ConfigError
from rose.memory.slabs.layout import SlabLayout

MIB = 1 << 20


def test_qwen3_8b_in_16_mib_slabs_as_in_the_notes() -> None:
    """36 layers, 8 KV heads of 128, bf16, 16 tokens a block: 7 blocks = 112 tokens, 1.6 % waste."""
    layout = SlabLayout.plan(block_bytes_per_layer=16 * 2 * 8 * 128 * 2, num_layers=36, slab_bytes=16 * MIB)
    assert layout.blocks_per_slab == 7
    assert layout.block_ids(1) == range(256, 263)
    assert layout.layer_stride == 7 * 64 * 1024
    assert layout.waste_bytes / layout.slab_bytes == pytest.approx(0.016, abs=1e-3)


@st.composite
def layouts(draw: st.DrawFn) -> SlabLayout:
    """Slabs are powers of two; blocks may have any size, as MLA's do."""
    slab_bytes = draw(st.integers(64, 4096))
    block_bytes = draw(st.integers(1, slab_bytes // 2))
    num_layers = draw(st.integers(1, slab_bytes // block_bytes - 1))
    return SlabLayout.plan(block_bytes_per_layer=block_bytes, num_layers=num_layers, slab_bytes=slab_bytes)


@given(layouts(), st.integers(1, 4))
def test_blocks_of_all_layers_tile_their_slab_without_overlap(layout: SlabLayout, num_positions: int) -> None:
    taken: set[int] = set()
    for position in range(num_positions):
        for block_id in layout.block_ids(position):
            assert layout.position_of(block_id) == position and layout.is_valid(block_id)
            for layer in range(layout.num_layers):
                at = layout.address(block_id, layer)
                assert position * layout.slab_bytes <= at
                assert at + layout.block_stride <= (position + 1) * layout.slab_bytes
                assert at % layout.block_stride == 0 and at not in taken  # so no two overlap
                taken.add(at)
    used = num_positions * (layout.slab_bytes - layout.waste_bytes)
    assert len(taken) * layout.block_stride == used
    assert layout.num_ids(num_positions) == layout.block_ids(num_positions - 1)[-1] + 1


@given(layouts(), st.integers(-3, 300))
def test_ids_in_gaps_belong_to_no_position(layout: SlabLayout, block_id: int) -> None:
    if layout.is_valid(block_id):
        assert block_id in layout.block_ids(layout.position_of(block_id))
    else:
        with pytest.raises(ValueError, match=f"block {block_id} lies in a gap"):
            layout.position_of(block_id)
        with pytest.raises(ValueError, match=f"no block {block_id}"):
            layout.address(block_id, 0)


def test_slab_too_small_for_one_block_names_the_size_that_fits() -> None:
    with pytest.raises(
        ConfigError, match=r"65536 bytes in each of 36 layers = 2359296.*--slab-bytes 4194304"
    ):
        SlabLayout.plan(block_bytes_per_layer=65536, num_layers=36, slab_bytes=2 * MIB)
    SlabLayout.plan(block_bytes_per_layer=65536, num_layers=36, slab_bytes=4 * MIB)


def test_deepseek_v3_blocks_need_no_power_of_two() -> None:
    """MLA: 576 bf16 values a token in each of 61 layers; 64 tokens a block make 73,728 bytes."""
    layout = SlabLayout.plan(block_bytes_per_layer=576 * 2 * 64, num_layers=61, slab_bytes=64 * MIB)
    assert layout.blocks_per_slab == 14
    assert layout.waste_bytes / layout.slab_bytes == pytest.approx(0.062, abs=1e-3)
    # The second slab starts in the middle of a block's step: its first id is the next whole one.
    assert layout.first_id(1) * layout.block_stride - 64 * MIB == 57_344


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="num_layers=0"):
        SlabLayout.plan(block_bytes_per_layer=16, num_layers=0, slab_bytes=64)
