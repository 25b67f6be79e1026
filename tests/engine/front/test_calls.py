"""What a worker's answer becomes in a front."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from front.requests_of_front import outputs
from vllm.exceptions import GracefulHTTPError
from vllm.sampling_params import RequestOutputKind

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_its_worker_ended_unfinished_is_an_error(reason: str) -> None:
    part = {"choices": [{"token_ids": [5, 6], "finish_reason": reason}]}
    with pytest.raises(GracefulHTTPError, match=f"unfinished .{reason}.; send the request again") as caught:
        list(outputs().take(part))
    assert caught.value.http_status == 502


def test_tokens_that_come_together_are_handed_on_one_by_one_where_each_is_a_delta() -> None:
    """Some parsers misread a delta that holds a mark and text."""
    made = outputs(output_kind=RequestOutputKind.DELTA)
    parts: Any = [{"token_ids": [5, 6, 7]}, {"token_ids": [8, 9], "finish_reason": "stop"}]
    found = [output for part in parts for output in made.take({"choices": [part]})]
    assert [output.new_token_ids for output in found] == [[5], [6], [7], [8], [9]]
    assert [output.finish_reason is not None for output in found] == [False, False, False, False, True]


def test_a_whole_answer_is_handed_on() -> None:
    part = {"choices": [{"token_ids": [5, 6], "finish_reason": "length"}]}
    (output,) = outputs().take(part)
    assert (output.new_token_ids, str(output.finish_reason)) == ([5, 6], "length")
