"""Fronts beside the router: which requests they get, and their life as processes. What they say is tested in
tests/engine/front."""

import sys
from pathlib import Path
from typing import Any

import pytest

from rose.errors import ConfigError
from rose.scheduler.rollout.formats.chat import suits_front
from rose.scheduler.rollout.http.command import main
from rose.scheduler.rollout.http.fronts import Front
from tests.scheduler.rollout.conftest import StartRouter
from tests.scheduler.rollout.scripted_worker import ScriptedWorker

SAID = [{"role": "user", "content": "hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]


@pytest.mark.parametrize(
    ("more", "suits"),
    [
        ({"tools": [{}]}, True),
        ({"stop": ["x"], "presence_penalty": 1.0}, True),
        ({"use_beam_search": True}, False),
        ({"prompt_logprobs": 0}, False),
        ({"thinking_token_budget": 5}, False),
        ({"messages": IMAGE}, False),
    ],
)
def test_fronts_get_chats_of_text_that_token_level_turns_can_make(more: dict[str, Any], suits: bool) -> None:
    assert suits_front({"messages": SAID, **more}) is suits


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
async def test_what_only_a_front_understands_is_refused_without_one(
    start_router: StartRouter, path: str
) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        status, answer = await client.post(path, {"model": "scripted", "input": "hi", "messages": SAID})
        assert status == 404
        assert "--front 1 -- --model DIR" in answer["error"]["message"]
        assert not worker.requests


async def test_a_chat_is_told_to_wait_while_no_front_is_ready(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker:
        fronts = {"count": 1, "flags": ["--model", "nowhere"]}
        async with start_router(worker, fronts=fronts) as client:
            status, answer = await client.post("/v1/chat/completions", {"messages": SAID, "tools": [{}]})
            assert (status, answer["error"]["type"]) == (503, "ServiceUnavailableError")
            assert "fronts" in answer["error"]["message"]
            assert (await client.get("/health"))[1]["fronts"] == 0


async def test_a_front_that_refuses_its_flags_ends_the_router(tmp_path: Path) -> None:
    front = Front("front-0", tmp_path / "0", [sys.executable, "-c", "raise SystemExit(2)"], {})
    with pytest.raises(ConfigError, match="front-0 ended with status 2"):
        await front.run()
    await front.stop()


def test_flags_behind_the_dashes_are_the_fronts() -> None:
    with pytest.raises(ConfigError, match="fronts: flags lack --model DIR"):
        main(["--front", "1", "--", "--tool-call-parser", "hermes"])
