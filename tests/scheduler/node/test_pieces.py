"""Pieces of a training pass: their times are fitted to measurements, and a microbatch is split to fit."""

import math

import pytest

from rose.scheduler.node.pieces import Piece, PieceTimes, Work, num_parts

LAYER = Piece("backward", 3)


def measured(*seconds_of: tuple[Work, float], piece: Piece = LAYER) -> PieceTimes:
    times = PieceTimes()
    times.add(piece, Work(1, 1), 100.0)  # the first one is left out: it allocates memory
    for work, seconds in seconds_of:
        times.add(piece, work, seconds)
    return times


def seconds(work: Work) -> float:
    return 0.001 + 2e-5 * work.tokens + 3e-8 * work.pairs


def profiled(piece: Piece = LAYER) -> PieceTimes:
    works = [Work(1, length) for length in (32, 64, 128) for _ in range(6)]
    return measured(*((work, seconds(work)) for work in works), piece=piece)


def test_a_piece_that_was_not_measured_takes_forever() -> None:
    times = measured((Work(1, 32), 0.01), (Work(1, 32), 0.01))
    assert math.isinf(times.predict_safe(LAYER, Work(1, 32)))
    assert math.isinf(times.predict_safe(Piece("forward", 3), Work(1, 32)))


def test_the_fit_has_a_constant_tokens_and_pairs_and_holds_for_several_sequences() -> None:
    times = profiled()
    for work in (Work(1, 100), Work(4, 128), Work(8, 256)):
        assert times.predict(LAYER, work) == pytest.approx(seconds(work), rel=1e-3)
        assert times.predict(LAYER, work) <= times.predict_safe(LAYER, work) < 1.01 * seconds(work) + 3e-4


def test_sequences_of_one_length_are_enough() -> None:
    times = measured(*[(Work(2, 64), 0.01)] * 4)
    assert times.predict(LAYER, Work(2, 64)) == pytest.approx(0.01)
    assert times.predict(LAYER, Work(4, 64)) == pytest.approx(0.02)


def test_the_safe_time_covers_all_but_the_slowest_of_many() -> None:
    few = measured(*[(Work(1, 64), 0.01)] * 5, (Work(1, 64), 0.03), *[(Work(1, 64), 0.01)] * 5)
    assert few.predict_safe(LAYER, Work(1, 64)) >= 0.03 - 1e-6
    many = measured(*[(Work(1, 64), 0.01)] * 30, (Work(1, 64), 0.3), *[(Work(1, 64), 0.01)] * 24)
    assert many.predict_safe(LAYER, Work(1, 64)) < 0.02


@pytest.mark.parametrize(("num", "stalls"), [(10, 1), (40, 2), (40, 6)])
def test_stalls_do_not_make_a_piece_too_long_for_every_gap(num: int, stalls: int) -> None:
    taken = [0.4] * stalls + [0.01] * num
    times = measured(*((Work(1, 64), each) for each in taken))
    assert times.predict_safe(LAYER, Work(1, 64)) < 0.02


def test_a_machine_that_has_become_slower_makes_pieces_longer() -> None:
    times = measured(*((Work(1, 64), each) for each in [0.001] * 40 + [0.012] * 24))
    assert times.predict_safe(LAYER, Work(1, 64)) > 0.012


@pytest.mark.parametrize("stalled", range(3))
def test_a_measurement_during_which_the_machine_stood_still_hardly_counts(stalled: int) -> None:
    taken = [0.01] * 3
    taken[stalled] = 30.0
    times = measured(*((Work(1, 64), each) for each in taken))
    assert times.predict(LAYER, Work(1, 64)) == pytest.approx(0.01, rel=0.01)


def test_the_least_time_is_that_of_the_fastest_of_many() -> None:
    few = measured(*[(Work(1, 64), 0.5)] * 7)
    assert few.predict_least(LAYER, Work(1, 64)) == 0.0
    slow = measured(*[(Work(1, 64), 0.5)] * 6, (Work(1, 64), 0.1), *[(Work(1, 64), 0.5)] * 6)
    assert slow.predict_least(LAYER, Work(1, 64)) == pytest.approx(0.1)
    assert slow.predict_least(LAYER, Work(2, 64)) == pytest.approx(0.2)
    assert slow.predict_least(Piece("forward", 3), Work(1, 64)) == 0.0


def test_times_follow_a_machine_that_becomes_slower() -> None:
    times = profiled()
    for _ in range(80):
        times.add(LAYER, Work(1, 64), 3 * seconds(Work(1, 64)))
    assert times.predict(LAYER, Work(1, 64)) == pytest.approx(3 * seconds(Work(1, 64)), rel=0.05)


@pytest.mark.parametrize(
    ("at_most_s", "parts"),
    [(1.0, 1), (seconds(Work(4, 128)), 2), (seconds(Work(3, 128)), 3), (seconds(Work(1, 128)), 8), (1e-6, 8)],
)
def test_a_microbatch_is_split_until_its_longest_piece_fits(at_most_s: float, parts: int) -> None:
    assert num_parts(profiled(), Work(8, 128), at_most_s + 1e-9) == parts


def test_a_microbatch_of_unknown_pieces_is_trained_one_sequence_at_a_time() -> None:
    assert num_parts(PieceTimes(), Work(8, 128), 1.0) == 8


def test_the_optimizer_does_not_split_a_microbatch() -> None:
    times = profiled()
    for _ in range(5):
        times.add(Piece("optimizer", 0), Work(1, 1), 0.5)
    assert num_parts(times, Work(8, 128), 0.1) == 1
