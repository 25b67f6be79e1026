"""Tails: what moving one takes, when it is safe, and that the choice is off where it would not pay."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.scheduler.group.tail import (
    THRESHOLDS,
    RolloutSpeed,
    TailJob,
    choose_thresholds,
    has_room,
    play_rollout,
    predicted_cycle_s,
    workers_kept,
)

SPEED = RolloutSpeed(
    num_workers=8,
    step_s=0.01,
    request_s=0.0001,
    prompt_tokens=100,
    prefill_tokens_per_s=20_000,
    max_tokens=4000,
)


def lengths(seed: int, num_requests: int = 128) -> list[int]:
    rng = random.Random(seed)
    return [max(1, min(4000, round(700 * rng.lognormvariate(0, 0.9)))) for _ in range(num_requests)]


def job(name: str, train_s: float) -> TailJob:
    return TailJob(name=name, speed=SPEED, past=[lengths(seed) for seed in range(4)], train_s=train_s)


def test_without_a_move_a_rollout_lasts_as_long_as_its_longest_response() -> None:
    speed = replace(SPEED, request_s=0.0)
    tail = play_rollout([100, 200, 400, 1000], speed, None)
    assert tail.done_s == tail.freed_s == pytest.approx(10.0) and tail.num_workers == 0
    assert play_rollout([4000] * 16, SPEED, None).done_s == pytest.approx(SPEED.worst_s(16))


def test_a_moved_tail_frees_the_rest_early_and_ends_later() -> None:
    off, on = play_rollout(lengths(0), SPEED, None), play_rollout(lengths(0), SPEED, 0.8)
    assert on.freed_s < 0.5 * off.done_s < off.done_s < on.done_s
    assert 1 <= on.num_workers <= 4


@given(st.integers(0, 10**9), st.sampled_from(THRESHOLDS), st.integers(4, 8))
@settings(max_examples=100, deadline=None)
def test_a_tail_of_longest_responses_still_ends_within_the_worst_case(
    seed: int, threshold: float, num_workers: int
) -> None:
    drawn = sorted(lengths(seed))
    num_done = round(threshold * len(drawn))
    worst = [*drawn[:num_done], *[SPEED.max_tokens] * (len(drawn) - num_done)]
    assert (
        play_rollout(worst, SPEED, threshold, num_workers).done_s
        <= SPEED.worst_s(len(worst), num_workers) + 1e-9
    )


def test_a_tail_that_could_break_the_certificate_is_not_moved() -> None:
    assert workers_kept(SPEED, num_left=10, reached_tokens=1000, left_s=1.0, num_workers=8) is None
    late = replace(SPEED, pause_s=1000.0)
    assert play_rollout(lengths(0), late, 0.8) == play_rollout(lengths(0), late, None)


def test_the_next_rollout_needs_room_for_its_own_worst_case() -> None:
    tail = play_rollout(lengths(0), SPEED, 0.8)
    assert has_room(SPEED, 128, tail)
    assert not has_room(replace(SPEED, request_s=0.1), 128, tail)
    assert has_room(SPEED, 128, play_rollout(lengths(0), SPEED, None))


def test_rollout_bound_jobs_move_their_tails_for_a_fifth_or_more() -> None:
    jobs = [job("a", 5.0), job("b", 5.0)]
    chosen = choose_thresholds(jobs)
    assert None not in chosen.values()
    assert predicted_cycle_s(jobs, [None, None]) >= 1.2 * predicted_cycle_s(jobs, list(chosen.values()))


def test_a_fixed_threshold_loses_where_training_is_as_long_as_rollout_and_the_choice_is_off() -> None:
    rollout_s = play_rollout(lengths(0), SPEED, None).done_s
    jobs = [job("a", rollout_s), job("b", rollout_s)]
    assert predicted_cycle_s(jobs, [0.8, 0.8]) > predicted_cycle_s(jobs, [None, None])
    assert choose_thresholds(jobs) == {"a": None, "b": None}


def test_a_job_alone_keeps_its_tail() -> None:
    assert choose_thresholds([job("a", 1.0)]) == {"a": None}
