"""The speed estimate recovers the parts of an engine's steps, in time of a whole GPU."""

import random

import pytest

from rose.scheduler.rollout.workers.speed import SpeedEstimate


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_fit_recovers_both_parts_of_a_step(share: float) -> None:
    estimate, chance = SpeedEstimate(), random.Random(1)
    assert estimate.speed() is None
    for _ in range(60):
        turns = chance.randint(1, 16)
        noise = chance.uniform(0.95, 1.05)
        estimate.saw_decode((0.02 + 0.001 * turns) / share * noise, turns, share)
        estimate.saw_prefill(2000 * 1e-4 / share * noise, 2000, share)
    speed = estimate.speed()
    assert speed is not None
    assert speed.step_s == pytest.approx(0.02, rel=0.15)
    assert speed.step_s_per_turn == pytest.approx(0.001, rel=0.3)
    assert speed.prefill_s_per_token == pytest.approx(1e-4, rel=0.1)


def test_a_constant_batch_predicts_its_own_step_time() -> None:
    estimate = SpeedEstimate()
    for _ in range(20):
        estimate.saw_decode(0.03, 4, 1.0)
        estimate.saw_prefill(0.1, 1000, 1.0)
    speed = estimate.speed()
    assert speed is not None and speed.decode_s(4) == pytest.approx(0.03)


def test_neither_part_of_a_step_is_negative_whatever_is_seen() -> None:
    for sign in (1, -1):
        estimate = SpeedEstimate()
        for turns in range(1, 17):
            estimate.saw_decode(max(1e-4, 0.01 + sign * 0.01 * (turns - 8)), turns, 1.0)
            estimate.saw_prefill(0.1, 1000, 1.0)
        speed = estimate.speed()
        assert speed is not None and speed.step_s >= 0 and speed.step_s_per_turn >= 0


def test_short_prefills_say_nothing_of_the_rate() -> None:
    estimate = SpeedEstimate()
    for _ in range(20):
        estimate.saw_decode(0.03, 4, 1.0)
        estimate.saw_prefill(0.1, 3, 1.0)
    assert estimate.speed() is None
