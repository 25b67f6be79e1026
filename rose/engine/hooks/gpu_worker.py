"""vLLM's GPU worker with its KV cache in the slab pool of its GPU.

Owns the hook-up of one rank on CUDA. Not run on a GPU yet: written against vLLM 0.32's source, on a slab
backend that has met a stand-in driver only (ARCHITECTURE.md). See rank.py for what it shares with the CPU.

What it rests on:
- The address range never changes, so CUDA graphs that were captured over it stay valid; capture and padding
  touch block 0 alone, whose slab is mapped for good.
- A step may read a slab until it has completed. Operations come with the *next* step, which async scheduling
  being off puts behind this one's tokens, and unmapping waits for the device besides (``fence``).
- Positions without a slab are guarded: a stray read finds zeros and ends nobody's context.
"""

from __future__ import annotations

from typing import Any

from rose.engine.hooks.rank import RoseWorker
from rose.engine.weights.device_weights import device_bytes

_ANY_FREE_MEMORY = 0.001
"""Share of the GPU that vLLM asks to find free at start. The pool's daemon holds the KV memory already, and
the engine is told its KV size in bytes, so the usual share says nothing."""


class RoseGPUWorker(RoseWorker):
    """A rank of a ROSE engine on a CUDA GPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._rose.settings.pool is not None:
            self.cache_config.gpu_memory_utilization = _ANY_FREE_MEMORY

    def device_use(self) -> tuple[None, int]:
        """As RoseCPUWorker's; what the process holds beside weights and slabs is not measured."""
        return None, device_bytes(self.get_model())
