"""The router says whether a trajectory's next prompt begins with the tokens that were sampled."""

from typing import Any

import pytest

from tests.scheduler.rollout.conftest import Client, StartRouter
from tests.scheduler.rollout.scripted_worker import ScriptedWorker, expected_tokens

PROMPT = [1, 2, 3]
SAID = [*PROMPT, *expected_tokens(PROMPT, 4)]


async def turn(client: Client, prompt: list[int], **headers: str) -> Any:
    answer = await client.complete({"prompt": prompt, "max_tokens": 4}, X_Rose_Job="agents", **headers)
    return answer["choices"][0]["rose"]["extends_last_turn"]


@pytest.mark.parametrize(
    ("following", "extends"),
    [([*SAID, 9], True), (SAID, True), ([*SAID[:-1], 9, 9], False), (PROMPT, False)],
    ids=["extended", "equal", "another token", "repeated"],
)
async def test_a_next_prompt_is_compared_with_the_tokens_that_were_sampled(
    start_router: StartRouter, following: list[int], extends: bool
) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        assert await turn(client, PROMPT, X_Session_ID="t") is None
        assert await turn(client, following, X_Session_ID="t") is extends
        assert await turn(client, following, X_Session_ID="another") is None
        counts = {"extended": int(extends), "diverged": int(not extends)}
        _, status = await client.get("/admin/status")
        assert status["jobs"]["agents"]["next_turns"] == counts
        async with client.http.get(f"{client.router.url}/metrics") as response:
            text = await response.text()
        for tokens, count in counts.items():
            assert f'rose_router_next_turns_total{{job="agents",tokens="{tokens}"}} {count}.0' in text


async def test_texts_are_not_compared(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        for prompt in ("hello", "hello again"):
            answer = await client.complete({"prompt": prompt, "max_tokens": 4}, X_Session_ID="t")
            assert answer["choices"][0]["rose"]["extends_last_turn"] is None
