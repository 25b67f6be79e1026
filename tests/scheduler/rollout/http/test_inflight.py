"""Requests with an Idempotency-Key that end and come again, or whose client gives them up unnoticed."""

import asyncio
import json

from rose.scheduler.rollout.http.errors import Conflict
from rose.scheduler.rollout.http.inflight import InFlight, SharedAnswer
from tests.scheduler.rollout.conftest import StartRouter
from tests.scheduler.rollout.scripted_worker import Fault, ScriptedWorker, expected_tokens
from tests.scheduler.rollout.waiting import until


async def test_a_retry_that_meets_the_request_its_client_has_just_left_gets_an_answer() -> None:
    requests, num_begun = InFlight(), 0

    async def work() -> SharedAnswer:
        nonlocal num_begun
        num_begun += 1
        try:
            await asyncio.sleep(3600 if num_begun == 1 else 0)
        finally:
            await asyncio.sleep(0)  # it takes a moment to end, as with several choices
        return SharedAnswer(b"answer")

    left = asyncio.create_task(requests.run("key", b"body", work))
    while not num_begun:
        await asyncio.sleep(0)
    left.cancel()
    await asyncio.sleep(0)
    retry = asyncio.create_task(requests.run("key", b"body", work))
    assert (await retry).body == b"answer"
    assert num_begun == 2
    assert "key" not in requests


async def test_a_retry_of_a_chat_that_goes_whole_shares_its_answer(start_router: StartRouter) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}]}
    async with ScriptedWorker() as worker, start_router(worker) as client:
        worker.faults.append(Fault(kind="slow"))
        url, headers = f"{client.router.url}/v1/chat/completions", {"Idempotency-Key": "k"}
        asked = [asyncio.create_task(client.http.post(url, json=body, headers=headers)) for _ in range(2)]
        await until(
            lambda: [each.num_waiting for each in client.router._service._in_flight._running.values()] == [2]
        )
        worker.finish_slow()
        answers = [await each for each in asked]
        assert [answer.status for answer in answers] == [200, 200]
        assert {answer.headers["X-Rose-Worker"] for answer in answers} == {worker.id}
        assert await answers[0].json() == await answers[1].json()
        assert len(worker.requests) == 1


async def test_a_retry_of_a_call_that_fills_the_queue_shares_its_answer(start_router: StartRouter) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "n": 4}
    async with (
        ScriptedWorker() as worker,
        start_router(worker, turns_per_gpu=1, max_queued_per_job=3) as client,
    ):
        worker.hold()
        first = asyncio.create_task(client.post("/v1/completions", body, Idempotency_Key="k"))
        await until(lambda: client.router.plane.dispatcher.num_queued == 3)
        retry = asyncio.create_task(client.post("/v1/completions", body, Idempotency_Key="k"))
        (shared,) = client.router._service._in_flight._running.values()
        await until(lambda: shared.num_waiting == 2 or retry.done())
        worker.go_on()
        assert ((await first)[0], (await retry)[0]) == (200, 200)
        assert len(worker.requests) == 4


STREAMED_CHAT = {
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function"}],
    "stream": True,
}
STREAMED_TURN = {"prompt": [1, 2, 3], "max_tokens": 4, "stream": True, "return_token_ids": True}


async def test_a_retry_takes_the_place_of_a_stream_that_goes_whole(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        worker.faults.append(Fault(kind="slow"))
        url, headers = f"{client.router.url}/v1/chat/completions", {"Idempotency-Key": "k"}
        first = await client.http.post(url, json=STREAMED_CHAT, headers=headers)
        other = {**STREAMED_CHAT, "max_tokens": 7}
        assert (await client.post("/v1/chat/completions", other, Idempotency_Key="k"))[0] == 409
        whole = {**STREAMED_CHAT, "stream": False}
        assert (await client.post("/v1/chat/completions", whole, Idempotency_Key="k"))[0] == 409
        retry = await client.http.post(url, json=STREAMED_CHAT, headers=headers)
        assert b"has taken the stream's place" in await first.read()
        assert (await retry.read()).endswith(b"data: [DONE]\n\n")
        assert len(worker.requests) == 2
        assert client.known(worker).in_flight == 0
        assert not client.router._service._in_flight._streams


async def test_a_retry_of_a_stream_goes_on_with_its_tokens_while_the_first_one_seems_to_run(
    start_router: StartRouter,
) -> None:
    """The client lost its connection, and the router has not been told."""
    async with ScriptedWorker(hold_after=2) as worker, start_router(worker) as client:
        url, headers = f"{client.router.url}/v1/completions", {"Idempotency-Key": "k"}
        first = await client.http.post(url, json=STREAMED_TURN, headers=headers)
        await until(lambda: worker.num_held == 1)
        tokens = expected_tokens([1, 2, 3], 4)
        retried = {**STREAMED_TURN, "rose_so_far": tokens[:2]}
        asked = asyncio.create_task(client.http.post(url, json=retried, headers=headers))
        assert b"has taken the stream's place" in await first.read()
        await until(lambda: worker.num_cancelled == 1)
        worker.let_pass()
        events = (await (await asked).read()).split(b"\n\n")
        choices = [json.loads(each[6:])["choices"] for each in events if each.startswith(b"data: {")]
        assert [token for (choice,) in choices for token in choice["token_ids"]] == tokens[2:]


async def test_a_retry_of_a_stream_in_a_full_queue_gets_its_room(start_router: StartRouter) -> None:
    async with (
        ScriptedWorker() as worker,
        start_router(worker, turns_per_gpu=1, max_queued_per_job=2) as client,
    ):
        worker.hold()
        url, body = f"{client.router.url}/v1/completions", {**STREAMED_TURN, "n": 2}
        running = asyncio.create_task(client.http.post(url, json=STREAMED_TURN))
        await until(lambda: len(worker.requests) == 1)
        headers = {"Idempotency-Key": "k"}
        first = asyncio.create_task(client.http.post(url, json=body, headers=headers))
        await until(lambda: client.router.plane.dispatcher.num_queued == 2)
        retry = asyncio.create_task(client.http.post(url, json=body, headers=headers))
        assert (await first).status == 409
        await until(lambda: client.router.plane.dispatcher.num_queued == 2)
        worker.go_on()
        for asked in (running, retry):
            answer = await asked
            assert (answer.status, (await answer.read()).endswith(b"data: [DONE]\n\n")) == (200, True)


async def test_of_several_retries_of_a_stream_the_last_one_runs_and_alone() -> None:
    requests, running = InFlight(), list[int]()
    may_end = asyncio.Event()

    async def stream(number: int) -> None:
        async with requests.stream("key", {}):
            running.append(number)
            assert len(running) == 1
            try:
                await may_end.wait()
            finally:
                await asyncio.sleep(0.01)  # it takes a moment to end, as with several choices
                running.remove(number)

    asked = [asyncio.create_task(stream(number)) for number in range(3)]
    await until(lambda: running == [2])
    asked.append(asyncio.create_task(stream(3)))
    await until(lambda: running == [3])
    may_end.set()
    ended = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(each) for each in ended] == [Conflict, Conflict, Conflict, type(None)]
    assert "key" not in requests
