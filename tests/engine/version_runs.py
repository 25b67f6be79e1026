"""Engines of which one process runs another vLLM than the others. Each function runs in its own process."""

from pathlib import Path
from typing import Any

from forked_engines import make_engine

OTHER = "0.31.0"


def start_with_another_rank(model: Path) -> None:
    """Starts an engine of two ranks, of which the second runs another vLLM."""
    import vllm
    from vllm.v1.executor.multiproc_executor import WorkerProc

    original = WorkerProc.worker_main

    def worker_main(*args: Any, **kwargs: Any) -> None:
        if kwargs["rank"] == 1:
            vllm.__version__ = OTHER
        original(*args, **kwargs)

    WorkerProc.worker_main = staticmethod(worker_main)
    make_engine(model, {"role": "rollout"}, tensor_parallel_size=2)


def start_with_another_core(model: Path) -> None:
    """Starts an engine whose core runs another vLLM than the process that configured it."""
    import vllm
    from vllm.v1.engine.core import EngineCore

    original = EngineCore.__init__

    def start(*args: Any, **kwargs: Any) -> None:
        vllm.__version__ = OTHER
        original(*args, **kwargs)

    EngineCore.__init__ = start
    make_engine(model, {"role": "rollout"})
