"""What a front finds out about the workers behind its router before it serves."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rose.engine.front import agreement
from rose.engine.front.agreement import RouterQuestions, served_card
from rose.errors import ConfigError
from rose.http import http_client
from tests.scheduler.rollout.conftest import running_router
from tests.scheduler.rollout.scripted_worker import ScriptedWorker

NOWHERE = "http://127.0.0.1:9"


class Bytes:
    """The scripted worker's tokenizer: a token for each byte, a number for each token."""

    def __init__(self, size: int = 256, shift: int = 0) -> None:
        self._size = size
        self._shift = shift

    def __len__(self) -> int:
        return self._size

    def encode(self, text: str) -> list[int]:
        return [byte + self._shift for byte in text.encode()]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"<{token}>" for token in ids)


async def asked(worker_url: str, tokenizer: Bytes) -> str:
    """Returns the model that a router serves, after its worker's tokenizer was compared with this one."""
    async with running_router(worker_url) as router:

        def ask() -> str:
            with http_client(router.url, key=None, timeout=30) as client:
                questions = RouterQuestions(client)
                card = questions.card([], "nowhere")
                questions.check_tokenizer(card["id"], tokenizer)
                return str(card["id"])

        return await asyncio.to_thread(ask)


async def test_a_worker_with_the_same_tokenizer_is_agreed_with() -> None:
    async with ScriptedWorker() as worker:
        assert await asked(worker.url, Bytes()) == "scripted"


async def test_a_worker_with_another_tokenizer_is_refused_with_what_differs() -> None:
    async with ScriptedWorker() as worker:
        with pytest.raises(ConfigError, match="its tokenizer differs from that of the workers behind http"):
            await asked(worker.url, Bytes(shift=1))


def test_a_router_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "ROUTER_S", 0.0)
    with (
        http_client(NOWHERE, key=None, timeout=1) as client,
        pytest.raises(ConfigError, match=f"--router {NOWHERE}: does not answer"),
    ):
        RouterQuestions(client).card([], "dir")


async def test_another_router_that_has_gone_is_named_and_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agreement, "ROUTER_S", 0.0)
    async with ScriptedWorker() as worker, running_router(worker.url, api_key="cli") as router:
        async with running_router(worker.url) as other:
            pass

        def ask() -> list[bool]:
            with http_client(router.url, key="cli", timeout=30) as client:
                questions = RouterQuestions(client)
                questions.card([], "nowhere")
                return [questions.is_open(url) for url in (router.url, other.url)]

        assert await asyncio.to_thread(ask) == [False, False]
    said = [each.getMessage() for each in caplog.records if each.name == agreement.__name__]
    assert len(said) == 1 and other.url in said[0]


def test_whether_the_only_router_is_open_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "ROUTER_S", 0.0)
    with (
        http_client(NOWHERE, key=None, timeout=1) as client,
        pytest.raises(ConfigError, match=f"--router {NOWHERE}: does not answer"),
    ):
        RouterQuestions(client).is_open(NOWHERE)


async def test_a_router_that_wants_another_key_is_named() -> None:
    async with ScriptedWorker() as worker, running_router(worker.url, api_key="secret") as router:
        with (
            http_client(router.url, key=None, timeout=30) as client,
            pytest.raises(ConfigError, match="the router asks for a key; set ROSE_ROUTER_API_KEY"),
        ):
            await asyncio.to_thread(RouterQuestions(client).card, [], "dir")


def test_the_model_is_the_one_that_is_named_or_the_only_one() -> None:
    one, two = {"id": "a"}, {"id": "b"}
    assert served_card([one, two], ["b"], "dir") == two
    assert served_card([one, two], [], "a") == one
    assert served_card([two], [], "dir") == two
    assert served_card([{"id": "adapter", "parent": "b"}, two], [], "dir") == two
    with pytest.raises(ConfigError, match="the router serves a, b; say which one"):
        served_card([one, two], [], "dir")


class Passing:
    """A router that answers the first requests with what passes: its last worker died, the model is late."""

    def __init__(self) -> None:
        self._models: list[tuple[int, Any]] = [(503, {}), (200, {"data": [{"id": "early"}]})]
        self._tokenize: list[tuple[int, Any]] = [(503, {}), (429, {})]
        self.app = web.Application()
        self.app.router.add_get("/v1/models", self.models)
        self.app.router.add_post("/tokenize", self.tokenize)
        self.app.router.add_post("/detokenize", self.detokenize)

    async def models(self, _: web.Request) -> web.Response:
        last = (200, {"data": [{"id": "early"}, {"id": "late"}]})
        status, body = self._models.pop(0) if self._models else last
        return web.json_response(body, status=status)

    async def tokenize(self, request: web.Request) -> web.Response:
        ids = Bytes().encode((await request.json())["prompt"])
        status, body = self._tokenize.pop(0) if self._tokenize else (200, {"tokens": ids})
        return web.json_response(body, status=status)

    async def detokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"prompt": Bytes().decode((await request.json())["tokens"])})


async def test_what_passes_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_ASK_AGAIN_S", 0.01)
    async with TestServer(Passing().app) as server:

        def ask() -> object:
            with http_client(str(server.make_url("/")), key=None, timeout=30) as client:
                questions = RouterQuestions(client)
                card = questions.card(["late"], "dir")
                questions.check_tokenizer("late", Bytes())
                return card["id"]

        assert await asyncio.to_thread(ask) == "late"


STANDS_IN = """
import signal, sys, time
from rose.engine.front.command import stop_with_stdin
stop_with_stdin()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


def test_a_routers_own_front_ends_with_its_input_and_by_no_signal_before() -> None:
    argv = [sys.executable, "-c", STANDS_IN]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.stdin.close()
        assert process.wait(30) == 7
