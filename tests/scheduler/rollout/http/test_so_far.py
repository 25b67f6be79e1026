"""A client whose stream broke off says which tokens have arrived, and gets exactly the rest."""

import json
from typing import Any

import aiohttp
import pytest

from tests.scheduler.rollout.conftest import Client, running_router
from tests.scheduler.rollout.scripted_worker import ScriptedWorker, expected_tokens

PROMPT = [1, 2, 3, 4]
BODY: dict[str, Any] = {"model": "scripted", "prompt": PROMPT, "max_tokens": 5, "return_token_ids": True}


async def streamed(client: Client, path: str, body: dict[str, Any]) -> list[int]:
    tokens: list[int] = []
    async with client.http.post(f"{client.router.url}{path}", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice.get("token_ids") or ()
    return tokens


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])
async def test_a_client_that_says_what_has_arrived_gets_exactly_the_rest(path: str) -> None:
    whole = expected_tokens(PROMPT, 8)
    async with (
        ScriptedWorker() as worker,
        running_router(worker.url) as router,
        aiohttp.ClientSession() as http,
    ):
        client = Client(router, http)
        for count in (1, 5, 8):
            body: dict[str, Any] = {"stream": True, "rose_so_far": whole[:count]}
            if path == "/v1/completions":
                body |= {**BODY, "max_tokens": 8}
            else:
                body |= {"token_ids": PROMPT, "sampling_params": {"max_tokens": 8}}
            assert await streamed(client, path, body) == whole[count:]
        assert all("rose_so_far" not in sent for sent in worker.requests)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"rose_so_far": "abc"}, "list of token ids"),
        ({"rose_so_far": [1.5]}, "list of token ids"),
        ({"rose_so_far": [1], "n": 2}, "one answer"),
        ({"rose_so_far": [1], "stream": False}, "only a stream"),
        ({"rose_so_far": [1], "return_token_ids": False}, "return_token_ids"),
        ({"rose_so_far": [1], "stop": ["x"]}, "stop strings"),
        ({"rose_so_far": [1], "prompt": "text"}, "token ids"),
        ({"rose_so_far": [1] * 6}, "6 tokens, but max_tokens is 5"),
    ],
)
async def test_what_can_not_go_on_is_refused_with_the_reason(fields: dict[str, Any], match: str) -> None:
    async with (
        ScriptedWorker() as worker,
        running_router(worker.url) as router,
        aiohttp.ClientSession() as http,
    ):
        body = {**BODY, "stream": True, **fields}
        status, answer = await Client(router, http).post("/v1/completions", body)
    assert (status, match in answer["error"]["message"]) == (400, True), answer
