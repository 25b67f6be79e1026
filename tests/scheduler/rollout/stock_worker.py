"""Stock vLLM on the CPU as a rollout worker, in a process of its own."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ENGINE_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
}
SERVED_MODEL = "tiny"
_START_S = 180.0


@dataclass(frozen=True, kw_only=True)
class StockWorker:
    url: str
    model: Path


@contextmanager
def stock_worker(model: Path, log: Path) -> Iterator[StockWorker]:
    """Healthy when it is entered; stopped at the end in any case."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--port", str(port), "--served-model-name", SERVED_MODEL, "--enforce-eager"),
        *("--max-model-len", "512", "--max-num-seqs", "16"),
    ]
    with log.open("w") as output:
        engine = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **ENGINE_ENVIRONMENT}
        )
    try:
        _wait_until_healthy(engine, f"http://127.0.0.1:{port}", log)
        yield StockWorker(url=f"http://127.0.0.1:{port}", model=model)
    finally:
        engine.terminate()
        engine.wait(30)


def _wait_until_healthy(engine: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if engine.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"the engine did not start:\n{log.read_text()[-3000:]}")
