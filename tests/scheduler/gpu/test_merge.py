"""Merging tails, and dividing batches."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.scheduler.gpu.merge import MAX_MERGED, WorkerTail, balanced, decide_merge, expected_left
from rose.scheduler.gpu.substages import DecodeCost

COST = DecodeCost(step_s=0.1, sample_s=0.0, prefill_token_s=0.001)


def tail(
    worker: int, left: tuple[int, ...], tokens: int = 0, slow: float = 1.0, beside: float = 1.0
) -> WorkerTail:
    return WorkerTail(worker=worker, left=left, tokens=tokens, slowdown=slow, beside_slowdown=beside)


def test_gain_is_the_papers_formula_with_a_neighbour_that_is_slowed_while_the_tail_runs() -> None:
    # The tails take 1.1 x 20 before; after, 1.1 x (20 + M).
    tails = [tail(0, (100,), 1000, 1.1, 1.5), tail(1, (200,), 1000, 1.1, 1.5)]
    # On each worker the other pipeline goes at 1 / 1.5 of its speed beside a tail, however many there are.
    assert decide_merge(tails, COST, num_workers=2, beside_s=30.0, is_elastic=False) is None
    # Its batch follows: at 1 / 1.5 for 22 s before, at (1 + 1 / 1.5) / 2 for 23.1 s after.
    merge = decide_merge(tails, COST, num_workers=2, beside_s=30.0)
    assert merge is not None
    before_s, after_s = 22 + 30 - 22 / 1.5, 23.1 + 30 - 23.1 * 5 / 6
    assert merge.gain_s == pytest.approx((22 + before_s) - (23.1 + after_s))


def test_a_neighbour_that_ends_within_the_tail_has_no_worker_for_itself_later() -> None:
    tails = [tail(0, (100,), beside=2.0), tail(1, (100,), beside=2.0)]
    merge = decide_merge(tails, COST, num_workers=2, beside_s=3.0)
    assert merge is not None
    assert merge.gain_s == pytest.approx(3 * 2 - 3 / 0.75)


def test_a_neighbour_that_waits_for_the_tails_computes_on_the_freed_workers() -> None:
    waits = [tail(worker, (100,), 50, beside=math.inf) for worker in range(4)]
    merge = decide_merge(waits, COST, num_workers=4, beside_s=100.0)
    assert merge is not None
    moved_s = 0.001 * 150
    # It waits for 10 s before; after, it goes at 3/4 of its speed for 10 s and the prefill.
    assert merge.gain_s == pytest.approx((10 + 10) - (10 + moved_s) * (1 + 1 - 3 / 4))
    assert decide_merge(waits, COST, num_workers=4, beside_s=0.0) is None


def test_an_idle_worker_is_freed_without_moving_anything() -> None:
    costly = DecodeCost(step_s=0.1, sample_s=0.0, prefill_token_s=1.0)
    tails = [tail(0, (), beside=math.inf), tail(1, (100,), 500, beside=math.inf)]
    merge = decide_merge(tails, costly, num_workers=2, beside_s=100.0)
    assert merge is not None and merge.target == 1
    assert merge.gain_s == pytest.approx(5.0)


def test_the_target_is_the_tail_that_is_dearest_to_move() -> None:
    tails = [tail(0, (100,), 500, 1.1, 1.5), tail(3, (100,), 5000, 1.1, 1.5)]
    merge = decide_merge(tails, COST, num_workers=4, beside_s=60.0)
    assert merge is not None and merge.target == 3


def test_nothing_merges_without_a_gain_or_samples() -> None:
    assert decide_merge([], COST, num_workers=2) is None
    assert decide_merge([tail(0, (10,))], COST, num_workers=2, beside_s=9.0) is None
    assert decide_merge([tail(0, ()), tail(1, ())], COST, num_workers=2, beside_s=9.0) is None
    alone = [tail(0, (10,), 100), tail(1, (10,), 100)]  # beside nothing there is nothing to win
    assert decide_merge(alone, COST, num_workers=2) is None


def test_a_batch_that_would_leave_the_small_bucket_is_not_merged() -> None:
    half = (10,) * (MAX_MERGED // 2)
    tails = [tail(0, half, slow=1.1, beside=2.0), tail(1, half, slow=1.1, beside=2.0)]
    assert decide_merge(tails, COST, num_workers=2, beside_s=1000.0) is None
    fewer = [tail(0, half[1:], slow=1.1, beside=2.0), tail(1, half, slow=1.1, beside=2.0)]
    assert decide_merge(fewer, COST, num_workers=2, beside_s=1000.0) is not None


def test_lengths_are_expected_as_they_were() -> None:
    past = [10, 20, 30, 40]
    assert expected_left(past, 15, 3) == (5, 15, 25)
    assert expected_left(past, 15, 1) == (15,)
    assert expected_left(past, 50, 2) == (5, 5)  # longer than all of them
    assert expected_left([], 0, 2) == (1, 1)


def test_a_slowed_worker_gets_less_of_a_batch() -> None:
    assert balanced([1.0, 1.0, 2.0], 50) == [20, 20, 10]
    assert balanced([1.0, 3.0], 0) == [0, 0]
    with pytest.raises(ValueError, match="above 0"):
        balanced([1.0, 0.0], 4)


@given(st.lists(st.floats(1.0, 5.0), min_size=1, max_size=8), st.integers(0, 500))
def test_all_samples_are_given_out(slowdowns: list[float], num_samples: int) -> None:
    parts = balanced(slowdowns, num_samples)
    assert sum(parts) == num_samples
    speed = sum(1 / each for each in slowdowns)
    assert all(
        abs(part - num_samples / each / speed) < 1 + 1e-6 for part, each in zip(parts, slowdowns, strict=True)
    )
