"""An unmodified openai client on the router, with a real engine or a scripted worker behind it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.scheduler.rollout.conftest import StartRouter, running_router
from tests.scheduler.rollout.scripted_worker import ScriptedWorker, expected_tokens
from tests.scheduler.rollout.stock_worker import SERVED_MODEL
from tests.scheduler.rollout.waiting import until

pytestmark = pytest.mark.clients
KEY = "a key of the router's own"
MESSAGES: Any = [{"role": "user", "content": "w9 w10"}]


@pytest.fixture
async def client(engine_url: str) -> AsyncIterator[AsyncOpenAI]:
    """A client of a router that asks for a key, before the one real engine."""
    async with (
        running_router(engine_url, api_key=KEY) as router,
        AsyncOpenAI(base_url=f"{router.url}/v1", api_key=KEY) as client,
    ):
        yield client


@pytest.mark.vllm
async def test_completions_take_token_ids_and_give_them_back(client: AsyncOpenAI) -> None:
    settings: Any = {"max_tokens": 8, "temperature": 0.0, "logprobs": 1}
    answer = await client.completions.create(
        model=SERVED_MODEL,
        prompt=[5, 6, 7],
        **settings,
        extra_body={"return_token_ids": True},
        extra_headers={"X-Session-ID": "trajectory-1"},
    )
    (choice,) = answer.choices
    told: Any = choice.model_extra
    assert told["prompt_token_ids"] == [5, 6, 7]
    assert len(told["token_ids"]) == 8 == len(choice.logprobs.token_logprobs)
    assert sum(span["tokens"] for span in told["rose"]["spans"]) == 8
    assert answer.usage is not None and answer.usage.completion_tokens == 8


@pytest.mark.vllm
async def test_streams_of_completions_and_chat_add_up_to_the_whole_answers(client: AsyncOpenAI) -> None:
    settings: Any = {"model": SERVED_MODEL, "max_tokens": 12, "temperature": 0.0}
    whole = await client.completions.create(prompt="w5 w6 w7", **settings)
    stream = await client.completions.create(prompt="w5 w6 w7", stream=True, **settings)
    texts = [choice.text async for event in stream for choice in event.choices]
    assert "".join(texts) == whole.choices[0].text
    assert len(texts) > 1

    said = await client.chat.completions.create(messages=MESSAGES, **settings)
    heard = await client.chat.completions.create(messages=MESSAGES, stream=True, **settings)
    deltas = [choice.delta.content or "" async for event in heard for choice in event.choices]
    assert "".join(deltas) == said.choices[0].message.content


@pytest.mark.vllm
async def test_the_openai_client_raises_its_own_error_classes(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no such model"):
        await client.completions.create(model="no such model", prompt=[5])
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model=SERVED_MODEL, prompt=[5], max_tokens=5000)
    with pytest.raises(openai.AuthenticationError, match="key"):
        await client.with_options(api_key="wrong").completions.create(model=SERVED_MODEL, prompt=[5])


async def test_an_idempotency_key_in_flight_is_refused_with_another_body(start_router: StartRouter) -> None:
    """That equal bodies share the answer is tested in test_jobs.py."""
    async with ScriptedWorker() as worker, start_router(worker) as routed:
        worker.hold()
        async with AsyncOpenAI(base_url=f"{routed.router.url}/v1", api_key="none", max_retries=0) as client:

            async def ask(max_tokens: int) -> Any:
                settings: Any = {"prompt": [1, 2], "max_tokens": max_tokens}
                settings["extra_body"] = {"return_token_ids": True}
                settings["extra_headers"] = {"Idempotency-Key": "try-1"}
                return await client.completions.create(model="scripted", **settings)

            first = asyncio.create_task(ask(4))
            await until(lambda: len(worker.requests) == 1)
            with pytest.raises(openai.ConflictError, match="another body"):
                await ask(5)
            worker.go_on()
            answer = await first
    assert answer.choices[0].token_ids == expected_tokens([1, 2], 4)
    assert len(worker.requests) == 1


@pytest.mark.slow
async def test_the_clients_own_retries_wait_out_a_full_queue(start_router: StartRouter) -> None:
    async with (
        ScriptedWorker() as worker,
        start_router(worker, turns_per_gpu=1, max_queued_per_job=1) as routed,
    ):
        worker.hold()
        async with AsyncOpenAI(base_url=f"{routed.router.url}/v1", api_key="none", max_retries=60) as client:
            asked = [
                asyncio.create_task(client.completions.create(model="scripted", prompt=[n], max_tokens=2))
                for n in range(4)
            ]
            # Two of them are refused: one runs, one waits.
            await until(lambda: routed.counters()["turns"].get("QueueFull", 0) >= 2)
            worker.go_on()
            answers = await asyncio.gather(*asked)
    assert all(len(answer.choices[0].text) > 0 for answer in answers)
