"""Requests with an Idempotency-Key that end and come again."""

import asyncio

from rose.scheduler.rollout.http.inflight import InFlight, SharedAnswer
from tests.scheduler.rollout.conftest import StartRouter
from tests.scheduler.rollout.scripted_worker import Fault, ScriptedWorker
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
