"""Async scheduling on a CPU, where vLLM turns it off: in processes whose environment has preloaded.ASYNC.

The process that tests fork theirs from imports this (preloaded.py), so it holds in API servers, engine cores
and ranks.
"""

import functools
import os
from typing import Any

from preloaded import ASYNC
from vllm.platforms.cpu import CpuPlatform

_turn_off = CpuPlatform.check_and_update_config


@functools.wraps(_turn_off)
def _keep(config: Any) -> None:
    chosen = config.scheduler_config.async_scheduling
    _turn_off(config)
    if ASYNC.items() <= os.environ.items():
        config.scheduler_config.async_scheduling = chosen


CpuPlatform.check_and_update_config = staticmethod(_keep)
