"""A front's turns at several routers."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from vllm.exceptions import GracefulHTTPError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import RequestOutputCollector

from rose.engine.front.token_plane import TokenPlane
from rose.node.checks import free_port
from tests.scheduler.rollout.conftest import running_router
from tests.scheduler.rollout.cutting_proxy import CuttingProxy
from tests.scheduler.rollout.scripted_worker import ScriptedWorker, expected_tokens

pytestmark = pytest.mark.vllm

PROMPT = [1, 2, 3]
NOWHERE = f"http://127.0.0.1:{free_port()}"


async def answer(urls: Sequence[str], **params: Any) -> list[int]:
    """Returns the tokens that a front hands on."""
    plane = TokenPlane(urls, "scripted", None)
    try:
        outputs = plane._answer(request_of(**params), {})
        return [token async for output in outputs for token in output.new_token_ids]
    finally:
        await plane._close()


def request_of(**params: Any) -> EngineCoreRequest:
    sampling = SamplingParams(max_tokens=8, output_kind=RequestOutputKind.DELTA, **params)
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


async def test_what_can_not_go_on_elsewhere_is_an_error() -> None:
    async with (
        ScriptedWorker() as worker,
        running_router(worker.url) as router,
        CuttingProxy(router.url, 3) as dying,
    ):
        with pytest.raises(GracefulHTTPError):
            await answer([dying.url, router.url], extra_args={"others": 1})
    with pytest.raises(GracefulHTTPError, match="does not answer"):
        await answer([NOWHERE])


async def test_a_token_waits_until_its_client_has_taken_the_last_one() -> None:
    """vLLM merges deltas otherwise, which some of its parsers misread."""
    taking, tokens = RequestOutputCollector(RequestOutputKind.DELTA, "r"), list[int]()
    async with ScriptedWorker() as worker, running_router(worker.url) as router:
        plane = TokenPlane([router.url], "scripted", None)
        plane.processor = SimpleNamespace(request_states={"r": SimpleNamespace(queue=taking)})
        await plane.add_request_async(request_of())
        is_finished = False
        while not is_finished:
            (output,) = (await plane.get_output_async()).outputs
            taking.output = output
            await asyncio.sleep(0.05)
            assert plane._outputs.empty()
            taking.output = None
            tokens += output.new_token_ids
            is_finished = output.finish_reason is not None
        await plane._close()
    assert tokens == expected_tokens(PROMPT, 8)
