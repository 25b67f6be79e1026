"""Attention over a range whose slabs move, with poison, and with CUDA graphs where there are some.

One request's blocks are at positions of a pool's range. Between two steps its slabs move to other positions,
and the old ones are left full of NaN. The answer must have the bits of the same attention over a plain
tensor.
"""

import random
from collections.abc import Callable

import torch

from gpu.rig import GpuRig
from rose.measure.figures import Figure
from rose.memory.slabs.backend import SlabRange

NUM_POSITIONS, NUM_BLOCKS, HEADS, HEAD_SIZE = 12, 4, 8, 64


def measure(rig: GpuRig) -> list[Figure]:
    """Counts rounds whose answer differs, and NaNs that an unzeroed slab shows."""
    slabs = rig.backend.create(NUM_POSITIONS, rig.slab_bytes(2), "kit")
    range_ = slabs.reserve(NUM_POSITIONS, poison=True)
    range_.map(0, 0)
    world = PagedAttention(rig, range_)
    num_rounds = rig.count(200)
    differing = sum(not world.round() for _ in range(num_rounds))
    world.release()
    range_.map(NUM_POSITIONS - 1, NUM_POSITIONS - 1)
    range_.unmap(NUM_POSITIONS - 1)
    range_.map(NUM_POSITIONS - 1, NUM_POSITIONS - 1, zero=False)
    num_nan = int(world.blocks[NUM_POSITIONS - 1].isnan().sum())
    peers: dict[str, float | None] = {"rounds": num_rounds, "with a CUDA graph": int(world.has_graph)}
    return [
        Figure(name="poison_differing_rounds", value=differing, unit="rounds", target="0", peers=peers),
        Figure(name="poison_nan_share", value=num_nan / world.blocks[0].numel(), unit="", target="== 1"),
    ]


class PagedAttention:
    """Attention of one query over the blocks that a table names."""

    def __init__(self, rig: GpuRig, range_: SlabRange) -> None:
        self._rig, self._range, self._rng = rig, range_, random.Random(0)
        rows = range_.slab_bytes // (2 * 2 * HEADS * HEAD_SIZE)
        self.blocks = rig.tensor(range_).view(torch.bfloat16).view(NUM_POSITIONS, 2, rows, HEADS, HEAD_SIZE)
        generator = torch.Generator().manual_seed(0)
        shape = (NUM_BLOCKS, 2, rows, HEADS, HEAD_SIZE)
        self._content = torch.randn(shape, generator=generator).to(rig.device, torch.bfloat16)
        self._query = torch.randn((1, HEADS, 1, HEAD_SIZE), generator=generator).to(
            rig.device, torch.bfloat16
        )
        self._positions = self._place(list(range(NUM_BLOCKS)))
        self._table = torch.tensor(self._positions, device=rig.device)
        self._plain_table = torch.arange(NUM_BLOCKS, device=rig.device)
        self._run = self._attend
        self.has_graph = False
        if not rig.is_dry:
            self._run = self._captured()
            self.has_graph = True

    def round(self) -> bool:
        """Moves all blocks; returns whether the answer is what a plain tensor gives."""
        self.release()
        self._positions = self._place(self._rng.sample(range(NUM_POSITIONS - 1), NUM_BLOCKS))
        self._table.copy_(torch.tensor(self._positions))
        expected = self._over(self._content, self._plain_table)
        return torch.equal(self._run(), expected)

    def release(self) -> None:
        """Unmaps all blocks."""
        self._range.unmap_many(self._positions)

    def _place(self, slabs: list[int]) -> list[int]:
        """Maps slabs, other than position 0's, at random positions, and writes the blocks there."""
        positions = self._rng.sample(range(1, NUM_POSITIONS), NUM_BLOCKS)
        self._range.map_many(positions, [slab + 1 for slab in slabs], stream=self._rig.stream())
        for position, content in zip(positions, self._content, strict=True):
            self.blocks[position].copy_(content)
        return positions

    def _attend(self) -> torch.Tensor:
        return self._over(self.blocks, self._table)

    def _over(self, blocks: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        gathered = blocks.index_select(0, table)
        keys, values = (gathered[:, part].flatten(0, 1).transpose(0, 1).unsqueeze(0) for part in (0, 1))
        return torch.nn.functional.scaled_dot_product_attention(self._query, keys, values)

    def _captured(self) -> Callable[[], torch.Tensor]:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._attend()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answer = self._attend()

        def replay() -> torch.Tensor:
            graph.replay()
            return answer

        return replay
