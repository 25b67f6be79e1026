"""vLLM's CPU worker with its KV cache in the slab pool.

Owns the integration of one rank on the CPU platform, where weights also come and go. rank.py has the rest.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from rose.engine.hooks.priority import give_way_on_cpus
from rose.engine.hooks.rank import RoseWorker
from rose.engine.weights.device_weights import device_bytes
from rose.types import Role

if TYPE_CHECKING:
    from rose.engine.weights.sleep import HostWeightsBackend


class RoseCPUWorker(RoseWorker, CPUWorker):
    """A rank of a ROSE engine on the CPU platform."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_placed = False
        # No engine argument sets this; vLLM looks the backend up by its name when first told to sleep.
        self.model_config.sleep_mode_backend = "rose"

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """Has vLLM end a step wherever a prefill reaches a state that it caches.

        Why: Mamba2 layers promise to hand out such a state from the midst of a step. Their kernel for CPUs
        returns the last state alone, and the first such prefill ends a stock engine too (vLLM 0.32).
        """
        promised = {"num_prefill_checkpoint_blocks": 0, "prefill_checkpoint_alignment": None}
        specs = super().get_kv_cache_spec()
        return {
            layer: replace(spec, **promised) if hasattr(spec, "prefill_checkpoint_alignment") else spec
            for layer, spec in specs.items()
        }

    def compile_or_warm_up_model(self) -> Any:
        """Makes the buffers in which a pipeline's later ranks receive.

        Why: vLLM makes them in the trial step before compiling, which an engine without compilation skips on
        the CPU, and its first request ends it (vLLM 0.32).
        """
        runner = self.model_runner
        if not self.use_v2_model_runner and not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return super().compile_or_warm_up_model()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        if not self._is_placed and scheduler_output.total_num_scheduled_tokens > 0:
            self._place_on_cpus()
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Hides the generators of rows whose sample is thrown away because their prefill goes on.

        Why: vLLM rewinds those generators by an offset that CPU generators don't have, and the engine dies
        (seen with a seeded request whose prefill the gate had split). Hidden generators are not advanced.
        Model Runner V2 has none: its sampler takes its seeds from the request's state.
        """
        if self.use_v2_model_runner:
            return super().sample_tokens(grammar_output)
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
        if self._rose.settings.role is Role.ROLLOUT:
            self._weights_backend().suspend(level)
        else:
            super().sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        if self._rose.settings.role is Role.ROLLOUT:
            with set_current_vllm_config(self.vllm_config):
                self._weights_backend().resume(tags)
        else:
            super().wake_up(tags)

    def device_use(self) -> tuple[int, int]:
        """Returns this process, whose anonymous memory stands for device memory, and its weights' bytes. It
        is called through vLLM's collective_rpc."""
        return os.getpid(), device_bytes(self.get_model())

    def _weights_backend(self) -> HostWeightsBackend:
        from rose.engine.weights.sleep import (
            HostWeightsBackend,  # not every supported vLLM has its base class
        )

        backend = self.sleep_mode_backend
        assert isinstance(backend, HostWeightsBackend)
        backend.attach(self._staged_weights())
        return backend

    def _place_on_cpus(self) -> None:
        """Pins the calling thread alone; threads that only move bytes stay off the CPUs that stand for a GPU.

        It happens at the first step with tokens. Earlier, the process that started the engine may still move
        all of its threads.
        """
        self._is_placed = True
        settings = self._rose.settings
        if settings.compute_cpus is not None:
            os.sched_setaffinity(0, {int(cpu) for cpu in settings.compute_cpus.split(",")})
        if settings.role is Role.ROLLOUT and settings.pool is not None:
            give_way_on_cpus()
