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

from contextlib import AbstractContextManager
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu_worker import Worker

from rose.engine.rank import EngineRank
from rose.engine.weights import device_bytes

_ANY_FREE_MEMORY = 0.001
"""Share of the GPU that vLLM asks to find free at start. The pool's daemon holds the KV memory already, and
the engine is told its KV size in bytes, so the usual share says nothing."""


class RoseGPUWorker(Worker):
    """A rank of a ROSE engine on a CUDA GPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rose = EngineRank(self)
        if self._rose.settings.pool is not None:
            self.cache_config.gpu_memory_utilization = _ANY_FREE_MEMORY

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self._rose.open_pool(kv_cache_config)
        super().initialize_from_config(kv_cache_config)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        context = self._rose.kv_context(tag)
        return context if context is not None else super()._maybe_get_memory_pool_context(tag)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        self._rose.apply(scheduler_output)
        return super().execute_model(scheduler_output)

    def device_use(self) -> tuple[None, int]:
        """As RoseCPUWorker's; what the process holds beside weights and slabs is not measured."""
        return None, device_bytes(self.get_model())

    def shutdown(self) -> None:
        super().shutdown()
        self._rose.close()
