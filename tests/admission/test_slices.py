from itertools import pairwise

from rose.admission.slices import GROUP_SLICES, SLICE_S, ClosedSlices, slice_number


def closed_numbers(share: float, num_slices: int = 20_000) -> set[int]:
    slices = ClosedSlices(share=share)
    return {number for number in range(num_slices) if slices.is_closed((number + 0.5) * SLICE_S)}


def test_a_share_of_the_slices_is_closed() -> None:
    for share in (0.01, 0.04, 0.5):
        assert abs(len(closed_numbers(share)) / 20_000 - share) < 0.02


def test_a_share_of_0_closes_no_slice_and_a_share_of_1_closes_all() -> None:
    assert not closed_numbers(0.0)
    assert len(closed_numbers(1.0)) == 20_000


def test_a_larger_share_keeps_the_closed_slices_closed() -> None:
    assert closed_numbers(0.02) < closed_numbers(0.05)


def test_a_slice_is_closed_as_a_whole() -> None:
    slices = ClosedSlices(share=0.5)
    for number in range(100):
        inside = {slices.is_closed((number + part) * SLICE_S) for part in (0.01, 0.5, 0.99)}
        assert len(inside) == 1
    assert slice_number(7.5 * SLICE_S) == 7


def test_closed_slices_have_no_period_of_their_own() -> None:
    """A load with a period must not meet all of them."""
    places = [number % GROUP_SLICES for number in closed_numbers(0.1)]
    assert all(20 < places.count(place) < 80 for place in range(GROUP_SLICES))


def test_every_few_seconds_have_a_closed_slice() -> None:
    numbers = sorted(closed_numbers(0.05))
    assert max(b - a for a, b in pairwise(numbers)) < 2 * GROUP_SLICES
