"""RouterRollouts: a batch whose router ends is asked for again at the next one."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from rose.errors import WorkerError
from tests.scheduler.rollout.conftest import running_router
from tests.scheduler.rollout.scripted_worker import ScriptedWorker, expected_tokens

pytestmark = [pytest.mark.vllm, pytest.mark.clients]

ANSWER = {"prompt_ids": [[1]], "completion_ids": [[2]], "logprobs": [[[-1.0]]]}
ARGS = SimpleNamespace(
    **{"max_completion_length": 4, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": None},
    **{"repetition_penalty": 1.0, "generation_kwargs": None},
)
TRAINER = SimpleNamespace(state=SimpleNamespace(global_step=0), args=ARGS)


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """What TRL's client gets from each router, call by call; it is refused where nothing is left."""
    pytest.importorskip("trl")
    from rose.trainers import trl  # here, because it takes long

    left: dict[str, list[Any]] = {}

    class ScriptedClient:
        def __init__(self, base_url: str, connection_timeout: float) -> None:
            self._left = left[base_url]

        def generate(self, prompts: list[Any], **_: Any) -> Any:
            outcome = self._left.pop(0) if self._left else ConnectionError("refused")
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

    monkeypatch.setattr(trl, "_RouterClient", ScriptedClient)
    monkeypatch.setattr(trl, "CONNECT_TIMEOUT_S", 0.0)
    monkeypatch.setattr(trl, "_PAUSE_S", 0.0)
    return left


@pytest.mark.parametrize(
    "lost", [ConnectionError("reset"), Exception("Request failed: 503, the router shuts down")]
)
def test_the_next_router_is_asked_however_late_the_first_one_ends(
    outcomes: dict[str, list[Any]], lost: Exception
) -> None:
    outcomes |= {"http://one": [lost], "http://other": [ANSWER]}
    from rose.trainers.trl import RouterRollouts

    rollouts = RouterRollouts("http://one,http://other")
    assert rollouts(["a"], TRAINER)["completion_ids"] == [[2]]
    with pytest.raises(WorkerError, match="http://one: does not answer"):
        rollouts(["a"], TRAINER)


def test_what_the_router_refuses_is_not_asked_again(outcomes: dict[str, list[Any]]) -> None:
    from rose.trainers.trl import RouterRollouts

    outcomes |= {"http://one": [Exception("Request failed: 400, too long")], "http://other": [ANSWER]}
    with pytest.raises(Exception, match="400, too long"):
        RouterRollouts("http://one,http://other")(["a"], TRAINER)


async def test_a_router_that_drains_is_left_at_once_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    trl = pytest.importorskip("rose.trainers.trl")
    monkeypatch.setattr(trl, "CONNECT_TIMEOUT_S", 0.0)
    async with (
        ScriptedWorker() as worker,
        running_router(worker.url) as one,
        running_router(worker.url) as other,
        aiohttp.ClientSession() as http,
    ):
        await drain(http, one.url)
        rollouts = trl.RouterRollouts(f"{one.url},{other.url}")
        answer = await asyncio.to_thread(rollouts, [[1, 2]], TRAINER)
        assert answer["completion_ids"] == [expected_tokens([1, 2], 4)]
        await drain(http, other.url)
        for url in (one.url, other.url):
            with pytest.raises(WorkerError, match="draining and takes no new requests"):
                await asyncio.to_thread(trl.RouterRollouts(url), [[1, 2]], TRAINER)


async def test_a_router_that_begins_to_drain_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    trl = pytest.importorskip("rose.trainers.trl")
    waited_s: list[float] = []
    async with (
        ScriptedWorker() as worker,
        running_router(worker.url) as one,
        running_router(worker.url) as other,
        aiohttp.ClientSession() as http,
    ):
        rollouts = trl.RouterRollouts(f"{one.url},{other.url}")
        await asyncio.to_thread(rollouts, [[1, 2]], TRAINER)
        await drain(http, one.url)
        clock = SimpleNamespace(monotonic=time.monotonic, sleep=waited_s.append)
        monkeypatch.setattr(trl, "time", clock)  # its own alone: other threads of this process may sleep
        answer = await asyncio.to_thread(rollouts, [[3, 4]], TRAINER)
        assert answer["completion_ids"] == [expected_tokens([3, 4], 4)]
        assert waited_s == []


async def drain(http: aiohttp.ClientSession, url: str) -> None:
    async with http.post(f"{url}/admin/drain") as response:
        assert response.status == 200
    async with http.get(f"{url}/health") as response:
        assert (response.status, (await response.json())["draining"]) == (503, True)
    async with http.post(f"{url}/v1/completions", json={"model": "scripted", "prompt": [1]}) as response:
        assert response.status == 503
        assert "is draining" in (await response.json())["error"]["message"]


async def test_a_router_without_a_worker_is_waited_for() -> None:
    trl = pytest.importorskip("rose.trainers.trl")
    async with ScriptedWorker() as worker, running_router() as router, aiohttp.ClientSession() as http:
        asking = asyncio.create_task(asyncio.to_thread(trl.RouterRollouts(router.url), [[1, 2]], TRAINER))
        await asyncio.sleep(0.5)
        assert not asking.done()
        async with http.post(f"{router.url}/workers", json={"url": worker.url}) as response:
            assert response.status == 201
        assert (await asking)["completion_ids"] == [expected_tokens([1, 2], 4)]


async def test_a_router_with_a_key_is_asked_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trl = pytest.importorskip("rose.trainers.trl")
    monkeypatch.setenv("ROSE_ROUTER_API_KEY", "secret")
    async with ScriptedWorker() as worker, running_router(worker.url, api_key="secret") as router:
        answer = await asyncio.to_thread(trl.RouterRollouts(router.url), [[1, 2]], TRAINER)
        assert answer["completion_ids"] == [expected_tokens([1, 2], 4)]
