"""RouterTurns: token ids through a router and back."""

import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rose.errors import WorkerError
from rose.http import WATCHED, Failures
from rose.trainers.turns import RouterTurns
from tests.scheduler.rollout.conftest import StartRouter
from tests.scheduler.rollout.scripted_worker import Fault, ScriptedWorker, expected_tokens


async def test_a_turn_keeps_its_ids_logprobs_and_version_over_a_lost_worker(
    start_router: StartRouter,
) -> None:
    async with ScriptedWorker(version="run/7") as worker:
        worker.faults.append(Fault(kind="disconnect", after_tokens=2))
        async with start_router(worker) as client:
            turns = RouterTurns(client.router.url, "scripted")
            turn = await turns.complete("trajectory-1", [1, 2, 3], {"max_tokens": 5, "temperature": 1.0})
            await turns.close()
            assert len(client.router.plane.trajectories.sessions) == 1
    tokens = expected_tokens([1, 2, 3], 5)
    assert turn.token_ids == tokens
    assert turn.logprobs == [-token / 1000 for token in tokens]
    assert set(turn.versions) == {7}
    assert turn.finish_reason == "length"


async def test_a_turn_notices_that_the_host_of_its_router_died(monkeypatch: pytest.MonkeyPatch) -> None:
    async def one(_: web.Request) -> AsyncIterator[bytes]:
        yield event(1, finish="stop")

    options: list[tuple[object, ...]] = []
    set_option = socket.socket.setsockopt

    def noting(*args: Any) -> None:
        options.append(args)
        set_option(*args)

    monkeypatch.setattr(socket.socket, "setsockopt", noting)
    async with front_of([one]) as url:
        turns = RouterTurns(url, "scripted")
        await turns.complete("t", [1], {})
        await turns.close()
    assert set(WATCHED) <= {option[1:] for option in options}


async def test_what_the_router_refuses_is_a_worker_error_with_its_reason(
    start_router: StartRouter,
) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        turns = RouterTurns(client.router.url, "another model")
        with pytest.raises(WorkerError, match=r"HTTP 404.*another model"):
            await turns.complete("trajectory-1", [1], {})
        await turns.close()
    gone = RouterTurns(client.router.url, "scripted", retry_s=0)
    with pytest.raises(WorkerError, match="trajectory-1 failed"):
        await gone.complete("trajectory-1", [1], {})
    await gone.close()


async def test_the_job_and_its_run_are_named(start_router: StartRouter) -> None:
    async with (
        ScriptedWorker(version="other/1") as worker,
        ScriptedWorker(version="mine/4") as own,
        start_router(worker, own) as client,
    ):
        turns = RouterTurns(client.router.url, "scripted", job="math", run="mine")
        for name in ("a", "b"):
            turn = await turns.complete(name, [1, 2], {"max_tokens": 3})
            assert set(turn.versions) == {4}
        await turns.close()
        assert "math" in [job.name for job in client.router.plane.jobs]


Answer = Callable[[web.Request], AsyncIterator[bytes]]


@asynccontextmanager
async def front_of(answers: list[Answer]) -> AsyncIterator[str]:
    """A router that gives these answers one after the other. Each but the last breaks off where it ends."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        async for part in answers.pop(0)(request):
            await response.write(part)
        if answers and request.transport is not None:
            request.transport.close()
        return response

    app = web.Application()
    app.router.add_post("/inference/v1/generate", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def event(*token_ids: int, finish: str | None = None, text: str = "") -> bytes:
    content = [{"logprob": -1.0, "token": text} for _ in token_ids]
    choice = {"token_ids": token_ids, "logprobs": {"content": content}, "finish_reason": finish}
    return b"data: %b\n\n" % json.dumps({"choices": [choice]}, ensure_ascii=False).encode()


async def test_a_turn_that_is_older_than_the_patience_goes_on_at_the_next_router() -> None:
    async def some(_: web.Request) -> AsyncIterator[bytes]:
        yield event(1)

    async def nothing(_: web.Request) -> AsyncIterator[bytes]:
        yield b""

    async def rest(_: web.Request) -> AsyncIterator[bytes]:
        yield event(2, finish="stop")

    answers: list[Answer] = [some, nothing, rest]
    async with front_of(answers) as url:
        turns = RouterTurns(f"{url},{url},{url}", "scripted", retry_s=0)
        assert (await turns.complete("t", [1], {})).token_ids == [1, 2]
        answers += [nothing, nothing, nothing]
        with pytest.raises(WorkerError, match="t failed"):
            await turns.complete("t", [1], {})
        await turns.close()


async def test_an_event_ends_at_a_line_feed_alone_and_half_an_event_is_asked_for_again() -> None:
    async def separators(_: web.Request) -> AsyncIterator[bytes]:
        data = event(1, text="a\u2028b\u2029c\x85d")
        yield data[:20]
        yield data[20:]
        yield b"data: {]\n\n"

    async def rest(request: web.Request) -> AsyncIterator[bytes]:
        assert (await request.json())["rose_so_far"] == [1]
        yield event(2, finish="stop")

    async with front_of([separators, rest]) as url:
        turns = RouterTurns(url, "scripted")
        assert (await turns.complete("t", [1], {})).token_ids == [1, 2]
        await turns.close()


@pytest.mark.parametrize(
    "sampling",
    [{"extra_args": {"penalty": 1}}, {"structured_outputs": {"regex": "a+"}}, {"presence_penalty": 0.5}],
)
async def test_a_turn_that_can_not_go_on_behind_its_tokens_begins_anew(sampling: dict[str, object]) -> None:
    async def lost(request: web.Request) -> AsyncIterator[bytes]:
        assert not (await request.json())["stream"]
        yield b"{"

    async def whole(request: web.Request) -> AsyncIterator[bytes]:
        assert "rose_so_far" not in await request.json()
        choice = {"token_ids": [1], "finish_reason": "stop", "rose": {"spans": [{"weight_version": "r/3"}]}}
        yield json.dumps({"choices": [choice]}).encode()

    async with front_of([lost, whole]) as url:
        turns = RouterTurns(url, "scripted")
        turn = await turns.complete("t", [1], sampling)
        assert (turn.token_ids, turn.versions) == ([1], (3,))
        await turns.close()


def test_the_pauses_between_rounds_of_all_routers_grow_and_are_as_long_as_a_router_wants() -> None:
    failures = Failures(retry_s=60.0, num_urls=2)
    pauses = []
    for _ in range(20):
        assert not failures.are_too_many(0)
        pauses.append(failures.pause_s(0.0))
    assert set(pauses[::2]) == {0.0}, "the next router is asked at once"
    assert 0.1 <= pauses[1] <= 0.2
    assert 1.6 <= pauses[-1] <= 3.2
    assert failures.pause_s(1.0) >= 2.6
    assert failures.pause_s(3600.0) < 9
