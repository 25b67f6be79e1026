"""A front's turns at several routers."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

pytest.importorskip("vllm", reason="vllm is not installed")

from starlette.responses import PlainTextResponse
from vllm.exceptions import GracefulHTTPError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import RequestOutputCollector

from rose.engine.front import token_plane
from rose.engine.front.caller import NotesCaller
from rose.engine.front.token_plane import TokenPlane
from rose.ports import free_port
from tests.scheduler.rollout.conftest import running_router
from tests.scheduler.rollout.cutting_proxy import CuttingProxy
from tests.scheduler.rollout.scripted_worker import ScriptedWorker, expected_tokens
from tests.scheduler.rollout.waiting import until

pytestmark = pytest.mark.vllm

PROMPT = [1, 2, 3]
NOWHERE = f"http://127.0.0.1:{free_port()}"


async def answer(urls: Sequence[str], first_takes_s: float = 0.0, **params: Any) -> list[int]:
    """Returns the tokens that a front hands on."""
    plane, tokens = TokenPlane(urls, "scripted", None), list[int]()
    try:
        async for output in plane._answer(request_of(**params), {}):
            if not tokens:
                await asyncio.sleep(first_takes_s)
            tokens += output.new_token_ids
        return tokens
    finally:
        await plane._close()


def request_of(max_tokens: int = 8, **params: Any) -> EngineCoreRequest:
    sampling = SamplingParams(max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA, **params)
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=PROMPT,
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


async def test_a_chats_turn_goes_on_at_the_next_router_behind_the_tokens_that_arrived() -> None:
    async with (
        ScriptedWorker() as worker,
        running_router(worker.url) as router,
        CuttingProxy(router.url, 3) as dying,
    ):
        assert await answer([NOWHERE, dying.url, router.url]) == expected_tokens(PROMPT, 8)
        assert dying.has_cut
        assert [len(sent["prompt"]) for sent in worker.requests] == [3, 6]


async def test_tokens_that_arrived_before_their_router_died_are_not_made_again_for_a_slow_client() -> None:
    async with (
        ScriptedWorker() as worker,
        running_router(worker.url) as router,
        CuttingProxy(router.url, 3) as dying,
    ):
        assert await answer([dying.url, router.url], first_takes_s=1.0) == expected_tokens(PROMPT, 8)
        assert [len(sent["prompt"]) for sent in worker.requests] == [3, 6]


async def test_a_chats_turn_waits_for_its_only_router_and_goes_on_behind_the_tokens_that_arrived() -> None:
    async with ScriptedWorker() as worker, AsyncExitStack() as routers:
        router = await routers.enter_async_context(running_router(worker.url))
        async with CuttingProxy(router.url, 3) as dying:
            port = int(dying.url.rpartition(":")[2])
            answering = asyncio.create_task(answer([dying.url]))
            await until(lambda: dying.has_cut)
        await asyncio.sleep(0.2)
        await routers.enter_async_context(running_router(worker.url, port=port))
        assert await answering == expected_tokens(PROMPT, 8)
        assert [len(sent["prompt"]) for sent in worker.requests] == [3, 6]


async def test_the_next_router_is_asked_for_its_models_where_one_is_down_or_has_no_worker() -> None:
    async with ScriptedWorker() as worker, running_router(worker.url) as router, running_router() as empty:
        plane = TokenPlane([NOWHERE, empty.url, router.url], "scripted", None)
        try:
            for _ in range(2):
                assert [card["id"] for card in await plane.model_cards()] == ["scripted"]
        finally:
            await plane._close()
    for urls in ([NOWHERE], [NOWHERE, f"{NOWHERE}/other"]):
        plane = TokenPlane(urls, "scripted", None)
        with pytest.raises(GracefulHTTPError, match="does not answer"):
            await plane.model_cards()
        await plane._close()


@pytest.mark.parametrize(("status", "text"), [(500, "failed"), (200, "nonsense"), (200, "[]"), (200, "{}")])
async def test_the_next_router_is_asked_for_its_models_where_one_answers_nonsense(
    status: int, text: str
) -> None:
    async def broken(_: web.Request) -> web.Response:
        return web.Response(text=text, status=status, content_type="application/json")

    app = web.Application()
    app.router.add_get("/v1/models", broken)
    async with (
        TestServer(app) as server,
        ScriptedWorker() as worker,
        running_router(worker.url) as router,
    ):
        plane = TokenPlane([str(server.make_url("/")).rstrip("/"), router.url], "scripted", None)
        assert [card["id"] for card in await plane.model_cards()] == ["scripted"]
        await plane._close()


async def test_a_header_that_the_router_could_not_read_is_answered_400() -> None:
    async def said(name: bytes, value: bytes) -> int:
        scope = {"type": "http", "method": "POST", "path": "/v1/messages", "headers": [(name, value)]}
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request"}

        await NotesCaller(PlainTextResponse("ok"))(scope, receive, send)
        return int(sent[0]["status"])

    assert await said(b"x-session-id", b"\xff") == 400
    assert await said(b"x-session-id", "é".encode()) == 200
    assert await said(b"x-another", b"\xff") == 200


async def test_what_can_not_go_on_elsewhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_plane, "RETRY_S", 0.1)
    async with (
        ScriptedWorker() as worker,
        running_router(worker.url) as router,
        CuttingProxy(router.url, 3) as dying,
    ):
        with pytest.raises(GracefulHTTPError):
            await answer([dying.url, router.url], extra_args={"others": 1})
    with pytest.raises(GracefulHTTPError, match="does not answer"):
        await answer([NOWHERE])


def delta(index: int, token_ids: Sequence[int]) -> RequestOutput:
    """What vLLM makes of an output of the answer `index` of a chat."""
    answer = CompletionOutput(index, "", token_ids, cumulative_logprob=None, logprobs=None)
    return RequestOutput("r", None, PROMPT, None, [answer], finished=False)


async def taken(num_tokens: int, client_s: float | None) -> tuple[list[int], int]:
    """Returns the tokens of a stream, and how many came while the client had not taken the last one.

    `client_s`: how long the client takes for each token; None: it takes none.
    """
    taking, tokens, num_early = RequestOutputCollector(RequestOutputKind.DELTA, "r"), list[int](), 0
    async with ScriptedWorker() as worker, running_router(worker.url) as router:
        plane = TokenPlane([router.url], "scripted", None)
        plane.processor = SimpleNamespace(
            request_states={"r": SimpleNamespace(queue=taking, request_index=0)}
        )
        await plane.add_request_async(request_of(num_tokens))
        is_finished = False
        while not is_finished:
            (output,) = (await plane.get_output_async()).outputs
            num_early += taking.output is not None
            taking.put(delta(0, output.new_token_ids))
            if client_s is not None:
                await asyncio.sleep(client_s)
                num_early += plane._outputs.qsize()
                taking.get_nowait()
            tokens += output.new_token_ids
            is_finished = output.finish_reason is not None
        await plane._close()
    return tokens, num_early


async def test_a_token_waits_until_its_client_has_taken_the_last_one() -> None:
    """vLLM merges deltas otherwise, which some of its parsers misread."""
    assert await taken(8, 0.05) == (expected_tokens(PROMPT, 8), 0)


async def test_a_client_that_keeps_up_gets_single_tokens_however_long_the_answer_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_plane, "_PATIENCE_S", 0.05)
    assert await taken(40, 0.005) == (expected_tokens(PROMPT, 40), 0)


async def test_a_client_that_takes_nothing_holds_up_its_own_tokens_for_a_bounded_time_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(token_plane, "_PATIENCE_S", 0.05)
    tokens, num_early = await taken(40, None)
    assert tokens == expected_tokens(PROMPT, 40) and num_early > 0


async def test_one_answer_of_a_chat_does_not_wait_for_another() -> None:
    taking = RequestOutputCollector(RequestOutputKind.DELTA, "r")
    plane = TokenPlane([NOWHERE], "scripted", None)
    states = {name: SimpleNamespace(queue=taking, request_index=at) for at, name in enumerate(("a", "b"))}
    plane.processor = SimpleNamespace(request_states=states)
    taking.put(delta(0, [7]))
    assert plane._is_behind("a") and not plane._is_behind("b")
    taking.put(delta(1, [8]))
    assert plane._is_behind("a") and plane._is_behind("b")
    both = taking.get_nowait()
    assert both is not None and [answer.token_ids for answer in both.outputs] == [[7], [8]]
    assert not plane._is_behind("a") and not plane._is_behind("b")
