"""What a worker's answer becomes in a front."""

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from vllm.exceptions import GracefulHTTPError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from rose.engine.front.calls import Outputs

pytestmark = pytest.mark.vllm


def outputs() -> Outputs:
    return Outputs(
        EngineCoreRequest(
            request_id="r",
            prompt_token_ids=[1],
            mm_features=None,
            sampling_params=SamplingParams(),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
    )


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_an_answer_that_its_worker_ended_unfinished_is_an_error(reason: str) -> None:
    part = {"choices": [{"token_ids": [5, 6], "finish_reason": reason}]}
    with pytest.raises(GracefulHTTPError, match=f"unfinished .{reason}.; send the request again") as caught:
        list(outputs().take(part))
    assert caught.value.http_status == 502


def test_a_whole_answer_is_handed_on() -> None:
    part = {"choices": [{"token_ids": [5, 6], "finish_reason": "length"}]}
    (output,) = outputs().take(part)
    assert (output.new_token_ids, str(output.finish_reason)) == ([5, 6], "length")
