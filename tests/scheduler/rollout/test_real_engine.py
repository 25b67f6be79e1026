"""The router in front of one real vLLM engine on the CPU."""

from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI

from tests.scheduler.rollout.conftest import running_router
from tests.scheduler.rollout.cutting_proxy import CuttingProxy

pytestmark = pytest.mark.vllm


async def post(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with http.post(url, json=body) as response:
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


def without_rose(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [{k: v for k, v in choice.items() if k != "rose"} for choice in answer["choices"]]


TOP_1 = {"temperature": 1.0, "top_k": 1}
"""Greedy in effect; vLLM refuses n > 1 at temperature 0."""

BODIES = [
    {"prompt": [5, 6, 7], "max_tokens": 20, "return_token_ids": True, "logprobs": 1},
    {"prompt": [5, 6, 7], "max_tokens": 20, "logprobs": 0, "return_tokens_as_token_ids": True},
    {"prompt": "w5 w6 w7", "max_tokens": 12, "return_token_ids": True},
    {"prompt": ["w5 w6", "w9"], "max_tokens": 6, "n": 2, "logprobs": 3, "return_token_ids": True, **TOP_1},
    {"prompt": [[5, 6], [9, 8, 7]], "max_tokens": 5, "ignore_eos": True},
    {"prompt": [5, 6, 7], "max_tokens": 9, "prompt_logprobs": 1},
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
async def test_greedy_answers_equal_those_of_the_engine_itself(engine_url: str, body: dict[str, Any]) -> None:
    body = {"model": "tiny", "temperature": 0.0, **body}
    async with running_router(engine_url) as router, aiohttp.ClientSession() as http:
        direct = await post(http, f"{engine_url}/v1/completions", body)
        routed = await post(http, f"{router.url}/v1/completions", body)
    assert without_rose(routed) == direct["choices"]
    assert routed["model"] == "tiny"
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [routed["usage"][k] for k in counts] == [direct["usage"][k] for k in counts]


async def test_a_resumed_greedy_turn_equals_the_unsplit_one(engine_url: str) -> None:
    """The stream breaks after five events; the engine continues from prompt + generated."""
    body = {
        "prompt": [5, 6, 7],
        "max_tokens": 200,
        "temperature": 0.0,
        "return_token_ids": True,
        "logprobs": 0,
        "ignore_eos": True,
    }
    async with (
        CuttingProxy(engine_url, num_events=5) as proxy,
        running_router(proxy.url) as router,
        aiohttp.ClientSession() as http,
    ):
        direct = await post(http, f"{engine_url}/v1/completions", body)
        while not proxy.has_cut:
            choice = (await post(http, f"{router.url}/v1/completions", body))["choices"][0]
    assert choice["token_ids"] == direct["choices"][0]["token_ids"]
    assert choice["text"] == direct["choices"][0]["text"]
    assert choice["rose"]["resumes"] == 1


@pytest.mark.parametrize("n", [1, 2])
async def test_a_resumed_greedy_chat_equals_the_unsplit_one(engine_url: str, n: int) -> None:
    """Asked for whole and as a stream, by the openai client; with n = 2 one choice is cut.

    The engine itself refuses n = 2 at temperature 0, and top_k = 1 leaves it the choice among equals.
    """
    settings: Any = {"model": "tiny", "messages": [{"role": "user", "content": "w9 w10"}]}
    settings |= {"max_tokens": 100, "temperature": 0.0, "logprobs": True, "top_logprobs": 2}
    settings["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
    async with openai_client(engine_url) as direct:
        unsplit: Any = await direct.chat.completions.create(**settings)
    for is_streamed in (False, True):
        async with (
            CuttingProxy(engine_url, num_events=5) as proxy,
            running_router(proxy.url) as router,
        ):
            async with openai_client(router.url) as client:
                while not proxy.has_cut:
                    answer: Any = await client.chat.completions.create(**settings, n=n, stream=is_streamed)
                    heard = await spoken(answer, n) if is_streamed else said(answer)
            counters = router.plane.records.counters
        assert heard == said(unsplit) * n
        assert (counters.resumed, counters.restarted) == (1, 0)


def openai_client(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def said(answer: Any) -> list[tuple[Any, ...]]:
    """What each choice of a whole chat says: its role, text, ids, and tokens with how many alternatives."""
    return [
        (
            choice.message.role,
            choice.message.content,
            choice.token_ids,
            [(entry.token, entry.bytes, len(entry.top_logprobs)) for entry in choice.logprobs.content],
            choice.finish_reason,
        )
        for choice in answer.choices
    ]


async def spoken(stream: Any, n: int) -> list[tuple[Any, ...]]:
    """The same of a streamed chat."""
    choices = [choice async for event in stream for choice in event.choices]
    found = []
    for index in range(n):
        own = [choice for choice in choices if choice.index == index]
        entries = [entry for choice in own if choice.logprobs for entry in choice.logprobs.content]
        found.append(
            (
                "".join(choice.delta.role or "" for choice in own),
                "".join(choice.delta.content or "" for choice in own),
                [token for choice in own for token in getattr(choice, "token_ids", [])],
                [(entry.token, entry.bytes, len(entry.top_logprobs)) for entry in entries],
                own[-1].finish_reason,
            )
        )
    return found


async def test_an_error_of_the_engine_reaches_the_client_unchanged(engine_url: str) -> None:
    body = {"prompt": [5], "max_tokens": 5000}
    async with (
        running_router(engine_url) as router,
        aiohttp.ClientSession() as http,
        http.post(f"{router.url}/v1/completions", json=body) as response,
    ):
        assert response.status == 400
        assert "max_tokens" in (await response.json())["error"]["message"]
