"""Routed experts of turns that are cut: the rows of all tokens but the last, each once and in order."""

import json
from typing import Any

import pytest

from rose.scheduler.rollout.formats.routed import RoutedExperts
from tests.scheduler.rollout.conftest import StartRouter
from tests.scheduler.rollout.expert_rows import experts_of
from tests.scheduler.rollout.scripted_worker import Fault, ScriptedWorker, expected_tokens

PROMPT = [5, 6, 7]
NUM_TOKENS = 8
WHOLE = [*PROMPT, *expected_tokens(PROMPT, NUM_TOKENS)]


def cut(*, reports_rows: bool, num_kept: int = 2, first: int = 0) -> RoutedExperts:
    """A turn that was cut behind 3 of its tokens, of which the router kept some, and resumed."""
    found = RoutedExperts(first)
    if reports_rows:
        found.take(experts_of(WHOLE[:6], first))
    start = found.resume(3 + num_kept)
    found.take(experts_of(WHOLE, start))
    return found


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("num_kept", [1, 2, 3])
@pytest.mark.parametrize("reports_rows", [True, False])
def test_the_rows_of_a_resumed_turn_are_those_of_a_whole_one(
    reports_rows: bool, num_kept: int, first: int
) -> None:
    found = cut(reports_rows=reports_rows, num_kept=num_kept, first=first)
    assert found.merged(len(WHOLE)) == experts_of(WHOLE, first)
    assert found.recomputed == ([] if reports_rows else [(first, 2 + num_kept)])


def test_what_was_computed_again_is_told_as_disjoint_ranges_in_order() -> None:
    found = RoutedExperts()
    for num_tokens in (4, 6):  # two workers are killed
        found.resume(num_tokens)
    found.take(experts_of(WHOLE[:9]))
    for num_tokens in (9, 10, 11):  # one gives the turn up and tells its rows, and two more are killed
        found.resume(num_tokens)
    found.take(experts_of(WHOLE, 8))
    assert found.recomputed == [(0, 5), (8, 10)]
    assert found.merged(len(WHOLE)) == experts_of(WHOLE)


def test_a_turn_with_rows_missing_or_malformed_at_the_end_has_none() -> None:
    found = RoutedExperts()
    found.take(experts_of(WHOLE[:6]))
    found.resume(6)
    assert found.merged(len(WHOLE)) is None
    for wrong in ("nonsense", "", experts_of(WHOLE[:7], 5)):
        found.take(wrong)
        assert found.merged(len(WHOLE)) is None


def test_malformed_rows_of_a_cut_attempt_are_made_anew() -> None:
    found = RoutedExperts()
    found.take("nonsense")
    assert found.resume(5) == 0
    found.take(experts_of(WHOLE))
    assert found.merged(len(WHOLE)) == experts_of(WHOLE)


def last_choice(stream: str) -> Any:
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
    return json.loads(events[-1])["choices"][0]


@pytest.mark.parametrize("kind", ["abort_reclaimed", "disconnect"])
@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate"])
async def test_a_turn_that_moves_has_the_rows_of_all_its_tokens(
    start_router: StartRouter, path: str, is_streamed: bool, kind: str
) -> None:
    body: dict[str, Any] = {"model": "scripted", "stream": is_streamed, "return_token_ids": True}
    if path == "/v1/completions":
        body |= {"prompt": PROMPT, "max_tokens": NUM_TOKENS}
    else:
        body |= {"token_ids": PROMPT, "sampling_params": {"max_tokens": NUM_TOKENS}}
    async with (
        ScriptedWorker(tells_experts=True) as one,
        ScriptedWorker(tells_experts=True) as other,
        start_router(one, other) as client,
    ):
        for worker in (one, other):
            worker.faults.append(Fault(kind=kind, after_tokens=3))
        async with client.http.post(f"{client.router.url}{path}", json=body) as response:
            answer = await response.text()
    choice = last_choice(answer) if is_streamed else json.loads(answer)["choices"][0]
    assert choice["rose"]["resumes"] == 2
    assert choice["routed_experts"] == experts_of(WHOLE)
    recomputed = choice["rose"].get("recomputed_experts", [])
    assert recomputed == ([] if kind == "abort_reclaimed" else [[0, 8]])
