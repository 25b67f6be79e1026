"""Routed experts in vLLM's stream of a completion: the rows are in the event that ends a choice."""

import io
import json
from base64 import b64decode
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from front.requests_of_front import outputs
from vllm.entrypoints.openai.completion import serving
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.outputs import CompletionOutput, RequestOutput

from rose.engine.front.calls import Outputs
from rose.engine.hooks import patches
from rose.errors import ConfigError

pytestmark = pytest.mark.vllm

ROWS = np.arange(12, dtype=np.uint8).reshape(4, 3, 1)
Completion = serving.OpenAIServingCompletion


async def results(*, with_rows: bool) -> AsyncIterator[tuple[int, RequestOutput]]:
    """What the output processor gives of a prompt of two tokens and two answers of three."""
    for index in (0, 1):
        for tokens, finish in (([7, 8], None), ([9], "length")):
            choice = CompletionOutput(index, "x", tokens, None, None, finish_reason=finish)
            if with_rows and finish is not None:
                choice.routed_experts = ROWS + index
            yield 0, RequestOutput("r", "p", [1, 2], None, [choice], finish is not None)


async def streamed(*, with_rows: bool) -> list[Any]:
    its: Any = SimpleNamespace(
        enable_force_include_usage=False,
        enable_prompt_tokens_details=False,
        system_fingerprint=None,
        _raise_if_error=lambda *_: None,
    )
    request = CompletionRequest(
        model="m", prompt=[1, 2], n=2, max_tokens=3, stream=True, return_token_ids=True
    )
    given = {"request_id": "r", "created_time": 1, "model_name": "m", "num_prompts": 1, "tokenizer": None}
    stream = Completion.completion_stream_generator(
        its, request, [], results(with_rows=with_rows), **given, request_metadata=SimpleNamespace()
    )
    events = [event async for event in stream]
    assert events.pop() == "data: [DONE]\n\n"
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_the_last_event_of_each_choice_has_its_rows_and_nothing_else_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = Completion.completion_stream_generator
    monkeypatch.setattr(Completion, "completion_stream_generator", stock)  # it is put back afterwards
    before = await streamed(with_rows=True)
    for _ in range(2):
        patches.stream_routed_experts()
    assert await streamed(with_rows=False) == before
    found = await streamed(with_rows=True)
    rows = [event["choices"][0].pop("routed_experts", None) for event in found]
    assert found == before
    assert [each is not None for each in rows] == [False, True, False, True]
    for index in (0, 1):
        assert np.array_equal(np.load(io.BytesIO(b64decode(rows[2 * index + 1]))), ROWS + index)


def test_a_vllm_without_the_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Completion, "completion_stream_generator", lambda self, request: None)
    with pytest.raises(ConfigError, match=r"completion_stream_generator.*which rose needs; install vllm"):
        patches.stream_routed_experts()


def test_a_front_hands_the_rows_on_with_the_finish() -> None:
    from vllm.utils.serial_utils import numpy2base64

    made: Outputs = outputs()
    choice = {"token_ids": [5, 6], "finish_reason": "length", "routed_experts": numpy2base64(ROWS)}
    (output,) = made.take({"choices": [choice]})
    assert output.routed_experts is not None and np.array_equal(output.routed_experts, ROWS)
