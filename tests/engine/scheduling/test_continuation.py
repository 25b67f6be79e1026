"""What a request tells of its reasoning and its tokens so far never reaches the step as an error."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.request import Request
from vllm.v1.structured_output.request import StructuredOutputRequest
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from rose.engine.hooks.patches import continue_from_generated_tokens
from rose.engine.scheduling.continuation import count_as_output, take_over

pytestmark = pytest.mark.vllm

PROMPT = [1, 2, 3, 4]


class Manager:
    """Stands where vLLM has its manager: a parser that wants an effort it knows, a grammar that allows
    tokens below 10."""

    def __init__(self) -> None:
        self.executor = ThreadPoolExecutor(max_workers=1)
        self.threads: list[int] = []
        self.accepted: list[int] = []

    def _get_reasoner(self, request: Any) -> object:
        self.threads.append(threading.get_ident())
        kwargs = request.structured_output_request.reasoning_parser_kwargs or {}
        if not isinstance(kwargs.get("chat_template_kwargs", {}).get("reasoning_effort", "high"), str):
            raise ValueError("unsupported reasoning_effort")
        return None

    def accept_tokens(self, request: Any, tokens: list[int]) -> bool:
        self.threads.append(threading.get_ident())
        self.accepted += tokens
        return max(tokens) < 10


def request(tokens: list[int] | None = PROMPT, **extra: Any) -> Request:
    """A request whose grammar has been compiled."""
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(regex="x*"), extra_args=extra, max_tokens=5
    )
    made = Request("r", tokens or PROMPT, params, None)
    made.prompt_token_ids = tokens
    compiled: Future[Any] = Future()
    compiled.set_result("grammar")
    structured = made.structured_output_request
    assert isinstance(structured, StructuredOutputRequest)
    structured.grammar = compiled
    return made


def outcome(made: Request) -> Any:
    grammar = made.structured_output_request._grammar
    assert isinstance(grammar, Future)
    return grammar.exception(30) or grammar.result()


def test_a_parser_that_refuses_a_clients_arguments_fails_its_request_alone() -> None:
    made, manager = request(rose_chat_template_kwargs='{"reasoning_effort":5}'), Manager()
    take_over(made, manager)
    assert "unsupported reasoning_effort" in str(outcome(made))


def test_known_arguments_leave_the_grammar_as_it_is() -> None:
    made, manager = request(rose_chat_template_kwargs='{"reasoning_effort":"low"}'), Manager()
    take_over(made, manager)
    assert outcome(made) == "grammar"
    assert not manager.accepted


def test_a_compiled_grammar_is_advanced_in_another_thread_than_the_steps() -> None:
    made, manager = request(rose_generated=2), Manager()
    take_over(made, manager)
    assert (outcome(made), manager.accepted) == ("grammar", PROMPT[-2:])
    assert threading.get_ident() not in manager.threads


def test_tokens_that_the_grammar_refuses_fail_their_request_alone() -> None:
    made, manager = request([1, 2, 11], rose_generated=1), Manager()
    take_over(made, manager)
    assert "does not allow all of the 1 tokens" in str(outcome(made))


@pytest.mark.parametrize("generated", [0, -1, 4, 1.5, "2", None])
def test_a_number_that_is_none_leaves_the_request_as_it_is(generated: Any) -> None:
    made, manager = request(rose_generated=generated), Manager()
    take_over(made, manager)
    assert (outcome(made), manager.threads) == ("grammar", [])


def data_of(made: Request, *, is_v2: bool) -> NewRequestData:
    """What a scheduler makes of a request for its worker."""
    tokens = made._all_token_ids if is_v2 else None
    return NewRequestData.from_request(made, ([0],), tokens)


@pytest.mark.parametrize("is_v2", [False, True])
def test_generated_tokens_become_output_once_and_no_limit_changes(is_v2: bool) -> None:
    params = SamplingParams(max_tokens=5, min_tokens=1, extra_args={"rose_generated": 2})
    made = Request("r", [*PROMPT], params, None)
    data = data_of(made, is_v2=is_v2)
    count_as_output(made, data)
    for _ in range(2):
        assert (made.prompt_token_ids, made.num_prompt_tokens) == ([1, 2], 2)
        assert (list(made.output_token_ids), list(made.all_token_ids)) == ([3, 4], PROMPT)
        assert (made.max_tokens, params.max_tokens, params.min_tokens) == (7, 7, 3)
        count_as_output(made, data_of(made, is_v2=is_v2))  # as after a preemption
    if is_v2:
        assert (data.prompt_token_ids, data.prefill_token_ids) == ([1, 2], PROMPT)
    else:
        state = state_of(data)
        assert (state.prompt_token_ids, state.output_token_ids, state.num_prompt_tokens) == (
            [1, 2],
            [3, 4],
            2,
        )


def state_of(data: NewRequestData) -> CachedRequestState:
    """What a rank with Model Runner V1 makes of it."""
    continue_from_generated_tokens()
    continue_from_generated_tokens()  # idempotent
    return CachedRequestState(
        req_id=data.req_id,
        prompt_token_ids=data.prompt_token_ids,
        mm_features=[],
        sampling_params=data.sampling_params,
        generator=None,
        block_ids=data.block_ids,
        num_computed_tokens=0,
        output_token_ids=[],
    )


@pytest.mark.parametrize("generated", [0, -1, 4, 1.5, "2", None])
def test_a_number_that_is_none_leaves_the_whole_prompt(generated: Any) -> None:
    made = Request(
        "r", [*PROMPT], SamplingParams(max_tokens=5, extra_args={"rose_generated": generated}), None
    )
    data = data_of(made, is_v2=False)
    count_as_output(made, data)
    state = state_of(data)
    assert made.prompt_token_ids == state.prompt_token_ids == PROMPT
    assert (made.num_output_tokens, state.output_token_ids, made.max_tokens) == (0, [], 5)


def test_a_session_whose_prompt_grows_has_no_generated_tokens() -> None:
    params = SamplingParams(max_tokens=5, extra_args={"rose_generated": 2})
    made = Request("r", [*PROMPT], params, None, resumable=True)
    take_over(made, Manager())
    count_as_output(made, data_of(made, is_v2=False))
    assert made.prompt_token_ids == state_of(data_of(made, is_v2=False)).prompt_token_ids == PROMPT


def test_requests_without_a_grammar_or_without_ids_are_left_alone() -> None:
    made = request(None, rose_generated=2)
    take_over(made, Manager())
    assert outcome(made) == "grammar"
    made.structured_output_request = None
    made.sampling_params = None
    take_over(made, Manager())
