"""Chats through the router: cut anywhere, the client reads the unbroken answer or a clear error."""

import json
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI

from rose.scheduler.rollout.formats.chat import can_resume, transcript
from tests.scheduler.rollout.conftest import Client, StartRouter
from tests.scheduler.rollout.scripted_worker import Fault, ScriptedWorker, expected_tokens, rendered

MESSAGES: Any = [{"role": "user", "content": "hi"}]
TOKENS = expected_tokens(rendered(MESSAGES), 9)
TEXT = "".join(f"<{token}>" for token in TOKENS)
SETTINGS: Any = {"model": "scripted", "messages": MESSAGES, "max_tokens": 9}
WITH_IDS: Any = {"extra_body": {"return_token_ids": True}}


def openai_client(client: Client) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{client.router.url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("kind", ["abort_reclaimed", "disconnect", "error", "swallowed"])
async def test_a_cut_chat_goes_on_from_its_tokens(start_router: StartRouter, kind: str) -> None:
    async with ScriptedWorker() as bad, ScriptedWorker() as good:
        bad.faults.append(Fault(kind=kind, after_tokens=4))
        async with (
            start_router(bad, (good, "serving"), avoid_s=60) as client,
            openai_client(client) as openai,
        ):
            answer: Any = await openai.chat.completions.create(**SETTINGS, **WITH_IDS, logprobs=True)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", TEXT)
    assert (choice.token_ids, answer.prompt_token_ids) == (TOKENS, rendered(MESSAGES))
    assert [entry.token for entry in choice.logprobs.content] == [f"<{token}>" for token in TOKENS]
    assert (choice.finish_reason, choice.rose["resumes"], choice.rose["restarts"]) == ("length", 1, 0)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (2, 9)
    (continued,) = good.requests
    assert continued["kv_transfer_params"]["prompt_token_ids"] == rendered(MESSAGES) + TOKENS[:4]
    assert continued["max_tokens"] == 5


async def test_choices_of_a_streamed_chat_are_cut_and_resumed_apart(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker:
        worker.faults.extend(Fault(kind="abort_reclaimed", after_tokens=n) for n in (2, 5, 1))
        async with start_router(worker) as client, openai_client(client) as openai:
            stream: Any = await openai.chat.completions.create(
                **SETTINGS, **WITH_IDS, n=2, stream=True, stream_options={"include_usage": True}
            )
            events = [event async for event in stream]
        assert client.counters()["resumed"] == 3
    for index in (0, 1):
        choices = [c for event in events for c in event.choices if c.index == index]
        assert "".join(choice.delta.content or "" for choice in choices) == TEXT
        assert [token for choice in choices for token in getattr(choice, "token_ids", [])] == TOKENS
        assert [choice.delta.role for choice in choices if choice.delta.role] == ["assistant"]
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["length"]
    assert events[-1].usage.completion_tokens == 18
    assert len({event.id for event in events}) == 1


async def test_a_worker_with_a_parser_gets_its_chats_whole(start_router: StartRouter) -> None:
    async with ScriptedWorker(parses_chat=True) as worker:
        async with start_router(worker) as client, openai_client(client) as openai:
            for _ in range(2):
                answer = await openai.chat.completions.create(**SETTINGS)
                assert answer.choices[0].message.content == "hello"  # its own words, not the tokens' text
        was_streamed = [bool(request.get("stream")) for request in worker.requests]
    assert was_streamed == [True, False, False]


async def test_a_worker_that_renders_anew_makes_the_chat_start_again(start_router: StartRouter) -> None:
    async with ScriptedWorker(takes_chat_ids=False) as worker:
        worker.faults.append(Fault(kind="abort_reclaimed", after_tokens=4))
        async with start_router(worker) as client, openai_client(client) as openai:
            answer: Any = await openai.chat.completions.create(**SETTINGS)
            assert answer.choices[0].message.content == TEXT
            assert answer.choices[0].rose["restarts"] == 1
            worker.faults.append(Fault(kind="abort_reclaimed", after_tokens=4))
            stream: Any = await openai.chat.completions.create(**SETTINGS, stream=True)
            with pytest.raises(APIError, match="can't be carried to another worker"):
                [event async for event in stream]


async def test_a_whole_chat_is_tried_again_until_its_client_received_something(
    start_router: StartRouter,
) -> None:
    stateful: Any = {**SETTINGS, "stop": ["x"]}
    async with (
        ScriptedWorker() as worker,
        start_router(worker) as client,
        openai_client(client) as openai,
    ):
        worker.faults.append(Fault(kind="abort_reclaimed"))
        answer = await openai.chat.completions.create(**stateful)
        assert (answer.choices[0].message.content, len(worker.requests)) == ("hello", 2)
        worker.faults.append(Fault(kind="disconnect"))
        stream: Any = await openai.chat.completions.create(**stateful, stream=True)
        with pytest.raises(APIError, match="broke off"):
            [event async for event in stream]
        assert len(worker.requests) == 3


async def test_a_chat_without_a_key_stays_on_its_worker(start_router: StartRouter) -> None:
    async with ScriptedWorker() as one, ScriptedWorker() as two, start_router(one, two) as client:
        for turn in range(4):
            messages = [*MESSAGES, *({"role": "assistant", "content": TEXT} for _ in range(turn > 0))]
            messages += [{"role": "user", "content": "more"}] * turn
            _, answer = await client.post("/v1/chat/completions", {**SETTINGS, "messages": messages})
            assert answer["choices"][0]["finish_reason"] == "length"
        assert client.router.plane.status()["sessions"] == 1


@pytest.mark.parametrize(
    ("part", "is_resumable"),
    [
        ({}, True),
        ({"max_tokens": None, "max_completion_tokens": 5}, True),
        ({"max_tokens": None}, False),
        ({"tools": None, "tool_choice": "none", "response_format": {"type": "text"}, "stop": []}, True),
        ({"tools": [{"type": "function"}]}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"stop": ["x"]}, False),
        ({"presence_penalty": 0.5, "bad_words": ["x"]}, True),
        ({"add_generation_prompt": False}, False),
        ({"echo": True}, False),
        ({"a field of tomorrow": 1}, False),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]}, True),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, False),
    ],
    ids=json.dumps,
)
def test_only_a_chat_whose_meaning_survives_a_cut_is_resumed(
    part: dict[str, Any], is_resumable: bool
) -> None:
    assert can_resume({**SETTINGS, **part}) is is_resumable


def test_a_next_turn_begins_with_the_transcript_and_the_answer() -> None:
    following = [*MESSAGES, {"role": "assistant", "content": TEXT}, {"role": "user", "content": "more"}]
    assert transcript(following).startswith(transcript(MESSAGES) + TEXT)
    other = [*MESSAGES, {"role": "assistant", "content": "else"}, {"role": "user", "content": "more"}]
    assert not transcript(other).startswith(transcript(MESSAGES) + TEXT)
