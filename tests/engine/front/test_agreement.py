"""What a front finds out about the workers behind its router before it serves."""

import asyncio
from collections.abc import Sequence

import pytest

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
                (card,) = questions.cards()
                questions.check_tokenizer(card["id"], tokenizer)
                return str(card["id"])

        return await asyncio.to_thread(ask)


async def test_a_worker_with_the_same_tokenizer_is_agreed_with() -> None:
    async with ScriptedWorker() as worker:
        assert await asked(worker.url, Bytes()) == "scripted"


async def test_a_worker_with_another_tokenizer_is_refused_with_what_differs() -> None:
    async with ScriptedWorker() as worker:
        with pytest.raises(ConfigError, match="its tokenizer is not that of the workers behind http"):
            await asked(worker.url, Bytes(shift=1))


def test_a_router_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "ROUTER_S", 0.0)
    with (
        http_client(NOWHERE, key=None, timeout=1) as client,
        pytest.raises(ConfigError, match=f"--router {NOWHERE}: does not answer"),
    ):
        RouterQuestions(client).cards()


async def test_a_router_that_wants_another_key_is_named() -> None:
    async with ScriptedWorker() as worker, running_router(worker.url, api_key="secret") as router:
        with (
            http_client(router.url, key=None, timeout=30) as client,
            pytest.raises(ConfigError, match="wants a key; set ROSE_ROUTER_API_KEY"),
        ):
            await asyncio.to_thread(RouterQuestions(client).cards)


def test_the_model_is_the_one_that_is_named_or_the_only_one() -> None:
    one, two = {"id": "a"}, {"id": "b"}
    assert served_card([one, two], ["b"], "dir") == two
    assert served_card([one, two], [], "a") == one
    assert served_card([two], [], "dir") == two
    with pytest.raises(ConfigError, match="--served-model-name c: the router serves a, b"):
        served_card([one, two], ["c"], "dir")
    with pytest.raises(ConfigError, match="the router serves a, b; say which one"):
        served_card([one, two], [], "dir")
