"""A stream without the prompt's ids, for a router that knows them."""

import json
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from probes import prompt
from real_engine import RealEngine
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Receive, Scope, Send

from rose.engine.http.prompt_ids import without_prompt_ids
from rose.http import NO_PROMPT_IDS_HEADER

ASKED = {NO_PROMPT_IDS_HEADER: "1"}
TEXT = 'a "prompt_token_ids":[7] ] \n b'
EVENTS: list[dict[str, Any]] = [
    {"choices": [{"text": TEXT, "prompt_token_ids": None}]},
    {"choices": [{"text": TEXT, "prompt_token_ids": [5, 6, 7], "token_ids": [8]}]},
    {"choices": [{"text": TEXT, "token_ids": [9]}]},
]


class Spared:
    """The engine's middleware without an engine."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, without_prompt_ids(scope, send))


def ask(response: Response, headers: dict[str, str]) -> str:
    app = Spared(Starlette(routes=[Route("/", lambda _: response)]))
    return TestClient(app).get("/", headers=headers).text


def sse(events: list[dict[str, Any]]) -> list[str]:
    return [f"data: {json.dumps(event, separators=(',', ':'))}\n\n" for event in events]


def said(events: list[dict[str, Any]]) -> tuple[list[int], str, str]:
    """Token ids, text and finish reason, however many tokens came in one event."""
    choices = [event["choices"][0] for event in events]
    token_ids = [token for choice in choices for token in choice["token_ids"]]
    return token_ids, "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


@pytest.mark.parametrize(("headers", "ids"), [({}, [5, 6, 7]), (ASKED, None)])
def test_only_the_ids_of_the_prompt_are_left_out_and_only_where_asked(
    headers: dict[str, str], ids: list[int] | None
) -> None:
    answer = ask(StreamingResponse(sse(EVENTS), media_type="text/event-stream"), headers)
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in answer.split("\n\n")[:-1]]
    expected: list[dict[str, Any]] = [event["choices"][0] for event in EVENTS]
    assert choices == [expected[0], {**expected[1], "prompt_token_ids": ids}, expected[2]]


def test_an_event_in_pieces_passes_as_it_is() -> None:
    whole = "".join(sse(EVENTS))
    cut = whole.index("6,7]")
    pieces = [whole[:cut], whole[cut:]]
    assert ask(StreamingResponse(pieces, media_type="text/event-stream"), ASKED) == whole


def test_an_answer_in_one_piece_is_as_long_as_it_says() -> None:
    assert json.loads(ask(JSONResponse(EVENTS[1]), ASKED)) == EVENTS[1]


@pytest.mark.vllm
@pytest.mark.slow
def test_an_engine_streams_the_same_tokens_without_the_ids_of_the_prompt(
    rollout: RealEngine,
) -> None:
    given = prompt("spared", 200)
    told, spared = (rollout.stream(given, 8, **headers) for headers in ({}, ASKED))
    assert told[0]["choices"][0]["prompt_token_ids"] == given
    assert spared[0]["choices"][0]["prompt_token_ids"] is None
    assert said(told) == said(spared)
