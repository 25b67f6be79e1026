"""Tokens that a stream holds back for its interval: sent when asked, each once and in order."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from rose.engine.http.streams import check_output_processor, send_held_back
from rose.errors import ConfigError

INTERVAL = 4


def stream(processor: OutputProcessor, kind: RequestOutputKind) -> RequestOutputCollector:
    """A request's stream of tokens without text."""
    params = SamplingParams(max_tokens=100, detokenize=False, output_kind=kind)
    request = EngineCoreRequest(
        request_id="r",
        external_req_id="r",
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    queue = RequestOutputCollector(kind, "r")
    processor.add_request(request, None, queue=queue)
    return queue


def step(processor: OutputProcessor, token: int, finish: FinishReason | None = None) -> None:
    processor.process_outputs([EngineCoreOutput("r", [token], finish_reason=finish)])


def taken(queue: RequestOutputCollector) -> list[int]:
    output: Any = queue.get_nowait()
    return list(output.outputs[0].token_ids) if output is not None else []


@pytest.mark.parametrize("num_held", [0, 1, 2, 3])
def test_what_was_held_back_comes_at_once_and_the_rest_after_a_whole_interval(num_held: int) -> None:
    processor = OutputProcessor(None, log_stats=False, stream_interval=INTERVAL)
    queue = stream(processor, RequestOutputKind.DELTA)
    step(processor, 10)
    assert taken(queue) == [10]
    old = [20 + i for i in range(num_held)]
    for token in old:
        step(processor, token)
    assert taken(queue) == []
    send_held_back(processor)
    assert taken(queue) == old
    send_held_back(processor)
    assert taken(queue) == []
    for token in (30, 31, 32):
        step(processor, token)
        assert taken(queue) == []
    step(processor, 33)
    assert taken(queue) == [30, 31, 32, 33]
    step(processor, 40, FinishReason.LENGTH)
    assert taken(queue) == [40]


def test_answers_that_come_whole_are_left_alone() -> None:
    processor = OutputProcessor(None, log_stats=False, stream_interval=INTERVAL)
    queue = stream(processor, RequestOutputKind.FINAL_ONLY)
    for token in (10, 11):
        step(processor, token)
    send_held_back(processor)
    step(processor, 12, FinishReason.LENGTH)
    assert taken(queue) == [10, 11, 12]


def test_a_vllm_whose_output_processor_is_another_is_refused_with_what_it_lacks() -> None:
    class Other:
        def __init__(self) -> None:
            self.queue = self.detokenizer = self.output_kind = self.stream_interval = None

        def make_request_output(self, new_token_ids: list[int]) -> None: ...

    check_output_processor()
    lacking = r"Other.sent_tokens_offset, Other.request_states, Other.make_request_output\(new_token_ids, "
    with pytest.raises(ConfigError, match=f"vLLM has no {lacking}.*: this version is not supported by rose"):
        check_output_processor(Other, Other)
    with pytest.raises(ConfigError, match=r"vLLM has no type.detokenizer, .*type.make_request_output"):
        check_output_processor(type("type", (), {}), type("type", (), {}))
