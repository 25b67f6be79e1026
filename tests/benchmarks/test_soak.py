"""What bench_soak makes of what its clients saw."""

import pytest
from bench_soak import SoakLog, _figures


def test_weights_that_stop_coming_are_a_gap_up_to_the_end() -> None:
    seen = SoakLog(newest=[(10.0, 0), (12.0, 1), (15.0, 2)], ended_s=100.0)
    gap = next(each for each in _figures(seen, 3, []) if each.name == "version_gap_s")
    assert gap.value == 85.0


@pytest.mark.parametrize(("num_told", "value"), [(0, None), (7, 0.0)])
def test_no_token_counts_as_right_that_could_not_be_judged(num_told: int, value: float | None) -> None:
    found = {each.name: each for each in _figures(SoakLog(num_told=num_told), 3, [])}
    assert found["wrong_tokens"].value == value
