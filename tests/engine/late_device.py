"""A device that computes later than it is told to, as a GPU does: an executor for tests on a CPU.

Its steps run in order on a thread of their own, each a while after it was asked for. Slab operations happen
at once, on the caller's thread, as a GPU driver's calls do; unmapping waits for the device if it is told to.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import vllm.v1.executor
from preloaded import ASYNC
from vllm.v1.executor import UniProcExecutor
from vllm.v1.outputs import AsyncModelRunnerOutput

from rose.engine.memory.step_fence import StepFence

LATE_S = 0.004


class LateDevice(UniProcExecutor):  # type: ignore[misc]
    """One rank on a late device."""

    num_waits = 0
    """Times that unmapping waited for the device."""
    most_in_flight = 0
    num_in_flight = 0
    """Steps whose output is not there yet."""
    steps: ClassVar[list[tuple[float, float]]] = []
    """When each step began on the device, and when it ended (time.monotonic)."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self._thread = ThreadPoolExecutor(1)
        print(f"late device: async scheduling {self.scheduler_config.async_scheduling}", flush=True)

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        worker: Any = self.driver_worker.worker
        kv = worker._rose._kv
        if kv is not None and not isinstance(kv._range, _LateRange):
            kv._range = _LateRange(kv._range, self._wait)
        worker._rose.apply(scheduler_output)
        scheduler_output.rose_ops = None
        if scheduler_output.total_num_scheduled_tokens == 0:
            return self._later(lambda: worker.execute_model(scheduler_output), non_block)
        LateDevice.num_in_flight += 1
        LateDevice.most_in_flight = max(LateDevice.most_in_flight, LateDevice.num_in_flight)

        def step() -> Any:
            self._began_s = time.monotonic()
            time.sleep(LATE_S)
            return worker.execute_model(scheduler_output)

        return self._later(step, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        worker: Any = self.driver_worker.worker

        def sample() -> Any:
            output = worker.sample_tokens(grammar_output)
            output = output.get_output() if isinstance(output, AsyncModelRunnerOutput) else output
            LateDevice.num_in_flight -= 1
            LateDevice.steps.append((self._began_s, time.monotonic()))
            return output

        return self._later(sample, non_block)

    def _later(self, call: Callable[[], Any], non_block: bool) -> Any:
        future: Future[Any] = self._thread.submit(call)
        return future if non_block else future.result()

    def _wait(self) -> None:
        LateDevice.num_waits += 1
        self._thread.submit(lambda: None).result()


class _LateRange:
    """A KV range of the host with the fence of a GPU's."""

    def __init__(self, kv_range: Any, wait: Callable[[], None]) -> None:
        self._range = kv_range
        self._wait = wait

    def fence(self) -> None:
        self._wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._range, name)


def use_late_device(*, is_fenced: bool = True) -> type[LateDevice]:
    """Gives the engines of this process a late device, and async scheduling. Without ``is_fenced``, slabs
    are unmapped under the steps in flight."""
    os.environ.update(ASYNC)
    if not is_fenced:
        StepFence.hold = lambda self, slabs: self._held.append((0, slabs))  # type: ignore[method-assign]
    vllm.v1.executor.UniProcExecutor = LateDevice
    return LateDevice
