"""Where vLLM's KV blocks lie inside slabs.

Layers are interleaved in each slab: a slab backs G blocks in all layers of a model, so any slab fits any
model and any tensor-parallel shard. No block crosses a slab's edge.

With ``bs`` bytes per block per layer, ``L`` layers and slabs of ``H`` bytes, position ``k`` covers

    k*H                                                                                          (k+1)*H
    | skew | layer 0: blocks 0..G-1 | layer 1: blocks 0..G-1 | ... | layer L-1: blocks 0..G-1 | waste |
           |<-------- G*bs -------->|
           | b0 | b1 | ... | b(G-1) |
           |<bs>|

Block ids count in steps of ``bs`` from the range's start, so position k's first block is ``ceil(k*H / bs)``,
and its skew is what that leaves: 0 at every position where blocks divide slabs, and less than ``bs`` always.
Position k owns the ids up to the next position's first one, of which only the first G are valid; the rest
fall into other layers or the waste:

    address(id, layer) = id*bs + layer*G*bs
"""

import math
from dataclasses import dataclass

from rose.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabLayout:
    """One model's blocks in slabs of one size, made by :meth:`plan`. All strides are in bytes."""

    slab_bytes: int
    num_layers: int
    block_stride: int
    """Bytes per block per layer."""
    blocks_per_slab: int
    """G, the number of blocks that one slab backs, each in all layers."""

    @classmethod
    def plan(cls, *, block_bytes_per_layer: int, num_layers: int, slab_bytes: int) -> "SlabLayout":
        """Makes the layout for a model. Raises: ConfigError if its blocks don't fit into such slabs."""
        if block_bytes_per_layer <= 0 or num_layers <= 0 or slab_bytes <= 0:
            raise ValueError(
                f"sizes must be positive, got block_bytes_per_layer={block_bytes_per_layer} "
                f"num_layers={num_layers} slab_bytes={slab_bytes}"
            )
        all_layers_bytes = block_bytes_per_layer * num_layers
        largest_skew = block_bytes_per_layer - math.gcd(slab_bytes, block_bytes_per_layer)
        if all_layers_bytes + largest_skew > slab_bytes:
            at_least = 1 << (all_layers_bytes + largest_skew - 1).bit_length()
            raise ConfigError(
                f"a KV block needs {block_bytes_per_layer} bytes in each of {num_layers} layers = "
                f"{all_layers_bytes}, but a slab has {slab_bytes}: start the pool with --slab-bytes "
                f"{at_least} or larger, or lower --block-size"
            )
        return cls(
            slab_bytes=slab_bytes,
            num_layers=num_layers,
            block_stride=block_bytes_per_layer,
            blocks_per_slab=(slab_bytes - largest_skew) // all_layers_bytes,
        )

    @property
    def layer_stride(self) -> int:
        """Bytes from a block in one layer to the same block in the next layer."""
        return self.blocks_per_slab * self.block_stride

    @property
    def waste_bytes(self) -> int:
        """Bytes of each slab that hold no block."""
        return self.slab_bytes - self.num_layers * self.layer_stride

    def first_id(self, position: int) -> int:
        """The first valid block id of a position."""
        return -(-position * self.slab_bytes // self.block_stride)

    def block_ids(self, position: int) -> range:
        """The valid block ids of a position."""
        first = self.first_id(position)
        return range(first, first + self.blocks_per_slab)

    def num_ids(self, num_positions: int) -> int:
        """The size of a range's id space: one more than its last valid block id."""
        return self.first_id(num_positions - 1) + self.blocks_per_slab

    def is_valid(self, block_id: int) -> bool:
        """Whether the id names a block, as opposed to a gap between two positions' blocks."""
        return (
            block_id >= 0
            and 0 <= block_id - self.first_id(self._position_with(block_id)) < self.blocks_per_slab
        )

    def position_of(self, block_id: int) -> int:
        """The position that backs a block. Raises: ValueError for an id in a gap."""
        position = self._position_with(block_id)
        first = self.first_id(position)
        if position < 0 or not 0 <= block_id - first < self.blocks_per_slab:
            raise ValueError(
                f"block {block_id} lies in a gap: position {position} has the blocks {first}-"
                f"{first + self.blocks_per_slab - 1}"
            )
        return position

    def address(self, block_id: int, layer: int) -> int:
        """Byte offset of a block's part in one layer from the start of the address range."""
        if not self.is_valid(block_id) or not 0 <= layer < self.num_layers:
            raise ValueError(f"no block {block_id} in layer {layer} of {self.num_layers}")
        return block_id * self.block_stride + layer * self.layer_stride

    def _position_with(self, block_id: int) -> int:
        """The position that an id's address lies in. Only a valid id has a block there."""
        return block_id * self.block_stride // self.slab_bytes
