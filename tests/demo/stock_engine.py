"""Stock vLLM on the CPU, each engine in its own process, for the demo's tests."""

import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forked_engines import make_engine

from rose.config import child_environment

START_TIMEOUT_S = 240.0
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_PLUGINS": "",
}


def first_token(model: Path, prompt: list[int]) -> tuple[int, float]:
    """The greedy choice and its logprob, of an engine made in this process: call it in a ``Fork``."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    engine = make_engine(model, None, dtype="bfloat16", max_model_len=64, max_num_batched_tokens=64)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=1, detokenize=False)
    (answer,) = engine.generate(TokensPrompt(prompt_token_ids=prompt), params, use_tqdm=False)
    (token,) = answer.outputs[0].token_ids
    return token, answer.outputs[0].logprobs[0][token].logprob


@contextmanager
def running_engine(model_dir: Path, served_name: str) -> Iterator[str]:
    """The URL of an engine that serves ``model_dir``; stopped on leaving."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    command += ["--model", str(model_dir), "--port", str(port), "--served-model-name", served_name]
    command += ["--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "32"]
    with tempfile.TemporaryFile("w+") as log:
        engine = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=child_environment(_ENVIRONMENT)
        )
        try:
            if not _becomes_healthy(engine, url):
                log.seek(0)
                raise RuntimeError(f"the engine did not start:\n{log.read()[-3000:]}")
            yield url
        finally:
            engine.terminate()
            engine.wait(60)


def _becomes_healthy(engine: "subprocess.Popen[str]", url: str) -> bool:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while engine.poll() is None and time.monotonic() < deadline_s:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return True
        except OSError:
            time.sleep(0.5)
    return False
