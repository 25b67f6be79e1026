"""The trainer: the tokens it trains on are the tokens it sent, and a step is rollout, update, publish.

TRL is imported where it is used: it takes seconds, and both processes of pytest import this module.
"""

import asyncio
import json
import random
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from forked_server import ForkedServer

from rose.demo.frozenlake import STARTS, WORDS
from rose.errors import WorkerError
from rose.measure import models
from rose.measure.completions import SESSION_HEADER
from rose.node.processes import ServerProcess
from rose.trainers.turns import RouterTurns
from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.relay.opening import open_relay

Json = dict[str, Any]


class ScriptedServer:
    """A router that says seeded random tokens; runs in a thread of its own."""

    def __init__(self) -> None:
        self.requests: defaultdict[str, list[tuple[Json, list[int]]]] = defaultdict(list)
        self.rl_steps: list[int] = []
        self.announced: list[str | None] = []
        self.hangs = threading.Event()
        self.saw_request = threading.Event()
        self.status = 200
        self._random = random.Random(7)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(300)

    async def _start(self) -> str:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._complete)
        app.router.add_post("/admin/rl_step", self._rl_step)
        self._app_runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._app_runner.setup()
        site = web.TCPSite(self._app_runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self._app_runner.addresses[0][1]}"

    def close(self) -> None:
        self.hangs.clear()
        asyncio.run_coroutine_threadsafe(self._app_runner.cleanup(), self._loop).result(300)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _rl_step(self, request: web.Request) -> web.Response:
        body: Json = await request.json()
        self.rl_steps.append(body["step"])
        self.announced.append(body.get("version"))
        return web.json_response({"step": self.rl_steps[-1], "workers": {}})

    async def _complete(self, request: web.Request) -> web.Response:
        body: Json = await request.json()
        self.saw_request.set()
        while self.hangs.is_set():
            await asyncio.sleep(0.02)
        if self.status != 200:
            return web.Response(status=self.status, text="no such model")
        num_tokens = self._random.randint(1, body["sampling_params"]["max_tokens"])
        token_ids = [self._random.randrange(3, 63) for _ in range(num_tokens)]
        self.requests[request.headers[SESSION_HEADER]].append((body, token_ids))
        choice = {
            "token_ids": token_ids,
            "logprobs": {"content": [{"logprob": -float(token_id)} for token_id in token_ids]},
            "rose": {"weight_version": "run/1"},
        }
        end = {"token_ids": [], "finish_reason": "length"}
        events = [json.dumps({"choices": [each]}) for each in (choice, end)]
        text = "".join(f"data: {event}\n\n" for event in (*events, "[DONE]"))
        return web.Response(text=text, content_type="text/event-stream")


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    yield scripted
    scripted.close()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make_rollout_model(tmp_path_factory.mktemp("rollout"), words=WORDS)


def roll_out(server: ScriptedServer, model_dir: Path, group_size: int) -> Json:
    from transformers import AutoTokenizer

    from rose.demo.trainer import FrozenLakeRollouts

    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    rollouts = FrozenLakeRollouts(tokenizer, RouterTurns(server.url, "rollout"), server.rl_steps.append, 0)
    prompts = [start for start in STARTS for _ in range(group_size)]
    try:
        return rollouts(prompts, SimpleNamespace(state=SimpleNamespace(global_step=0)))
    finally:
        rollouts.close()


@pytest.fixture
def relay_url() -> Iterator[str]:
    command = [sys.executable, "-m", "rose.transfer.relay.server", "--kind", "embedded"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait(300)
        process.stdout.close()


def said_by(requests: list[tuple[Json, list[int]]]) -> list[int]:
    return [token_id for _, token_ids in requests for token_id in token_ids]


def test_trained_tokens_are_the_tokens_sent_and_only_generated_ones_are_masked_in(
    server: ScriptedServer, model_dir: Path
) -> None:
    output = roll_out(server, model_dir, group_size=4)
    assert server.rl_steps == [1]
    assert len(server.requests) == 16
    rows = zip(
        *(output[key] for key in ("prompt_ids", "completion_ids", "env_mask", "logprobs")), strict=True
    )
    for index, (prompt, completion, mask, logprobs) in enumerate(rows):
        requests = server.requests[f"rl-0-1-{index}"]
        assert requests[0][0]["token_ids"] == prompt
        whole = prompt + completion
        for body, token_ids in requests:
            sent = body["token_ids"]
            assert whole[: len(sent)] == sent
            assert whole[len(sent) : len(sent) + len(token_ids)] == token_ids
        assert len(completion) == len(mask) == len(logprobs)
        generated = [token_id for token_id, bit in zip(completion, mask, strict=True) if bit == 1]
        assert generated == said_by(requests)
        assert [-logprob for logprob, bit in zip(logprobs, mask, strict=True) if bit == 1] == generated
        assert all(logprob == 0.0 for logprob, bit in zip(logprobs, mask, strict=True) if bit == 0)
    assert all(0.0 <= reward <= 1.0 for reward in output["game_reward"])


def test_a_refused_turn_is_a_worker_error(server: ScriptedServer, model_dir: Path) -> None:
    server.status = 404
    with pytest.raises(WorkerError, match="HTTP 404: no such model"):
        roll_out(server, model_dir, group_size=1)


def trainer_command(server_url: str, relay_url: str, model_dir: Path, log: Path, *extra: str) -> list[str]:
    where = ["--model", str(model_dir), "--router", server_url, "--relay", relay_url]
    return [*where, "--run-id", "test-run", "--log", str(log), *extra]


@pytest.mark.slow
def test_sigterm_ends_the_process_in_the_middle_of_a_rollout(
    server: ScriptedServer, relay_url: str, model_dir: Path, tmp_path: Path
) -> None:
    server.hangs.set()
    command = trainer_command(server.url, relay_url, model_dir, tmp_path / "training.jsonl")
    argv = [sys.executable, "-m", "rose.demo.trainer", *command]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with ForkedServer(ServerProcess(argv, "trainer", tmp_path / "trainer.log", environment)) as process:
        assert server.saw_request.wait(900), process.log_tail()
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0, process.log_tail()
    assert server.rl_steps == [1]
    assert not (tmp_path / "training.jsonl").exists()


@pytest.mark.slow
def test_the_relay_ends_up_with_the_last_steps_weights(
    server: ScriptedServer, relay_url: str, model_dir: Path, tmp_path: Path
) -> None:
    from rose.demo.trainer import GROUP_SIZE, main

    log = tmp_path / "training.jsonl"
    assert main(trainer_command(server.url, relay_url, model_dir, log, "--steps", "2")) == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert len(server.requests) == 2 * GROUP_SIZE * len(STARTS)
    assert sum(line["num_tokens"] for line in lines) == sum(map(len, map(said_by, server.requests.values())))
    assert server.rl_steps == [1, 2]
    assert server.announced == ["test-run/0", "test-run/1"]
    assert [line["version"] for line in lines] == ["test-run/1", "test-run/2"]
    assert all(line["num_changed"] > 0 for line in lines)
    relay = open_relay(relay_url)
    follower = Follower(relay, "test-run", WeightMirror())
    follower.advance()
    assert str(follower.mirror.version) == "test-run/2"
    assert str(follower.mirror.state_hash) == lines[-1]["state_hash"]
    relay.close()
