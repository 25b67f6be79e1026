"""vLLM's executor for several ranks. It keeps their answer queues in step when a call fails, and waits for
rollout ranks at their own priority.

vLLM 0.30-0.33 stops reading at the first rank that answers with an error. The other ranks' answers then stay
in their queues, and every later call would read the answers of the call before it.

The executor also tells the ranks and the scheduler how large a block is in a pipeline's largest stage.
"""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.kv_cache_interface import KVCacheConfig

from rose.engine.hooks.priority import give_way_on_cpus
from rose.engine.memory.stages import tell_largest_block
from rose.engine.settings import EngineSettings
from rose.types import Role


class RanksExecutor(MultiprocExecutor):
    """One process per rank on this host."""

    response_mqs: list[Any]

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        settings = EngineSettings.parse(self.vllm_config.additional_config)
        if settings is not None and settings.pool is not None:
            tell_largest_block(kv_cache_configs, self.vllm_config)
            if settings.role is Role.ROLLOUT and current_platform.is_cpu():
                # Its ranks give way, and it waits for them busily: above them, it would take their CPU.
                give_way_on_cpus()
        super().initialize_from_config(kv_cache_configs)

    def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("non_block") or kwargs.get("unique_reply_rank") is not None:
            return super().collective_rpc(*args, **kwargs)
        queues = self.response_mqs
        asked = [_Answer(queue) for queue in queues]
        self.response_mqs = asked
        try:
            return super().collective_rpc(*args, **kwargs)
        except RuntimeError:
            # If no queue was read, no rank was asked.
            if any(one.is_read for one in asked) and not self.is_failed:
                for one in asked:
                    one.drain()
            raise
        finally:
            self.response_mqs = queues


class _Answer:
    """One rank's queue during one call, which remembers whether it was read."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.is_read = False

    def dequeue(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._queue.dequeue(*args, **kwargs)
        self.is_read = True
        return answer

    def drain(self) -> None:
        """Waits for an answer that has not been read. It ends early if the rank dies."""
        if not self.is_read:
            self.dequeue()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)
