"""The records' arithmetic, shares within a limit, and the environment."""

import pytest
from measured import record

from rose.measure.environment import collect_env
from rose.measure.figures import attainment, percentile
from rose.measure.records import RequestRecord
from rose.types import SLO

LIMITS = SLO(ttft_s=0.6, tpot_s=0.001)


def test_ttft_counts_from_the_scheduled_arrival() -> None:
    assert record(ttft_s=0.25).ttft_s == pytest.approx(0.25)


def test_tpot_is_the_mean_after_the_first_token_and_itl_the_longest_gap() -> None:
    times = [1.0, 1.1, 1.5, 1.6]
    timed = RequestRecord(
        request_id="r",
        scheduled_s=0.5,
        sent_s=0.5,
        prompt=[1],
        max_tokens=4,
        token_times_s=times,
        token_ids=[1, 2, 3, 4],
        status=200,
        finish_reason="length",
    )
    assert timed.tpot_s == pytest.approx(0.2)
    assert timed.max_itl_s == pytest.approx(0.4)


def test_one_token_has_no_tpot() -> None:
    assert record(tokens=1).tpot_s is None
    assert record(tokens=1).max_itl_s is None


def test_record_survives_its_json_line() -> None:
    original = record(error="gone", finish_reason=None)
    assert RequestRecord.from_json_line(original.to_json_line()) == original


def test_percentile_of_nothing_is_not_measured() -> None:
    assert percentile([], 99) is None


def test_unanswered_and_aborted_requests_miss_the_slo() -> None:
    requests = [
        record(ttft_s=0.1),
        record(ttft_s=0.9),
        record(tokens=0, error="refused", finish_reason=None),
        record(ttft_s=0.1, finish_reason="abort"),
    ]
    assert attainment(requests, "ttft", LIMITS) == 0.25


def test_a_complete_one_token_request_meets_the_tpot_slo() -> None:
    assert attainment([record(tokens=1)], "tpot", LIMITS) == 1.0


def test_attainment_without_requests_is_not_measured() -> None:
    assert attainment([], "ttft", LIMITS) is None


def test_environment_names_this_machine() -> None:
    env = collect_env(seed=7, quick=False)
    assert env.seed == 7
    assert env.quick is False
    assert "cores" in env.cpu
    assert "python" in env.versions
