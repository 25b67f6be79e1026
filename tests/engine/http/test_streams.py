"""Tokens that a stream holds back for its interval: sent when asked, each once and in order."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from rose.engine.http.streams import check_output_processor, pause_steps, send_held_back
from rose.errors import ConfigError

INTERVAL = 4


def stream(processor: OutputProcessor, kind: RequestOutputKind, name: str = "r") -> RequestOutputCollector:
    """A request's stream of tokens without text."""
    params = SamplingParams(max_tokens=100, detokenize=False, output_kind=kind)
    request = EngineCoreRequest(
        request_id=name,
        external_req_id=name,
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    queue = RequestOutputCollector(kind, name)
    processor.add_request(request, None, queue=queue)
    return queue


def step(processor: OutputProcessor, token: int, finish: FinishReason | None = None, name: str = "r") -> None:
    processor.process_outputs([EngineCoreOutput(name, [token], finish_reason=finish)])


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


class Core:
    """An engine core whose last steps end while it pauses, and vLLM's own task that processes outputs."""

    def __init__(self, last_steps: list[list[EngineCoreOutput]]) -> None:
        self.outputs_queue = asyncio.Queue[EngineCoreOutputs]()
        self.get_output_async = self.outputs_queue.get
        self._last_steps = last_steps

    async def pause_scheduler_async(self, mode: str, *, clear_cache: bool) -> None:
        assert (mode, clear_cache) == ("keep", False)
        for outputs in self._last_steps:
            self.outputs_queue.put_nowait(EngineCoreOutputs(outputs=outputs))


async def test_a_pause_sends_the_tokens_of_the_last_steps_to_every_one_of_many_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM processes the outputs of a step bit by bit, and lets other tasks run in between."""
    monkeypatch.setenv("VLLM_V1_OUTPUT_PROC_CHUNK_SIZE", "2")
    processor, names = OutputProcessor(None, log_stats=False, stream_interval=INTERVAL), list("abcdefghi")
    queues = [stream(processor, RequestOutputKind.DELTA, name) for name in names]
    for name in names:
        step(processor, 10, name=name)
    assert [taken(queue) for queue in queues] == [[10]] * len(names)
    steps = [[EngineCoreOutput(name, [token]) for name in names] for token in (20, 21)]
    client: Any = SimpleNamespace(
        engine_core=Core(steps),
        output_processor=processor,
        output_handler=None,
        is_running=True,
        renderer=SimpleNamespace(mm_processor_cache=None),
        log_stats=False,
        logger_manager=None,
    )
    AsyncLLM._run_output_handler(client)
    await pause_steps(client)
    assert [taken(queue) for queue in queues] == [[20, 21]] * len(names)
    client.output_handler.cancel()


async def test_the_pause_of_an_engine_that_has_ended_ends_too() -> None:
    client: Any = SimpleNamespace(
        engine_core=Core([[]]), output_processor=OutputProcessor(None, log_stats=False), is_running=False
    )
    await pause_steps(client)


def test_a_vllm_whose_output_processor_is_another_is_refused_with_what_it_lacks() -> None:
    class Other:
        def __init__(self) -> None:
            self.queue = self.detokenizer = self.output_kind = self.stream_interval = None

        def make_request_output(self, new_token_ids: list[int]) -> None: ...

    check_output_processor()
    lacking = r"Other.sent_tokens_offset, Other.request_states, .*Other.make_request_output\(new_token_ids, "
    with pytest.raises(ConfigError, match=f"vLLM has no {lacking}.*, which rose needs; install vllm 0.30"):
        check_output_processor(Other, Other)
    with pytest.raises(ConfigError, match=r"vLLM has no type.detokenizer, .*type.make_request_output"):
        check_output_processor(type("type", (), {}), type("type", (), {}))
    with pytest.raises(ConfigError, match=r"vLLM has no type.outputs_queue, type.pause_scheduler_async, "):
        check_output_processor(core=type("type", (), {}))
