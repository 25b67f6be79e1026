"""Requests with an Idempotency-Key that end and come again."""

import asyncio

from rose.scheduler.rollout.http.inflight import InFlight, SharedAnswer


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
