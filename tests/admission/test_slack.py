"""Worked numbers for the printed slacks and the corrected latest start times."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.admission.slack import (
    NEVER,
    ActiveDecode,
    PendingPrefill,
    latest_start_ttft,
    literal_latest_start,
    shrunk_target,
    token_due,
    tpot_slack,
    ttft_slack,
)
from rose.admission.step_time import StepTimeModel
from rose.types import SLO

SLO_500_150 = SLO(ttft_s=0.5, tpot_s=0.15)
# 10 ms + 0.1 ms per prefill token + 1 ms per decode
MODEL = StepTimeModel(base_s=0.01, per_prefill_token_s=1e-4, per_decode_s=1e-3, margin_s=0.0)


def test_ttft_slack_is_what_the_papers_equation_1_gives() -> None:
    # arrived at 10.0, due at 10.5, now 10.2, prefill takes 0.06: 0.24 left (eq. 1)
    assert ttft_slack(10.2, 10.0, 0.5, 0.06) == pytest.approx(0.24)


def test_tpot_slack_is_what_the_papers_equation_2_gives() -> None:
    # last token at 10.00, due at 10.15, now 10.05, a step takes 0.03: 0.07 left (eq. 2)
    assert tpot_slack(10.05, 10.0, 0.15, 0.03) == pytest.approx(0.07)


def test_slacks_of_the_papers_equations_take_the_least_over_all_requests() -> None:
    pending = [PendingPrefill(arrival_s=10.0, remaining_tokens=500)]  # one chunk: 60 ms -> 10.44
    decodes = [
        ActiveDecode(first_token_s=9.0, last_token_s=10.1, num_output_tokens=9),  # 10.25 - 12 ms
        ActiveDecode(first_token_s=9.0, last_token_s=10.2, num_output_tokens=9),
    ]
    latest = literal_latest_start(10.2, pending, decodes, slo=SLO_500_150, model=MODEL, chunk_tokens=512)
    assert latest == pytest.approx(10.25 - 0.012)


def test_printed_ttft_ignores_the_queue_ahead() -> None:
    two = [PendingPrefill(arrival_s=10.0, remaining_tokens=500) for _ in range(2)]
    args = {"slo": SLO_500_150, "model": MODEL, "chunk_tokens": 500}
    literal = literal_latest_start(10.0, two, [], **args)  # type: ignore[arg-type]
    corrected = latest_start_ttft(two, num_decodes=0, **args)  # type: ignore[arg-type]
    assert literal == pytest.approx(10.5 - 0.06)
    assert corrected == pytest.approx(10.5 - 0.12)


def test_ttft_counts_partly_done_prefill_and_sharing_decodes() -> None:
    # 750 tokens in chunks of 260 - 10 decodes = 3 steps of 10 + 10 ms, plus 75 ms: 135 ms
    pending = [PendingPrefill(arrival_s=1.0, remaining_tokens=750)]
    latest = latest_start_ttft(pending, num_decodes=10, slo=SLO_500_150, model=MODEL, chunk_tokens=260)
    assert latest == pytest.approx(1.5 - 0.135)


def test_ttft_carries_the_profile_error() -> None:
    careful = StepTimeModel(
        base_s=0.01, per_prefill_token_s=1e-4, per_decode_s=0, ratio_q99=1.5, margin_s=0.02
    )
    pending = [PendingPrefill(arrival_s=0.0, remaining_tokens=100)]
    latest = latest_start_ttft(pending, num_decodes=0, slo=SLO_500_150, model=careful, chunk_tokens=512)
    assert latest == pytest.approx(0.5 - 0.02 * 1.5 - 0.02)


def test_a_request_may_have_its_own_ttft() -> None:
    pending = [
        PendingPrefill(arrival_s=0.0, remaining_tokens=100),
        PendingPrefill(arrival_s=0.0, remaining_tokens=100, ttft_s=0.1),
    ]
    latest = latest_start_ttft(pending, num_decodes=0, slo=SLO_500_150, model=MODEL, chunk_tokens=512)
    assert latest == pytest.approx(0.1 - 0.03)


@pytest.mark.parametrize(
    ("first_s", "last_s", "num_tokens", "expected_s"),
    [
        (10.0, 10.0, 1, 10.1),  # the first token: no credit yet
        (10.0, 10.095, 2, 10.195),  # exactly on pace
        (10.0, 10.095, 3, 10.29),  # one token ahead: 9.5 of 10 ms a token saved
        (10.0, 10.095, 20, 10.395),  # far ahead: two budgets of credit and no more
        (10.0, 10.8, 2, 10.195),  # behind: due in the past, must catch up
    ],
)
def test_token_due_with_a_bank(first_s: float, last_s: float, num_tokens: int, expected_s: float) -> None:
    assert token_due(first_s, last_s, num_tokens, 0.1, 10.0) == pytest.approx(expected_s)


def test_itl_cap_bounds_a_single_gap() -> None:
    assert token_due(10.0, 10.095, 20, 0.1, 0.15) == pytest.approx(10.245)


def test_no_request_means_no_deadline() -> None:
    assert latest_start_ttft([], num_decodes=0, slo=SLO_500_150, model=MODEL, chunk_tokens=1) == NEVER


@given(
    target_s=st.floats(0.005, 0.5),
    gaps=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=60),
)
def test_tokens_within_their_due_keep_the_mean_under_the_budget(target_s: float, gaps: list[float]) -> None:
    """Each token comes at its fraction of the way to its due time: the mean TPOT never exceeds B."""
    last_s = 0.0
    for num_tokens, fraction in enumerate(gaps, start=1):
        due_s = token_due(0.0, last_s, num_tokens, target_s, 100.0)
        last_s += fraction * max(0.0, due_s - last_s)
        assert last_s / num_tokens <= target_s * (1 + 1e-9)


@given(tokens=st.lists(st.integers(1, 4000), min_size=1, max_size=8), num_decodes=st.integers(0, 100))
def test_corrected_ttft_is_never_later_than_printed(tokens: list[int], num_decodes: int) -> None:
    pending = [PendingPrefill(arrival_s=0.0, remaining_tokens=n) for n in tokens]
    corrected = latest_start_ttft(
        pending, num_decodes=num_decodes, slo=SLO_500_150, model=MODEL, chunk_tokens=512
    )
    literal = literal_latest_start(0.0, pending, [], slo=SLO_500_150, model=MODEL, chunk_tokens=512)
    assert corrected <= literal + 1e-9


@pytest.mark.parametrize(("load", "expected"), [(0.0, 0.1), (0.5, 0.1), (0.75, 0.05), (1.0, 0.0), (1.2, 0.0)])
def test_target_shrinks_from_half_full_on(load: float, expected: float) -> None:
    assert shrunk_target(0.1, load) == pytest.approx(expected)
