"""vLLM's executor for several ranks, kept in step when a call fails.

Owns the draining of answers. vLLM 0.30-0.33 stops reading at the first rank whose answer is an error: the
other ranks' answers stay in their queues, and every later call would be given the ones of the call before.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class RanksExecutor(MultiprocExecutor):
    """One process per rank on this host."""

    response_mqs: list[Any]

    def collective_rpc(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("non_block") or kwargs.get("unique_reply_rank") is not None:
            return super().collective_rpc(*args, **kwargs)
        queues = self.response_mqs
        asked = [_Answer(queue) for queue in queues]
        self.response_mqs = asked
        try:
            return super().collective_rpc(*args, **kwargs)
        except RuntimeError:
            # Where nobody was read, nobody was asked.
            if any(one.is_read for one in asked) and not self.is_failed:
                for one in asked:
                    one.drain()
            raise
        finally:
            self.response_mqs = queues


class _Answer:
    """One rank's queue during one call. Everything but reading goes to the queue itself."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.is_read = False

    def dequeue(self, *args: Any, **kwargs: Any) -> Any:
        answer = self._queue.dequeue(*args, **kwargs)
        self.is_read = True
        return answer

    def drain(self) -> None:
        """Waits for the answer if it has not been read; ends early where the rank dies."""
        if not self.is_read:
            self.dequeue()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)
