"""The process with vLLM loaded, from which the tests fork theirs: an import of vLLM takes 20 s of CPU.

Trainers are forked from it as well.
"""

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from typing import Any
from unittest.mock import patch

_server: Any = import_module("multiprocessing.forkserver")._forkserver
ASYNC = {"ROSE_TEST_ASYNC": "1"}
"""Environment of engines with async scheduling (async_on_cpu.py)."""
LATE = {**ASYNC, "ROSE_TEST_LATE": "1"}
"""The same for engines with a server, on a late device (late_device.py)."""
STAGES = "VLLM_PP_LAYER_PARTITION"
"""The variable in which vLLM finds how many layers each stage of a pipeline has, with commas."""
LAST = "settled"
MODULES = (
    *("vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "vllm.v1.engine.core"),
    *("vllm.entrypoints.launchers.api_server.entry", "vllm.entrypoints.launchers.api_server.app_state"),
    *("vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner", "vllm.v1.core.sched.scheduler"),
    *("vllm.v1.attention.backends.cpu_attn", "vllm.model_executor.models.qwen3"),
    *("vllm.v1.core.sched.async_scheduler", "async_on_cpu", "inspecting", "compressed_tensors.quantization"),
    *("torch._dynamo", "torch.distributed.fsdp", "transformers.models.qwen3.modeling_qwen3"),
    # What the engines of tests do, and ROSE's parts of an engine, which vLLM would have them import.
    *("async_pair", "cache_runs", "mooncake_runs", "phase_runs", "speculative_runs"),
    *("rose.engine.hooks.executor", "rose.engine.hooks.patches", "rose.engine.hooks.worker"),
    *("rose.engine.scheduling.rollout_scheduler", "rose.engine.scheduling.serving_scheduler"),
    "rose.engine.http.endpoint",
    # What trainers import. TRL itself looks at its import for distributions that only some tests have.
    *(name for name in ("transformers.trainer", "accelerate", "datasets") if find_spec(name.split(".")[0])),
)
FORKS = get_context("forkserver")
FORKS.set_forkserver_preload([*MODULES, LAST])


def ensure_running() -> None:
    """Starts the process with vLLM, unless it runs. It finds the tests' modules by PYTHONPATH: Python 3.11
    does not hand it the path, and skips what it can't import."""
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        _server.ensure_running()


def start_fork(target: Callable[..., None], *args: Any, daemon: bool = False) -> ForkServerProcess:
    """``target(*args)`` in a fork."""
    ensure_running()
    process = FORKS.Process(target=_run_preloaded, args=(target, args), daemon=daemon)
    process.start()
    return process


def _run_preloaded(target: Callable[..., None], args: tuple[Any, ...]) -> None:
    assert LAST in sys.modules, "the process that tests fork theirs from has not loaded vLLM"
    target(*args)
