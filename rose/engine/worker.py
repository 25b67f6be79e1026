"""vLLM's CPU worker with its KV cache in the slab pool.

Owns the hook-up of one rank. Slab operations arrive on the scheduler's output and are applied before the
step that needs them, so every rank sees the same order without extra messages.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from vllm.config import set_current_vllm_config
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_worker import CPUWorker

from rose.engine.kv_range import KVRange, SlabOps
from rose.engine.settings import EngineSettings
from rose.engine.weights import StagedWeightEngine, device_bytes
from rose.types import Role

if TYPE_CHECKING:
    from rose.engine.sleep import HostWeightsBackend


class RoseCPUWorker(CPUWorker):
    """A rank of a ROSE engine on the CPU platform."""

    _settings: EngineSettings
    _kv: KVRange | None = None
    _is_pinned = False

    def init_device(self) -> None:
        settings = EngineSettings.parse(self.vllm_config.additional_config)
        assert settings is not None, "worker class chosen without rose settings"
        self._settings = settings
        # No engine argument leads here; vLLM looks the backend up by this name when first told to sleep.
        self.model_config.sleep_mode_backend = "rose"
        super().init_device()

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        if self._settings.pool is not None:
            self._kv = KVRange(
                self._settings.pool,
                role=self._settings.role,
                engine_id=self._settings.engine_id,
                rank=self.rank,
                world_size=self.parallel_config.world_size,
                poison=self._settings.poison_slabs,
            )
            self._kv.place(kv_cache_config)
        super().initialize_from_config(kv_cache_config)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        if tag == "kv_cache" and self._kv is not None:
            return self._kv.allocation_context()
        return super()._maybe_get_memory_pool_context(tag)

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        if not self._is_pinned and scheduler_output.total_num_scheduled_tokens > 0:
            self._pin_to_compute_cpus()
        ops: SlabOps | None = getattr(scheduler_output, "rose_ops", None)
        if ops and self._kv is not None:
            self._kv.apply(ops)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Hides the generators of rows whose sample is thrown away (a prefill that goes on).

        vLLM rewinds those by an offset that CPU generators don't have, and the engine dies (seen with a
        seeded request whose prefill the gate had split). Hidden, they are not advanced in the first place.
        """
        runner = self.model_runner
        discarded = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()
        generators = runner.input_batch.generators
        hidden = {row: generators.pop(row) for row in discarded if row in generators}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(hidden)

    # Activation ---------------------------------------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        if self._settings.role is Role.ROLLOUT:
            self._weights_backend().suspend(level)
        else:
            super().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        if self._settings.role is Role.ROLLOUT:
            with set_current_vllm_config(self.vllm_config):
                self._weights_backend().resume(tags)
        else:
            super().wake_up(tags)

    def weights_on_device(self) -> int:
        """Bytes; called through vLLM's collective_rpc."""
        return device_bytes(self.get_model())

    def _weights_backend(self) -> HostWeightsBackend:
        from rose.engine.sleep import HostWeightsBackend  # not every supported vLLM has its base class

        backend = self.sleep_mode_backend
        assert isinstance(backend, HostWeightsBackend)
        assert isinstance(self.weight_transfer_engine, StagedWeightEngine)
        backend.attach(self.weight_transfer_engine)
        return backend

    def shutdown(self) -> None:
        super().shutdown()
        if self._kv is not None:
            self._kv.close()

    def _pin_to_compute_cpus(self) -> None:
        """Pin the calling thread alone: those that only move bytes stay off the CPUs that stand for a GPU.

        At the first step with tokens, not at start-up or at an empty step that a wake-up caused: whoever
        started the engine may still move all its threads then.
        """
        self._is_pinned = True
        if self._settings.compute_cpus is not None:
            os.sched_setaffinity(0, {int(cpu) for cpu in self._settings.compute_cpus.split(",")})
