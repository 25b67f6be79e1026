"""SlabLayout: no block crosses a slab or another block, and bad shapes name their fix."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import ConfigError
from rose.memory.slabs.layout import SlabLayout

MIB = 1 << 20
QWEN3_8B = 36 * 16 * 2 * 8 * 128 * 2
"""36 layers, 8 KV heads of 128, bf16, 16 tokens a block: 2.25 MiB."""


def test_ids_are_dense_where_blocks_divide_slabs() -> None:
    layout = SlabLayout.plan(block_bytes=QWEN3_8B, slab_bytes=18 * MIB)
    assert layout.blocks_per_slab == 8
    assert [layout.block_ids(position) for position in (0, 1, 2)] == [
        range(8),
        range(8, 16),
        range(16, 24),
    ]
    assert layout.num_ids(5) == 40
    assert layout.address(13) == 13 * QWEN3_8B


def test_qwen3_8b_in_64_mib_slabs_loses_at_most_one_block_of_each() -> None:
    layout = SlabLayout.plan(block_bytes=QWEN3_8B, slab_bytes=64 * MIB)
    assert layout.blocks_per_slab == 64 * MIB // QWEN3_8B - 1
    assert layout.block_ids(1) == range(29, 56)  # 28 crosses the edge


def test_padded_blocks_are_dense_where_that_costs_no_block() -> None:
    """Blocks of 384 KiB in slabs of 512 KiB: as they are, those of the second slab would cross its edges."""
    layout = SlabLayout.plan(block_bytes=384 << 10, slab_bytes=512 << 10)
    assert (layout.blocks_per_slab, layout.block_stride) == (1, 512 << 10)
    with pytest.raises(ConfigError, match="--slab-bytes 1048576"):
        SlabLayout.plan(block_bytes=384 << 10, slab_bytes=512 << 10, alignment=384)


@st.composite
def layouts(draw: st.DrawFn) -> SlabLayout:
    """Slabs and blocks of any size, as MLA's are."""
    slab_bytes = draw(st.integers(64, 4096))
    block_bytes = draw(st.integers(1, slab_bytes))
    return SlabLayout.plan(block_bytes=block_bytes, slab_bytes=slab_bytes)


@given(layouts(), st.integers(1, 4))
def test_blocks_tile_their_slab_without_overlap(layout: SlabLayout, num_positions: int) -> None:
    taken: set[int] = set()
    for position in range(num_positions):
        for block_id in layout.block_ids(position):
            assert layout.position_of(block_id) == position and layout.is_valid(block_id)
            at = layout.address(block_id)
            assert position * layout.slab_bytes <= at
            assert at + layout.block_stride <= (position + 1) * layout.slab_bytes
            assert at % layout.block_stride == 0 and at not in taken  # so no two overlap
            taken.add(at)
    assert len(taken) == num_positions * layout.blocks_per_slab
    assert layout.num_ids(num_positions) == layout.block_ids(num_positions - 1)[-1] + 1
    assert layout.num_ids(num_positions) <= num_positions * (layout.blocks_per_slab + 2)


@given(st.integers(64, 4096), st.integers(1, 4096))
def test_a_slab_holds_all_the_blocks_that_fit_but_one_at_most(slab_bytes: int, block_bytes: int) -> None:
    fitting = slab_bytes // block_bytes
    if fitting == 0:
        with pytest.raises(ConfigError, match=f"needs {block_bytes} bytes, but a slab has {slab_bytes}"):
            SlabLayout.plan(block_bytes=block_bytes, slab_bytes=slab_bytes)
        return
    layout = SlabLayout.plan(block_bytes=block_bytes, slab_bytes=slab_bytes)
    assert max(1, fitting - 1) <= layout.blocks_per_slab <= fitting
    assert layout.block_stride >= block_bytes


@given(layouts(), st.integers(-3, 300))
def test_ids_in_gaps_belong_to_no_position(layout: SlabLayout, block_id: int) -> None:
    if layout.is_valid(block_id):
        assert block_id in layout.block_ids(layout.position_of(block_id))
    else:
        with pytest.raises(ValueError, match=f"block {block_id} lies in a gap"):
            layout.position_of(block_id)
        with pytest.raises(ValueError, match=f"block {block_id} lies in a gap"):
            layout.address(block_id)


def test_slab_too_small_for_one_block_names_the_size_that_fits() -> None:
    with pytest.raises(ConfigError, match=r"all layers needs 2359296 .*--slab-bytes 4194304"):
        SlabLayout.plan(block_bytes=QWEN3_8B, slab_bytes=2 * MIB)
    SlabLayout.plan(block_bytes=QWEN3_8B, slab_bytes=4 * MIB)


def test_deepseek_v3_blocks_need_no_power_of_two() -> None:
    """MLA: 576 bf16 values a token in each of 61 layers; 64 tokens a block make 4,497,408 bytes."""
    layout = SlabLayout.plan(block_bytes=576 * 2 * 64 * 61, slab_bytes=64 * MIB)
    assert (layout.blocks_per_slab, layout.first_id(1)) == (13, 15)


def test_sizes_must_be_positive() -> None:
    with pytest.raises(ValueError, match="block_bytes=0"):
        SlabLayout.plan(block_bytes=0, slab_bytes=64)
