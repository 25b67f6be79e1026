"""`rose serve --fine-tune` on a real engine: it learns texts or preferences, and the trainer may die."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import psutil
import pytest
from forked_server import ForkedServer
from tiny_models import make_rollout_model

from rose.admission.board_snapshot import snapshot
from rose.memory.pool.pool import PoolClient
from rose.node.processes import ServerProcess
from rose.ports import free_port

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

READY_S = 1200.0
TRAINER = "rose.trainers.fine_tune.command"
WORDS = [f"w{number}" for number in range(100)]
TEXTS = [" ".join(WORDS[start : start + 24]) for start in range(0, 72, 6)]
"""Each word is followed by the next one."""
PAIRS = [
    {
        "prompt": WORDS[n],
        "chosen": f"{WORDS[n + 1]} {WORDS[n + 2]}",
        "rejected": f"{WORDS[n + 20]} {WORDS[n]}",
    }
    for n in range(0, 60, 5)
]


class Served:
    """`rose serve` with fine-tuning, and a client of it."""

    def __init__(self, folder: Path, rows: Sequence[dict[str, str]], *flags: str) -> None:
        model = make_rollout_model(folder / "model")
        data, self.lines = folder / "data.jsonl", folder / "steps.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self.runtime_dir = folder / "run"
        self.runtime_dir.mkdir(mode=0o700)
        port = free_port()
        self.pool = f"serve-{port}"
        environment = {"ROSE_RUNTIME_DIR": str(self.runtime_dir), "ROSE_CACHE_DIR": str(folder / "cache")}
        argv = [
            *(sys.executable, "-m", "rose.cli", "serve", str(model), "--port", str(port)),
            *("--fine-tune", str(data), "--fine-tune-learning-rate", "0.002", "--fine-tune-epochs", "100000"),
            *("--fine-tune-publish-s", "3", "--fine-tune-log", str(self.lines)),
            *("--served-model-name", "tiny", "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", "512", "--max-num-seqs", "4"),
            *flags,
        ]
        self.log = folder / "serve.log"
        serve = ServerProcess(argv, "serve", self.log, environment)
        self.process = ForkedServer(serve, "vllm.entrypoints.openai.api_server", TRAINER).start()
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=600.0, trust_env=False)
        self.process.wait_ready(f"http://127.0.0.1:{port}/health", READY_S)

    def loss(self, texts: Sequence[str] = tuple(TEXTS)) -> float:
        """The mean loss of the texts by the logprobs that the engine answers with."""
        sampling = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        body = {"model": "tiny", "prompt": list(texts), **sampling}
        answer = self._http.post("/v1/completions", json=body)
        answer.raise_for_status()
        positions = [
            each for choice in answer.json()["choices"] for each in choice["prompt_logprobs"] if each
        ]
        return -fmean(next(iter(position.values()))["logprob"] for position in positions)

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


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with TemporaryDirectory(prefix="rose-test-") as folder:  # short, as a socket's path may have 107 bytes
        made = Served(Path(folder), [{"text": text} for text in TEXTS])
        yield made
        made.close()


def until(condition: Callable[[], object], what: str, served: Served, at_most_s: float = 600.0) -> None:
    deadline_s = time.monotonic() + at_most_s
    while not condition():
        assert served.process.is_alive() and time.monotonic() < deadline_s, (
            f"{what}:\n{served.process.log_tail()}"
        )
        time.sleep(2.0)  # the trainer computes while nothing is asked


def test_the_served_loss_falls_without_a_restart_and_serving_outlives_the_trainer(served: Served) -> None:
    before = served.loss()
    engine_id = served.status()["engine_id"]
    until(lambda: served.loss() < before - 1.0, "the served loss falls", served)
    status = served.status()
    assert status["engine_id"] == engine_id
    assert int(status["weight_version"].rpartition("/")[2]) >= 1
    steps = [json.loads(line) for line in served.lines.read_text().splitlines()]
    assert steps[-1]["loss"] < steps[0]["loss"] - 1.0
    assert steps[-1]["grants"] > len(steps)  # a step is several pieces

    [trainer] = served.trainers()
    with PoolClient.observe(served.pool, runtime_dir=served.runtime_dir) as observer:
        board = observer.board_words
        until(lambda: snapshot(board).rollout.num_steps > 0, "the trainer computes", served)
        trainer.kill()
        until(lambda: not snapshot(board).rollout.alive, "the trainer is gone", served)
        versions = {served.status()["weight_version"] for _ in range(3)}
        after = [served.loss() for _ in range(3)]
    assert max(after) < before - 1.0 and len(versions) == 1
    until(lambda: "died name=trainer" in served.log.read_text(), "a line about the trainer", served)
    assert served.process.is_alive()


def test_two_processes_train_as_one_guest_and_end_together() -> None:
    with TemporaryDirectory(prefix="rose-test-") as folder:
        served = Served(Path(folder), [{"text": text} for text in TEXTS], "--fine-tune-processes", "2")
        try:
            before = served.loss()
            until(lambda: served.loss() < before - 0.3, "the served loss falls", served)
            _, follower = served.trainers()
            with PoolClient.observe(served.pool, runtime_dir=served.runtime_dir) as observer:
                board = observer.board_words
                until(lambda: snapshot(board).rollout.num_steps > 0, "the trainer computes", served)
                assert len(snapshot(board).guests) == 1
                follower.kill()
                until(lambda: not served.trainers(), "the end of the other process", served)
                assert not snapshot(board).rollout.alive
            until(lambda: "died name=trainer-1" in served.log.read_text(), "a line about it", served)
            assert served.loss() < before - 0.3 and served.process.is_alive()
        finally:
            served.close()


def test_what_is_served_learns_to_prefer_the_chosen_answers() -> None:
    pytest.importorskip("trl", reason="trl is not installed")
    with TemporaryDirectory(prefix="rose-test-") as folder:
        served = Served(Path(folder), PAIRS)
        try:

            def preference() -> float:
                """By how many nats a token the rejected answers are less likely than the chosen ones."""
                chosen, rejected = (
                    [f"{p['prompt']} {p[kind]}" for p in PAIRS] for kind in ("chosen", "rejected")
                )
                return served.loss(rejected) - served.loss(chosen)

            before = preference()
            until(lambda: preference() > before + 1.0, "the chosen answers become likelier", served)
            steps = [json.loads(line) for line in served.lines.read_text().splitlines()]
            assert steps[-1]["loss"] < steps[0]["loss"] and steps[-1]["grants"] > len(steps)
        finally:
            served.close()
