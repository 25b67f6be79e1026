"""Workers of one model with different contexts (--max-model-len): each turn goes where it fits."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from tests.scheduler.rollout.conftest import StartRouter
from tests.scheduler.rollout.scripted_worker import ScriptedWorker, expected_tokens
from tests.scheduler.rollout.waiting import until

SHORT, LONG = 32, 128
POLICIES = ["paper", "cost", "turnwise", "pinned"]
TEXT = "x" * 40
"""The scripted worker makes more tokens of it than the router expects."""
EVERY_TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": TEXT, "max_tokens": 5}),
    "stream": ("/v1/completions", {"prompt": TEXT, "max_tokens": 5, "stream": True}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 5}),
    "whole chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}], "stop": ["x"]}),
}


class BoundedWorker(ScriptedWorker):
    """Refuses prompts that are longer than its context, and cuts answers there, as vLLM does."""

    async def _take(self, request: web.Request) -> dict[str, Any]:
        body, context = await super()._take(request), self.max_model_len
        assert context is not None
        left = context - len(self._prompt(body))
        if left < 0:
            message = (
                f"This model's maximum context length is {context} tokens. However, your prompt contains"
                f" {context - left} input tokens, which exceeds this limit even without any output tokens."
            )
            error = {"message": message, "param": "input_tokens", "code": 400}
            raise web.HTTPBadRequest(text=json.dumps({"error": error}), content_type="application/json")
        return {**body, "max_tokens": min(body.get("max_tokens", 16), left)}

    def _prompt(self, body: dict[str, Any]) -> list[int]:
        if "messages" in body:
            return self._rendered(body)
        return body["prompt"] if isinstance(body["prompt"], list) else list(body["prompt"].encode())


def workers() -> tuple[ScriptedWorker, ScriptedWorker]:
    return BoundedWorker(max_model_len=SHORT), BoundedWorker(max_model_len=LONG)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("num_prompt", "num_tokens"), [(SHORT + 8, 4), (SHORT, 1), (SHORT - 8, 16)])
async def test_a_turn_that_only_one_worker_holds_whole_goes_there_at_once(
    start_router: StartRouter, policy: str, num_prompt: int, num_tokens: int
) -> None:
    short, long = workers()
    async with short, long, start_router(short, long, policy=policy) as client:
        prompt = list(range(num_prompt))
        body = {"prompt": prompt, "max_tokens": num_tokens, "session_id": "s"}
        for _ in range(3):
            (choice,) = (await client.complete(body))["choices"]
            assert choice["token_ids"] == expected_tokens(prompt, num_tokens)
        assert (len(short.requests), len(long.requests)) == (0, 3)


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_trajectory_that_outgrows_its_worker_goes_on_at_a_longer_one(
    start_router: StartRouter, policy: str
) -> None:
    short, long = workers()
    async with short, long, start_router(short, (long, "serving"), policy=policy) as client:
        long.hold()
        other = asyncio.create_task(client.complete({"prompt": [2] * (SHORT + 1), "max_tokens": 4}))
        await until(lambda: len(long.requests) == 1)  # so that it is the more loaded one
        await client.complete({"prompt": [1, 2], "max_tokens": 4, "session_id": "s"})
        assert len(short.requests) == 1
        long.go_on()
        await client.complete({"prompt": [1] * (SHORT + 1), "max_tokens": 4, "session_id": "s"})
        await other
        assert (len(short.requests), len(long.requests)) == (1, 2)


@pytest.mark.parametrize("kind", list(EVERY_TEXT))
async def test_a_text_that_is_too_long_for_one_worker_is_answered_by_the_other(
    start_router: StartRouter, kind: str
) -> None:
    path, body = EVERY_TEXT[kind]
    short, long = workers()
    async with short, long, start_router((long, "serving"), short) as client:
        async with client.http.post(client.router.url + path, json=body) as response:
            assert response.status == 200
            await response.read()
        assert (len(short.requests), len(long.requests)) == (1, 1)
        assert client.counters()["reroutes"] == {"too_long": 1}


@pytest.mark.parametrize("kind", list(EVERY_TEXT))
async def test_a_text_that_is_too_long_for_all_gets_the_longest_workers_own_refusal(
    start_router: StartRouter, kind: str
) -> None:
    path, body = EVERY_TEXT[kind]
    longer = TEXT * 4
    body |= {"prompt": longer} if "prompt" in body else {"messages": [{"role": "user", "content": longer}]}
    short, long = workers()
    async with short, long, start_router(short, long) as client:
        status, answer = await client.post(path, body)
        assert (status, answer["error"]["param"]) == (400, "input_tokens")
        assert f"maximum context length is {LONG} tokens" in answer["error"]["message"]
        assert client.counters()["turns"] == {"Refused": 1}


async def test_a_turn_waits_for_a_lost_worker_that_alone_holds_it_but_not_for_a_removed_one(
    start_router: StartRouter,
) -> None:
    short, long = workers()
    body = {"prompt": TEXT, "max_tokens": 4}
    async with short, long, start_router(short, long, lost_after_s=0.2) as client:
        await long.stop()
        await until(lambda: not client.known(long).is_alive)
        status, answer = await client.post("/v1/completions", body, X_Rose_Timeout_S="0.3")
        assert (status, answer["error"]["code"]) == (504, 504)
        async with client.http.delete(f"{client.router.url}/workers/{long.id}") as response:
            assert response.status == 200
        status, answer = await client.post("/v1/completions", body)
        assert (status, answer["error"]["param"]) == (400, "input_tokens")
        assert f"maximum context length is {SHORT} tokens" in answer["error"]["message"]


async def test_short_turns_run_on_both_and_do_not_wait_behind_long_ones(start_router: StartRouter) -> None:
    short, long = workers()
    async with short, long, start_router(short, long, turns_per_gpu=1) as client:
        long.hold()
        turns = [{"prompt": [7] * (SHORT + number), "max_tokens": 2} for number in (1, 2, 3)]
        tasks = [asyncio.create_task(client.post("/v1/completions", turn)) for turn in turns]
        await until(lambda: client.router.plane.dispatcher.num_queued == 2)
        await client.complete({"prompt": [1, 2], "max_tokens": 4})
        assert (len(short.requests), len(long.requests)) == (1, 1)
        long.go_on()
        for task in tasks:
            assert (await task)[0] == 200


async def test_the_list_of_models_shows_the_longest_context(start_router: StartRouter) -> None:
    short, long = workers()
    async with short, long, start_router(short, long) as client:
        (card,) = (await client.get("/v1/models"))[1]["data"]
        assert card["max_model_len"] == LONG
