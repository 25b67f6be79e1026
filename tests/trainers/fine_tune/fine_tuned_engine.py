"""`rose serve --fine-tune` with a tiny model, and a client of its engine."""

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import psutil
from forked_server import ForkedServer
from tiny_models import make_rollout_model

from rose.node.processes import ServerProcess
from rose.ports import free_port

READY_S = 1200.0
TRAINER = "rose.trainers.fine_tune.command"


class Served:
    """`rose serve` with fine-tuning, and a client of it."""

    def __init__(self, folder: Path, rows: Sequence[dict[str, Any]], *flags: str) -> None:
        """``rows`` are the lines of the file. The chat template is the content of all messages."""
        model = make_rollout_model(folder / "model")
        (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
        data, self.lines = folder / "data.jsonl", folder / "steps.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.runtime_dir = folder / "run"
        self.runtime_dir.mkdir(mode=0o700)
        port = free_port()
        self.pool = f"serve-{port}"
        environment = {"ROSE_RUNTIME_DIR": str(self.runtime_dir), "ROSE_CACHE_DIR": str(folder / "cache")}
        argv = [
            *(sys.executable, "-m", "rose.cli", "serve", str(model), "--port", str(port)),
            *("--fine-tune", str(data), "--fine-tune-learning-rate", "0.002"),
            *("--fine-tune-epochs", "100000", "--fine-tune-log", str(self.lines)),
            *("--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", "512", "--max-num-seqs", "4"),
            *flags,
        ]
        self.log = folder / "serve.log"
        serve = ServerProcess(argv, "serve", self.log, environment)
        self.process = ForkedServer(serve, "vllm.entrypoints.openai.api_server", TRAINER).start()
        self.url = f"http://127.0.0.1:{port}"
        self._http = httpx.Client(base_url=self.url, timeout=600.0, trust_env=False)
        self.process.wait_ready(f"{self.url}/health", READY_S)

    def loss(self, texts: Sequence[str]) -> float:
        """The mean loss of the texts by the logprobs that the engine answers with."""
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        choices = self._complete(texts, sampling)
        positions = [each for choice in choices for each in choice["prompt_logprobs"] if each]
        return -fmean(next(iter(position.values()))["logprob"] for position in positions)

    def answers(self, prompts: Sequence[str], max_tokens: int) -> list[str]:
        """Sampled answers, one to each prompt."""
        choices = self._complete(prompts, {"max_tokens": max_tokens, "temperature": 1.0})
        return [choice["text"] for choice in choices]

    def _complete(self, prompts: Sequence[str], sampling: dict[str, Any]) -> list[Any]:
        body = {"model": "tiny", "prompt": list(prompts), **sampling}
        answer = self._http.post("/v1/completions", json=body).raise_for_status()
        found: list[Any] = answer.json()["choices"]
        return found

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self._http.get("/rose/v1/status").raise_for_status().json()
        return found

    def trainers(self) -> list[psutil.Process]:
        """The living processes of the trainer, in the order of their ranks."""
        found = []
        for pid in re.findall(r"started name=trainer(?:-\d+)? pid=(\d+)", self.log.read_text()):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(pid))
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def close(self) -> None:
        self._http.close()
        self.process.stop()


def until(condition: Callable[[], object], what: str, served: Served, at_most_s: float = 600.0) -> None:
    deadline_s = time.monotonic() + at_most_s
    while not condition():
        assert served.process.is_alive() and time.monotonic() < deadline_s, (
            f"{what}:\n{served.process.log_tail()}"
        )
        time.sleep(2.0)  # the trainer computes while nothing is asked
