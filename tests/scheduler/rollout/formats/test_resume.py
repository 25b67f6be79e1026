"""However a generation is cut, the merged answer is that of the unbroken run."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.scheduler.rollout.formats.bodies import TokenIds
from rose.scheduler.rollout.formats.events import Chunk
from rose.scheduler.rollout.formats.resume import Accumulated, must_restart
from rose.types import WeightVersion
from tests.scheduler.rollout.scripted_worker import expected_tokens

PROMPT = TokenIds.of([5, 6, 7])


def chunk(tokens: list[int], prompt: TokenIds | None = None) -> Chunk:
    names = [f"token_id:{t}" for t in tokens]
    logprobs = {
        "tokens": names,
        "token_logprobs": [-t / 1000 for t in tokens],
        "top_logprobs": [None] * len(tokens),
    }
    text = "".join(f"<{t}>" for t in tokens)
    return Chunk(text=text, token_ids=tokens, logprobs=logprobs, prompt_token_ids=prompt)


def generate(body: dict[str, Any], max_new: int | None = None) -> list[int]:
    """What a greedy engine would give for a body, cut off after `max_new` tokens."""
    total = body["max_tokens"]
    return expected_tokens(body["prompt"].listed(), total if max_new is None else min(total, max_new))


def merged(generation: Accumulated) -> tuple[Any, ...]:
    return generation.text, generation.token_ids, generation.merged_logprobs(), generation.prompt_token_ids


@given(
    max_tokens=st.integers(1, 40),
    cuts=st.lists(st.integers(0, 12), max_size=6),
    chunk_size=st.integers(1, 5),
    request=st.fixed_dictionaries({}, optional={"stop": st.just(["x"]), "seed": st.integers(-5, 5)}),
)
def test_split_anywhere_then_merged_equals_unsplit(
    max_tokens: int, cuts: list[int], chunk_size: int, request: dict[str, Any]
) -> None:
    body = {"prompt": PROMPT, "max_tokens": max_tokens, **request}
    unsplit = Accumulated(request=body)
    unsplit.add(unsplit.begin(), chunk(generate(body), PROMPT), "w", None)

    split = Accumulated(request=body)
    for index, cut in enumerate([*cuts, None]):
        if split.is_exhausted:
            break
        epoch = split.begin()
        asked = split.next_body()
        tokens = generate(asked, cut)
        for start in range(0, len(tokens), chunk_size):
            first = asked["prompt"] if start == 0 else None
            piece = chunk(tokens[start : start + chunk_size], first)
            assert split.add(epoch, piece, f"w{index}", WeightVersion(run_id="r", number=index))

    assert merged(split) == merged(unsplit)
    assert sum(span.num_tokens for span in split.spans) == max_tokens
    assert all(a.worker != b.worker for a, b in pairwise(split.spans))


def test_late_chunks_of_an_attempt_that_was_given_up_are_dropped() -> None:
    generation = Accumulated(request={"prompt": PROMPT, "max_tokens": 8})
    old = generation.begin()
    assert generation.add(old, chunk([1, 2], PROMPT), "a", None)
    new = generation.begin()
    assert not generation.add(old, chunk([3]), "a", None)
    assert generation.add(new, chunk([4]), "b", None)
    assert generation.token_ids == [1, 2, 4]


def test_nothing_is_added_after_the_finish() -> None:
    generation = Accumulated(request={"prompt": PROMPT})
    epoch = generation.begin()
    generation.add(epoch, chunk([1], PROMPT), "a", None)
    generation.finish("stop", None)
    assert not generation.add(epoch, chunk([2]), "a", None)


def test_a_continuation_asks_for_the_rest_only() -> None:
    request = {"prompt": "text", "max_tokens": 10, "min_tokens": 4, "seed": 3, "truncate_prompt_tokens": 3}
    generation = Accumulated(request=request)
    generation.add(generation.begin(), chunk([1, 2, 3], PROMPT), "a", None)
    generation.begin()
    body = generation.next_body()
    assert body["prompt"] == TokenIds.of([5, 6, 7, 1, 2, 3])
    assert (body["max_tokens"], body["min_tokens"]) == (7, 1)
    assert body["seed"] != 3
    assert "truncate_prompt_tokens" not in body
    assert (generation.num_resumes, generation.num_restarts) == (1, 0)


def test_max_tokens_defaults_to_vllms_16() -> None:
    assert Accumulated(request={"prompt": PROMPT, "max_tokens": None}).max_tokens == 16


@pytest.mark.parametrize(
    ("request_part", "restarts"),
    [
        ({}, False),
        ({"stop": []}, False),
        ({"stop": ["\n"]}, True),
        ({"stop": "x"}, True),
        ({"stop_token_ids": [3]}, False),
        ({"structured_outputs": {"regex": "a+"}}, False),
        ({"response_format": {"type": "json_object"}}, False),
        ({"vllm_xargs": {"rose_tenant": "a"}}, False),
        ({"vllm_xargs": {"others": 1}}, True),
        ({"response_format": {"type": "text"}}, False),
        ({"thinking_token_budget": 5}, True),
        ({"presence_penalty": 0.5}, False),
        ({"repetition_penalty": 1.1}, False),
    ],
)
def test_constraints_that_span_the_cut_force_a_restart(request_part: dict[str, Any], restarts: bool) -> None:
    assert must_restart({"prompt": PROMPT, **request_part}) is restarts
    generation = Accumulated(request={"prompt": PROMPT, "max_tokens": 9, **request_part})
    generation.add(generation.begin(), chunk([1, 2], PROMPT), "a", None)
    generation.begin()
    assert (generation.next_body()["prompt"] == PROMPT) is restarts
    assert generation.num_restarts == int(restarts)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("structured_outputs", {"regex": "a+"}),
        ("response_format", {"type": "json_object"}),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -0.5),
        ("bad_words", ["a b"]),
        ("repetition_detection", {"max_pattern_size": 1, "min_count": 2}),
    ],
)
def test_a_continuation_with_a_state_says_how_many_tokens_were_generated(name: str, value: Any) -> None:
    """An engine takes the whole prompt for the client's otherwise, and begins the state anew."""
    request = {"prompt": PROMPT, "max_tokens": 9, name: value, "vllm_xargs": {"rose_tenant": "a"}}
    generation = Accumulated(request=request)
    generation.begin()
    assert generation.next_body()["vllm_xargs"] == {"rose_tenant": "a"}
    generation.add(1, chunk([1, 2, 3], PROMPT), "a", None)
    generation.begin()
    assert generation.next_body()["vllm_xargs"] == {"rose_tenant": "a", "rose_generated": 3}
