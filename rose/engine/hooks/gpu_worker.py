"""vLLM's GPU worker with its KV cache in the slab pool of its GPU.

Owns the integration of one rank on CUDA; rank.py has what it shares with the CPU. This code has not run on a
GPU: it was written against the source of vLLM 0.32, and its slab backend was tested with a stand-in driver.

It rests on these facts:
- The address range never changes, so CUDA graphs that were captured over it stay valid. Capture, padding
  and warm-up touch only block 0, whose slab stays mapped.
- A step may read a slab until it has completed. With async scheduling two are in flight when a request ends
  and its slabs leave. So slabs are unmapped when the output of the last step that knew them is there
  (rose/engine/memory/step_fence.py), while the device goes on. A drafter computes after that output, and a KV
  connector copies beside it, so with either of them unmapping waits for the device.
- Mapping waits for no step. The zeroing is queued on the model's stream, ahead of the step; with a KV
  connector, whose loads run beside that stream, it is done when the mapping returns.
- Positions without a slab are guarded, so that a stray read finds zeros and ends no context. The guards of a
  batch come as soon as its slabs have been released. A stray read faults only while a slab is exchanged for a
  guard, or a guard for a slab.
"""

from __future__ import annotations

from typing import Any

from vllm.config import set_current_vllm_config

from rose.engine.hooks.rank import RoseWorker
from rose.engine.weights.device_weights import device_bytes
from rose.types import Role

_ANY_FREE_MEMORY = 0.001
"""Share of the GPU that vLLM wants to find free at start. It is tiny because the pool's daemon already holds
the KV memory, and the engine is told its KV size in bytes."""


class RoseGPUWorker(RoseWorker):
    """A rank of a ROSE engine on a CUDA GPU."""

    _sleep_mode_backend: Any  # vLLM's own: a backend once one is needed

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._rose.settings.pool is not None:
            self.cache_config.gpu_memory_utilization = _ANY_FREE_MEMORY

    def sleep(self, level: int = 1) -> None:
        """Takes a rollout engine's weights off the GPU (pinned.py)."""
        if self._rose.settings.role is Role.ROLLOUT and self._sleep_mode_backend is None:
            # Not every supported vLLM has its base class.
            from rose.engine.weights.pinned import PinnedWeightsBackend

            self._sleep_mode_backend = PinnedWeightsBackend(self._staged_weights())
        super().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        with set_current_vllm_config(self.vllm_config):
            super().wake_up(tags)

    def device_use(self) -> tuple[None, int]:
        """Like RoseCPUWorker's, but without a process whose other device memory could be measured."""
        is_away = self._rose.settings.role is Role.ROLLOUT and not self._staged_weights().is_resident
        return None, 0 if is_away else device_bytes(self.get_model())
