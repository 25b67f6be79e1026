"""Stock vLLM on the CPU as a rollout worker, in a process of its own."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forked_server import ForkedServer

from rose.node.processes import ServerProcess
from rose.ports import free_port

ENGINE_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}
SERVED_MODEL = "tiny"
_START_S = 900.0


@dataclass(frozen=True, kw_only=True)
class StockWorker:
    url: str
    model: Path


@contextmanager
def stock_worker(model: Path, log: Path) -> Iterator[StockWorker]:
    """Healthy when it is entered; stopped at the end in any case."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    argv = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--port", str(port), "--served-model-name", SERVED_MODEL, "--enforce-eager"),
        *("--max-model-len", "512", "--max-num-seqs", "16"),
    ]
    with ForkedServer(ServerProcess(argv, "engine", log, ENGINE_ENVIRONMENT)) as engine:
        engine.wait_ready(f"{url}/health", _START_S)
        yield StockWorker(url=url, model=model)
