"""Async scheduling on a CPU, where vLLM turns it off: in processes whose environment has preloaded.ASYNC.
With preloaded.LATE, they compute on a late device.

The process that tests fork theirs from imports this (preloaded.py), so it holds in API servers, engine cores
and ranks.
"""

import functools
import os
from typing import Any

from preloaded import ASYNC, LATE
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.executor import UniProcExecutor

_turn_off = CpuPlatform.check_and_update_config


@functools.wraps(_turn_off)
def _keep(config: Any) -> None:
    chosen = config.scheduler_config.async_scheduling
    _turn_off(config)
    if ASYNC.items() <= os.environ.items():
        config.scheduler_config.async_scheduling = chosen
    parallel = config.parallel_config
    if LATE.items() <= os.environ.items() and parallel.distributed_executor_backend is UniProcExecutor:
        from late_device import LateDevice

        parallel.distributed_executor_backend = LateDevice


CpuPlatform.check_and_update_config = staticmethod(_keep)
