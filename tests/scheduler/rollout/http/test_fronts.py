"""Fronts beside the router: which requests they get, and their life as processes. What they say is tested in
tests/engine/front."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from rose.errors import ConfigError
from rose.http import FRONT_HEADERS, FRONT_SECRET_HEADER
from rose.scheduler.rollout.formats.chat import suits_front
from rose.scheduler.rollout.http import front_process, fronts, handshakes, service
from rose.scheduler.rollout.http.command import main
from rose.scheduler.rollout.http.front_process import Front
from rose.scheduler.rollout.http.fronts import Fronts, front_environment
from rose.scheduler.rollout.router_config import FrontSpec
from tests.scheduler.rollout.conftest import Client, StartRouter, deaf_client
from tests.scheduler.rollout.scripted_worker import ScriptedWorker
from tests.scheduler.rollout.waiting import until

SAID = [{"role": "user", "content": "hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]


@pytest.mark.parametrize(
    ("more", "suits"),
    [
        ({"tools": [{}]}, True),
        ({"stop": ["x"], "presence_penalty": 1.0}, True),
        ({"use_beam_search": True}, False),
        ({"prompt_logprobs": 0}, False),
        ({"thinking_token_budget": 5}, False),
        ({"messages": IMAGE}, False),
    ],
)
def test_fronts_get_chats_of_text_that_token_level_turns_can_make(more: dict[str, Any], suits: bool) -> None:
    assert suits_front({"messages": SAID, **more}) is suits


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_what_only_a_front_understands_is_refused_without_one(
    start_router: StartRouter, path: str
) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        status, answer = await client.post(path, {"model": "scripted", "input": "hi", "messages": SAID})
        assert status == 404
        assert "--front 1 -- --model DIR" in answer["error"]["message"]
        assert not worker.requests


STARTING = {"count": 1, "flags": ["--model", "nowhere"]}


async def test_while_no_front_is_ready_chats_go_whole_and_the_rest_is_told_to_wait(
    start_router: StartRouter,
) -> None:
    async with ScriptedWorker() as worker, start_router(worker, fronts=STARTING) as client:
        chat = {"model": "scripted", "messages": SAID, "tools": [{}]}
        status, _ = await client.post("/v1/chat/completions", chat)
        assert (status, worker.requests[-1]["messages"]) == (200, SAID)
        status, answer = await client.post("/v1/responses", {"model": "scripted", "input": "hi"})
        assert (status, answer["error"]["type"]) == (503, "ServiceUnavailableError")
        assert "fronts" in answer["error"]["message"]
        assert (await client.get("/health"))[1]["fronts"] == 0


@pytest.mark.parametrize("flags", [["--served-model-name", "m", "n"], ["--served-model-name=m"]])
async def test_a_front_is_for_the_models_that_its_flags_name(flags: list[str]) -> None:
    started = Fronts(FrontSpec(count=1, flags=("--model", "nowhere", *flags)), "key", "secret")
    started.start("http://127.0.0.1:9")
    try:
        assert started.serve("m") and started.serve(None)
        assert not started.serve("other")
    finally:
        await started.close()


async def test_a_front_that_refuses_its_flags_ends_the_router_unless_one_has_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_process, "_FIRST_PAUSE_S", 0.01)
    front = Front("front-0", tmp_path / "0", [sys.executable, "-c", "raise SystemExit(2)"], {})
    try:
        with pytest.raises(ConfigError, match="front-0 ended with status 2"):
            await front.run(lambda: False)
        served = [True, True, False]
        with pytest.raises(ConfigError):
            await front.run(lambda: served.pop(0))
        assert not served
    finally:
        await front.stop()


async def test_a_front_whose_process_cant_be_started_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_process, "_FIRST_PAUSE_S", 0.01)
    program = tmp_path / "program"
    front = Front("front-0", tmp_path / "0", [str(program)], {})
    task = asyncio.create_task(front.run(lambda: False))
    try:
        await asyncio.sleep(0.1)
        assert not task.done()
        program.write_text("#!/bin/sh\nexit 2\n")
        program.chmod(0o755)
        with pytest.raises(ConfigError):
            await asyncio.wait_for(task, 30)
    finally:
        await front.stop()


STANDS_IN = """
import asyncio, json, os, sys, threading
from aiohttp import web

def end():
    sys.stdin.read()
    open(sys.argv[1] + ".ended", "w").close()
    os._exit(0)

threading.Thread(target=end, daemon=True).start()
open(sys.argv[1] + ".started", "a").write(json.dumps([os.getpid(), sys.argv[2:], dict(os.environ)]) + "\\n")
refused = os.path.exists(sys.argv[1] + ".refuses")

async def models(request):
    if refused:
        return web.json_response({"error": "Unauthorized"}, status=401)
    return web.json_response({"data": [{"id": "m"}]})

async def health(request):
    return web.Response()

async def hang(request):
    body = await request.json()
    if not body.get("stream"):
        await asyncio.sleep(600)
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    while body.get("user") != "nobody":
        await answer.write(b"data: {}\\n\\n" * 4096)
    return answer

app = web.Application()
app.router.add_get("/v1/models", models)
app.router.add_get("/health", health)
app.router.add_post("/v1/chat/completions", hang)
web.run_app(app, path=sys.argv[1], print=None, keepalive_timeout=60)
"""
"""A process with a front's routes, which notes its starts and that its input ended."""


class StandIn:
    """A front whose process is a stand-in."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "0"
        argv = [sys.executable, "-c", STANDS_IN, str(self.socket)]
        self.front = Front("front-0", self.socket, argv, dict(os.environ))

    async def __aenter__(self) -> "StandIn":
        self._task = asyncio.create_task(self.front.run(lambda: False))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await self.front.stop()

    async def until_ready(self) -> None:
        await until(lambda: self.front.models is not None, 60)

    @property
    def starts(self) -> list[Any]:
        """The process id, further arguments and environment of each start."""
        lines = Path(f"{self.socket}.started").read_text().splitlines()
        return [json.loads(line) for line in lines]


async def test_a_front_is_ended_by_its_input_and_shares_no_session(tmp_path: Path) -> None:
    async with StandIn(tmp_path) as stand_in:
        await stand_in.until_ready()
        ((pid, _, _),) = stand_in.starts
        assert os.getsid(pid) != os.getsid(0)
    assert Path(f"{stand_in.socket}.ended").exists()


@pytest.mark.slow
async def test_a_front_that_hangs_is_ended_and_started_again_for_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_process, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(front_process, "_HEALTH_EVERY_S", 0.05)
    monkeypatch.setattr(front_process, "_ANSWER_TIMEOUT", aiohttp.ClientTimeout(total=2.0))
    async with StandIn(tmp_path) as stand_in:
        await stand_in.until_ready()
        os.kill(stand_in.starts[0][0], signal.SIGSTOP)
        await until(lambda: stand_in.front.models is None, 60)
        await stand_in.until_ready()
        assert [arguments for _, arguments, _ in stand_in.starts] == [[], ["--served-model-name", "m"]]


async def test_a_front_that_refuses_the_routers_question_is_asked_again(tmp_path: Path) -> None:
    refuses = tmp_path / "0.refuses"
    refuses.touch()
    async with StandIn(tmp_path) as stand_in:
        await until(stand_in.socket.exists, 60)
        assert not await stand_in.front._is_ready()
        assert stand_in.front.models is None


async def test_idle_connections_to_a_front_are_closed_before_the_front_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_process, "KEEPALIVE_S", 0.05)
    peers = []

    async def answer(request: web.Request) -> web.Response:
        peers.append(request.transport)
        return web.Response()

    app = web.Application()
    app.router.add_get("/", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "0")).start()
    front = Front("front-0", tmp_path / "0", [], {})
    try:
        for _ in range(2):
            async with front.http.get("/") as response:
                await response.read()
            await asyncio.sleep(0.3)
        assert peers[0] is not peers[1]
    finally:
        await front.stop()
        await runner.cleanup()


@asynccontextmanager
async def behind(router: AbstractAsyncContextManager[Client], stand_in: StandIn) -> AsyncIterator[Client]:
    """Starts the router with this front for its one model; it has not started the front's process itself."""
    await stand_in.until_ready()
    stand_in.front.models = stand_in.front.known = frozenset(["scripted"])
    async with router as client:
        client.router._service.fronts._fronts.append(stand_in.front)
        yield client
        client.router._service.fronts._fronts.remove(stand_in.front)


@pytest.mark.parametrize("takes_over", [False, True])
@pytest.mark.slow
async def test_a_chat_with_a_grammar_goes_whole_where_no_engine_knows_where_it_begins(
    start_router: StartRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_over: bool
) -> None:
    monkeypatch.setattr(fronts, "_LATER_S", 0.1)
    chat = {"messages": SAID, "tools": [{}], "tool_choice": "required"}
    async with (
        ScriptedWorker(continues_state=takes_over) as worker,
        StandIn(tmp_path) as stand_in,
        behind(start_router(worker, fronts=STARTING), stand_in) as client,
    ):
        await until(lambda: client.known(worker).continues_state is takes_over)
        status, _ = await client.post("/v1/chat/completions", chat, X_Rose_Timeout_S="1")
        assert status == (504 if takes_over else 200)  # the stand-in never answers


async def test_a_chat_that_its_front_does_not_answer_ends_with_its_deadline(
    start_router: StartRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fronts, "_LATER_S", 0.1)
    chat = {"messages": SAID, "tools": [{}]}
    async with (
        ScriptedWorker() as worker,
        StandIn(tmp_path) as stand_in,
        behind(start_router(worker, fronts=STARTING), stand_in) as client,
    ):
        status, answer = await client.post("/v1/chat/completions", chat, X_Rose_Timeout_S="0.2")
        assert (status, "front-0 has not answered" in answer["error"]["message"]) == (504, True)


@pytest.mark.slow
async def test_a_client_that_reads_nothing_of_a_chat_leaves_its_front_too(
    start_router: StartRouter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "UNREAD_S", 0.5)
    chat = {"messages": SAID, "tools": [{}], "stream": True}
    async with (
        ScriptedWorker() as worker,
        StandIn(tmp_path) as stand_in,
        behind(start_router(worker, fronts=STARTING), stand_in) as client,
    ):
        deaf = deaf_client(client.router.url, "/v1/chat/completions", chat)
        await until(lambda: stand_in.front.in_flight == 1)
        await until(lambda: stand_in.front.in_flight == 0)
        deaf.close()


async def test_a_client_that_leaves_its_stream_is_no_fault_of_the_front(
    start_router: StartRouter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def leave(request: web.Request, response: web.StreamResponse) -> None:
        if not isinstance(response, web.Response):
            assert request.transport is not None
            request.transport.abort()  # the server learns of it before the request is cancelled

    monkeypatch.setattr(service, "name_server", leave)
    chat = {"messages": SAID, "tools": [{}], "stream": True}
    async with (
        ScriptedWorker() as worker,
        StandIn(tmp_path) as stand_in,
        behind(start_router(worker, fronts=STARTING), stand_in) as client,
    ):
        with pytest.raises(aiohttp.ClientError):
            await client.http.post(f"{client.router.url}/v1/chat/completions", json=chat)
        await until(lambda: stand_in.front.in_flight == 0)
    assert "broke off" not in caplog.text


async def test_an_empty_stream_of_a_front_is_handed_on_and_leaves_nothing_behind(
    start_router: StartRouter, tmp_path: Path
) -> None:
    chat = {"messages": SAID, "tools": [{}], "stream": True, "user": "nobody"}
    async with (
        ScriptedWorker() as worker,
        StandIn(tmp_path) as stand_in,
        behind(start_router(worker, fronts=STARTING), stand_in) as client,
    ):
        url = f"{client.router.url}/v1/chat/completions"
        async with client.http.post(url, json=chat) as response:
            assert (response.status, await response.read()) == (200, b"")
        assert not client.router._service._guard.handled


def test_fronts_have_no_keys_but_the_routers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("VLLM_API_KEY", "ROSE_KEY", "ROSE_ROUTER_ADMIN_KEY", "ROSE_WORKER_API_KEY")
    for name in names:
        monkeypatch.setenv(name, "another")
    environment = front_environment("key", "secret")
    assert not environment.keys() & set(names)
    assert environment["ROSE_ROUTER_API_KEY"] == "key"
    assert environment["ROSE_FRONT_SECRET"] == "secret"


async def test_clients_that_fill_the_router_keep_no_turn_of_its_fronts_out(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker, fronts=STARTING, max_connections=2) as client:
        host, port = client.router.url.removeprefix("http://").split(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        assert (await client.get("/v1/models"))[0] == 503
        (front,) = client.router._service.fronts._fronts
        own_url = front._argv[front._argv.index("--router") + 1]
        async with client.http.get(f"{own_url}/v1/models") as response:
            assert response.status == 200
        for _, writer in held:
            writer.close()


async def test_a_draining_router_takes_the_turns_of_its_fronts_alone(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        secret = client.router._service._callers.front_secret
        client.router._service._guard.is_draining = True
        turn = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}}
        assert (await client.post("/inference/v1/generate", turn))[0] == 503
        assert (await client.post("/inference/v1/generate", turn, X_Rose_Front="another"))[0] == 503
        assert (await client.post("/inference/v1/generate", turn, X_Rose_Front=secret))[0] == 200
        assert FRONT_SECRET_HEADER not in FRONT_HEADERS


@pytest.mark.parametrize("name", ["rose_generated", "rose_reasoning_ended", "rose_chat_template_kwargs"])
async def test_clients_may_not_send_what_the_router_tells_engines(
    start_router: StartRouter, name: str
) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        given = {name: 1}
        asked: dict[str, dict[str, Any]] = {
            "/v1/completions": {"prompt": "hi", "vllm_xargs": given},
            "/v1/chat/completions": {"messages": SAID, "vllm_xargs": given},
            "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"extra_args": given}},
        }
        for path, body in asked.items():
            status, answer = await client.post(path, body)
            assert (status, f"{name}: the router itself" in answer["error"]["message"]) == (400, True)
        assert not worker.requests


def test_flags_behind_the_dashes_are_the_fronts() -> None:
    with pytest.raises(ConfigError, match="fronts: flags lack --model DIR"):
        main(["--front", "1", "--", "--tool-call-parser", "hermes"])
