"""Measures how much memory the engines of a pool hold for KV that somebody may still read.

Owns the arithmetic of `resident_over_live`, on what the engines' status pages say. Live are blocks in use,
blocks that hold prefix cache, and the one block with which vLLM pads. Never changes an engine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rose.measure.models import ROLLOUT_SPEC, SERVING_SPEC
from rose.memory.slabs.layout import SlabLayout
from rose.node.control import EngineControl

NUM_PADDING_BLOCKS = 1


@dataclass(slots=True)
class Residency:
    """One engine's slabs and live blocks, summed over all samples."""

    slab_bytes: int
    block_bytes: int
    """The size of one block, all layers."""
    blocks_per_slab: int
    owned: int = 0
    live: int = 0
    fewest: int = 0
    """Slabs that could hold the live blocks, packed without a gap."""

    def sample(self, engine: EngineControl) -> None:
        """Adds what the engine holds right now."""
        status = engine.status()
        live = status.kv_live_blocks + NUM_PADDING_BLOCKS
        self.owned += status.kv_slabs_owned
        self.live += live
        self.fewest += math.ceil(live / self.blocks_per_slab)


def both_engines(slab_bytes: int) -> list[Residency]:
    """Returns a fresh sum for the demo's rollout model and one for its serving model, in this order."""
    found = []
    for spec in (ROLLOUT_SPEC, SERVING_SPEC):
        block_bytes = spec.num_layers * spec.layer_block_bytes
        layout = SlabLayout.plan(block_bytes=block_bytes, slab_bytes=slab_bytes)
        found.append(Residency(slab_bytes, block_bytes, layout.blocks_per_slab))
    return found


def over_live(engines: Sequence[Residency]) -> float:
    """Returns the bytes of the slabs owned over bytes of the live blocks."""
    return sum(one.owned * one.slab_bytes for one in engines) / sum(
        one.live * one.block_bytes for one in engines
    )


def over_fewest(engines: Sequence[Residency]) -> float:
    """Returns the slabs owned over the fewest that could hold the live blocks."""
    return sum(one.owned for one in engines) / sum(one.fewest for one in engines)
