"""Elements of live weights are exchanged all together or not at all."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_bits import WIDTHS, Width, random_bits

from rose import _delta

PLACES = [np.int32, np.int64]


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    width=st.sampled_from(WIDTHS),
    place=st.sampled_from(PLACES),
    size=st.integers(1, 400),
    shift=st.integers(-50, 50),
)
def test_all_elements_change_or_none_does(
    data: st.DataObject, width: Width, place: Any, size: int, shift: int
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    bits = random_bits(rng, width, size)
    index = data.draw(st.permutations(range(size)))[: data.draw(st.integers(0, size))]
    if data.draw(st.booleans()):
        index = sorted(index)
    places = np.array(index, np.int64)
    old, new = bits[places], random_bits(rng, width, places.size)
    expected = bits.copy()
    expected[places] = new
    given_places = (places - shift).astype(place)
    before = bits.copy()
    if index:
        wrong = data.draw(st.integers(0, len(index) - 1))
        other = old.copy()
        other[wrong] ^= 1
        assert not _delta.exchange(bits, given_places, shift, other, new)
        np.testing.assert_array_equal(bits, before)
        outside = given_places.copy()
        outside[wrong] = data.draw(st.sampled_from([-1, -1000, size, size + 1000])) - shift
        assert not _delta.exchange(bits, outside, shift, old, new)
        np.testing.assert_array_equal(bits, before)
    assert _delta.exchange(bits, given_places, shift, old, new)
    np.testing.assert_array_equal(bits, expected)
    assert _delta.exchange(bits, given_places, shift, new, old)
    np.testing.assert_array_equal(bits, before)


def test_places_that_no_sum_can_hold_are_outside() -> None:
    bits, values = np.zeros(9, np.uint16), np.zeros(1, np.uint16)
    ends = np.iinfo(np.int64)
    for place, shift in ((ends.max, 1), (ends.max, ends.max), (ends.min, -1), (-1, 0), (9, 0)):
        assert not _delta.exchange(bits, np.array([place], np.int64), int(shift), values, values)


def test_vectors_that_do_not_fit_are_refused() -> None:
    bits = np.zeros(9, np.uint16)
    places, values = np.arange(3, dtype=np.int32), np.zeros(3, np.uint16)
    with pytest.raises(ValueError, match="need 3 elements of 2 bytes, got 2 of 2"):
        _delta.exchange(bits, places, 0, values[:2], values)
    with pytest.raises(ValueError, match="need 3 elements of 2 bytes, got 3 of 4"):
        _delta.exchange(bits, places, 0, values, values.astype(np.uint32))
    with pytest.raises(ValueError, match="places must be a contiguous vector of int32 or int64"):
        _delta.exchange(bits, places.astype(np.int16), 0, values, values)  # type: ignore[arg-type]
    askew = np.zeros(19, np.uint8)[1:].view(np.uint16)
    with pytest.raises(ValueError, match="must begin at multiples of their elements' width"):
        _delta.exchange(askew, places, 0, values, values)
    bits.flags.writeable = False
    with pytest.raises(ValueError, match="bits is read-only"):
        _delta.exchange(bits, places, 0, values, values)
