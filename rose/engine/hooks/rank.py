"""What one rank of a ROSE engine does on every platform.

Owns a worker's settings and its part of the slab pool. Slab operations arrive with the scheduler's output and
are applied before the step, so all ranks apply them in the same order without further messages. A slab is
free for another engine when the last rank has unmapped its part.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu_worker import Worker

from rose.engine.hooks.connectors import preferred_layout
from rose.engine.hooks.parent import end_with_parent
from rose.engine.hooks.patches import continue_from_generated_tokens, write_cpu_latents_between_layers
from rose.engine.memory.kv_layout import block_layouts, compare_layers_alone
from rose.engine.memory.kv_range import KVRange, SlabOps
from rose.engine.memory.stages import block_of_rank
from rose.engine.scheduling.interrupt import make_interruptible
from rose.engine.settings import EngineSettings
from rose.engine.vllm_version import check_versions
from rose.engine.weights.adapters import check_fits
from rose.engine.weights.weights import StagedWeightEngine
from rose.errors import FrameError, PoolError
from rose.types import Role


class RoseWorker(Worker):
    """vLLM's worker as one rank of a ROSE engine.

    A class for another platform names that platform's worker after this one among its bases, because every
    method here calls ``super()``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rose = EngineRank(self)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        self._rose.make_interruptible()
        self._add_head()

    def _add_head(self) -> None:
        """Has a speculative head or a draft model follow the model."""
        config = self.speculative_config.draft_model_config if self.speculative_config is not None else None
        if config is not None and isinstance(self.weight_transfer_engine, StagedWeightEngine):
            head = self.get_draft_model()
            if head is not None:
                self.weight_transfer_engine.add_head(head, config)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return self._rose.kv_layouts(super().get_supported_kv_cache_layouts())

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self._rose.open_pool(kv_cache_config)
        super().initialize_from_config(kv_cache_config)
        self._rose.check_allocated()

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        context = self._rose.kv_context(tag)
        return context if context is not None else super()._maybe_get_memory_pool_context(tag)

    def compile_or_warm_up_model(self) -> Any:
        with self._rose.warm_up(self.model_runner):
            return super().compile_or_warm_up_model()

    def execute_model(self, scheduler_output: SchedulerOutput) -> Any:
        engine, num_tokens = self.weight_transfer_engine, scheduler_output.total_num_scheduled_tokens
        if num_tokens > 0 and isinstance(engine, StagedWeightEngine) and engine.is_mixed:
            raise FrameError(
                "an update of the weights broke off and left them of no version; start the engine again"
            )
        self._rose.apply(scheduler_output)
        return super().execute_model(scheduler_output)

    def begin_weight_changes(self, paths: list[str], state_hash: str) -> str | None:
        """Calls StagedWeightEngine.begin_changes(), for vLLM's collective_rpc."""
        with set_current_vllm_config(self.vllm_config):
            return self._staged_weights().begin_changes(paths, state_hash)

    def weight_changes_result(self) -> tuple[bool, str | None]:
        """Calls StagedWeightEngine.changes_result(), for vLLM's collective_rpc."""
        return self._staged_weights().changes_result()

    def loaded_weights(self) -> tuple[str | None, str | None, str | None]:
        """Returns the version that was loaded whole since the last update began, why a prepared update was
        loaded whole, and why the drafter was not updated.
        """
        weights = self._staged_weights()
        return weights.version, weights.why_whole, weights.stale_drafter

    def weights_hash(self) -> str | None:
        """Returns the state hash of the weights in use; None before the first update."""
        return self._staged_weights().state_hash

    def give_up_weights(self) -> None:
        """Marks the weights as of no version, because other data-parallel ranks have another version."""
        self._staged_weights().is_mixed = True

    def end_weight_update(self) -> None:
        """Ends the session of an update that failed on other ranks. vLLM ends it where the update failed."""
        if self._weight_update_active:
            self.finish_weight_update()

    def load_newest_weights(self) -> None:
        """Calls StagedWeightEngine.load(), for vLLM's collective_rpc."""
        with set_current_vllm_config(self.vllm_config):
            self._staged_weights().load()

    def adapter_problem(self, folder: str) -> str | None:
        """Returns why a LoRA adapter does not fit this rank's model, for vLLM's collective_rpc."""
        manager = self.model_runner.lora_manager._adapter_manager
        try:
            check_fits(manager, self.vllm_config, Path(folder))
        except (ValueError, FrameError, OSError) as error:
            return str(error)
        return None

    def load_adapter(self, name: str, number: int, folder: str) -> str | None:
        """Loads a LoRA adapter beside the others if it fits this rank's model; returns why it does not, or
        None. One call for both, because each call waits for the end of a step. For vLLM's collective_rpc.
        """
        problem = self.adapter_problem(folder)
        if problem is None:
            self.add_lora(LoRARequest(name, number, folder))
        return problem

    def _staged_weights(self) -> StagedWeightEngine:
        assert isinstance(self.weight_transfer_engine, StagedWeightEngine)
        return self.weight_transfer_engine

    def shutdown(self) -> None:
        super().shutdown()
        self._rose.close()


class EngineRank:
    """ROSE's state of one worker. It is an object of its own because vLLM's worker may use any attribute
    name."""

    def __init__(self, worker: Worker) -> None:
        if worker.parallel_config.world_size > 1:  # else it may be a thread of the caller's program
            end_with_parent()
        additional_config = worker.vllm_config.additional_config
        check_versions(additional_config, f"rank {worker.rank}")
        settings = EngineSettings.parse(additional_config)
        assert settings is not None, "worker class chosen without rose settings"
        self.settings = settings.of_rank(worker.parallel_config.data_parallel_index)
        self._worker = worker
        self._kv: KVRange | None = None
        self._is_allocated = False
        if settings.role is Role.ROLLOUT:
            continue_from_generated_tokens()

    def make_interruptible(self) -> None:
        """Lets a rollout step be paused between its layers, where the scheduler is in this process."""
        is_alone = self._worker.parallel_config.world_size == 1
        if self.settings.role is Role.ROLLOUT and self.settings.pool is not None and is_alone:
            make_interruptible(self._worker.compilation_config.static_forward_context.values())

    def kv_layouts(self, supported: list[str]) -> list[str]:
        """Returns those of the layouts in which the KV cache can lie in slabs, or all without a pool.

        vLLM's list for its CPU kernels has no layout with the layers of a block side by side. They read it
        all the same: any distance between two blocks, as long as a layer's part is in the order LBHNC names.
        """
        if self.settings.pool is None:
            return supported
        is_cpu = self._worker.device.type == "cpu"
        if is_cpu and self._worker.model_config.use_mla:
            write_cpu_latents_between_layers()
        preferred = preferred_layout(self._worker.vllm_config)
        return block_layouts([*supported, "BLHNC"] if is_cpu else supported, preferred)

    def open_pool(self, config: KVCacheConfig) -> None:
        """Attaches to the pool, maps the pinned slab and rewrites ``config`` in place, if there is a pool."""
        if self.settings.pool is None:
            return
        self._kv = KVRange(
            self.settings.pool,
            role=self.settings.role,
            engine_id=self.settings.engine_id,
            rank=self._worker.rank,
            world_size=self._worker.parallel_config.world_size,
            device=self._worker.device,
            poison=self.settings.poison_slabs,
        )
        self._kv.place(config, block_of_rank(config))

    def kv_context(self, tag: str) -> AbstractContextManager[Any] | None:
        """Returns the context of vLLM's allocation of KV memory; None for other memory or without a pool."""
        if tag != "kv_cache" or self._kv is None:
            return None
        self._is_allocated = True
        if has_kv_transfer_group():
            self._register_window(get_kv_transfer_group(), self._kv)
        return self._kv.allocation_context()

    def _register_window(self, connector: Any, kv: KVRange) -> None:
        """Lets a KV connector register the transfer window in place of the memory that the model computes on.

        Why: a connector registers the KV cache once, and the memory behind it changes with every slab that
        moves. vLLM calls the method after the allocation. vLLM 0.30-0.33.
        """
        compare_layers_alone(connector)
        register = connector.register_kv_caches
        if getattr(register, "__func__", None) is not KVConnectorBase_V1.register_kv_caches:
            connector.register_kv_caches = lambda kv_caches: register(kv.over_window(kv_caches))

    def check_allocated(self) -> None:
        """Raises: PoolError if the KV cache lies in other memory than the pool's, as in a memory pool that a
        KV connector brings."""
        if self._kv is not None and not self._is_allocated:
            connector = self._worker.vllm_config.kv_transfer_config.kv_connector
            raise PoolError(
                f"--kv-transfer-config {connector}: it allocates the KV cache itself, and in a slab pool its "
                f"memory is the pool's; choose another protocol (rdma or tcp for Mooncake), or serve without "
                f"--pool"
            )

    @contextmanager
    def warm_up(self, runner: Any) -> Iterator[None]:
        """A context in which vLLM warms up.

        Why: Model Runner V2 warms up on made-up requests with the block ids 1 to n, and most of these have no
        slab. Here they all get block 0, which has one. V1 warms up without block ids. vLLM 0.30-0.33.
        """
        tables = getattr(runner, "block_tables", None)  # V2's alone
        if self._kv is None or tables is None:
            yield
            return
        append = tables.append_block_ids

        def append_block_0(row: int, block_ids: tuple[list[int], ...], overwrite: bool) -> None:
            append(row, tuple([0] * len(ids) for ids in block_ids), overwrite)

        tables.append_block_ids = append_block_0
        try:
            yield
        finally:
            del tables.append_block_ids  # and the class has it again

    def apply(self, scheduler_output: SchedulerOutput) -> None:
        """Applies the slab operations of a step. Call ahead of the step."""
        ops: SlabOps | None = getattr(scheduler_output, "rose_ops", None)
        if ops and self._kv is not None:
            self._kv.apply(ops)

    def close(self) -> None:
        """Detaches from the pool. Call when no step runs any more."""
        if self._kv is not None:
            self._kv.close()
