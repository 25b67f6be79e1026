"""Where vLLM's KV blocks lie inside slabs.

A block lies in one piece, with all layers of a model or of a pipeline's stage, so any slab fits any model and
any rank's shard. No block crosses a slab's edge.

With blocks ``bs`` bytes apart, G of them in a slab, and slabs of ``H`` bytes, position ``k`` covers

    k*H                                                         (k+1)*H
    | skew | block n | block n+1 | ... | block n+G-1 | rest |
           |<- bs -->|
           | layer 0 | layer 1 | ... | layer L-1 | padding |

Block ids count in steps of ``bs`` from the range's start:

    address(id) = id*bs

Where blocks divide slabs, ids are dense: position k has the ids k*G to k*G+G-1, and there is no skew.
Elsewhere position k's first id is n = ceil(k*H / bs), its skew is what that leaves, and ids whose blocks
would cross an edge are gaps, never used: at most two per position.
"""

import math
from dataclasses import dataclass

from rose.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabLayout:
    """One model's blocks in slabs of one size, made by :meth:`plan`."""

    slab_bytes: int
    block_stride: int
    """Bytes from one block to the next, which is a block with all its layers and, where that lets more blocks
    fit, padding."""
    blocks_per_slab: int
    """G, the number of blocks that one slab backs, each in all layers."""
    padding_bytes: int
    """The bytes behind each block that hold nothing."""

    @classmethod
    def plan(cls, *, block_bytes: int, slab_bytes: int, alignment: int = 1) -> "SlabLayout":
        """Makes the layout with the most blocks in a slab, and with dense ids if that costs none.

        ``block_bytes`` are those of a block in all layers, a multiple of ``alignment``.
        Raises: ConfigError if not one block fits into such a slab.
        """
        if block_bytes <= 0 or slab_bytes <= 0:
            raise ValueError(f"sizes must be positive, got block_bytes={block_bytes} slab_bytes={slab_bytes}")
        largest_skew = block_bytes - math.gcd(slab_bytes, block_bytes)
        skewed = max(0, slab_bytes - largest_skew) // block_bytes
        divisors = (g for g in range(slab_bytes // block_bytes, skewed - 1, -1) if g and slab_bytes % g == 0)
        dense = next((g for g in divisors if slab_bytes // g % alignment == 0), 0)
        if not dense and not skewed:
            raise ConfigError(
                f"a KV block of all layers needs {block_bytes} bytes, but a slab has {slab_bytes}: start the "
                f"pool with --slab-bytes {_fitting(block_bytes, alignment)} or larger, or lower --block-size"
            )
        block_stride = slab_bytes // dense if dense else block_bytes
        return cls(
            slab_bytes=slab_bytes,
            block_stride=block_stride,
            blocks_per_slab=dense if dense else skewed,
            padding_bytes=block_stride - block_bytes,
        )

    def first_id(self, position: int) -> int:
        """Returns the first valid block id of a position."""
        return -(-position * self.slab_bytes // self.block_stride)

    def block_ids(self, position: int) -> range:
        """Returns the valid block ids of a position."""
        first = self.first_id(position)
        return range(first, first + self.blocks_per_slab)

    def num_ids(self, num_positions: int) -> int:
        """Returns the size of a range's id space: one more than its last valid block id."""
        return self.first_id(num_positions - 1) + self.blocks_per_slab

    def is_valid(self, block_id: int) -> bool:
        """Returns whether the id names a block, as opposed to a gap between two positions' blocks."""
        return (
            block_id >= 0
            and 0 <= block_id - self.first_id(self._position_with(block_id)) < self.blocks_per_slab
        )

    def position_of(self, block_id: int) -> int:
        """Returns the position that backs a block. Raises: ValueError for an id in a gap."""
        position = self._position_with(block_id)
        first = self.first_id(position)
        if position < 0 or not 0 <= block_id - first < self.blocks_per_slab:
            raise ValueError(
                f"block {block_id} lies in a gap: position {position} has the blocks {first}-"
                f"{first + self.blocks_per_slab - 1}"
            )
        return position

    def address(self, block_id: int) -> int:
        """Byte offset of a block from the range's start. Raises: ValueError for an id in a gap."""
        self.position_of(block_id)
        return block_id * self.block_stride

    def _position_with(self, block_id: int) -> int:
        """The position that an id's address lies in. Only a valid id has a block there."""
        return block_id * self.block_stride // self.slab_bytes


def _fitting(block_bytes: int, alignment: int) -> int:
    """Returns a power of two that holds a block."""
    power: int = 1 << (block_bytes - 1).bit_length()
    return power if power % alignment == 0 else 2 * power
