"""The latency figures of bench_router on a machine that never lets a request run undisturbed."""

import pytest
from lib.router.latency import calm_added_ms


def test_added_latency_of_calm_requests_is_the_difference_of_their_p99() -> None:
    assert calm_added_ms([0.003, 0.003], [0.001]) == pytest.approx(2.0)


@pytest.mark.parametrize(("through", "direct"), [([], [0.001]), ([0.003], []), ([], [])])
def test_where_every_request_waited_the_calm_latency_is_not_measured(
    through: list[float], direct: list[float]
) -> None:
    assert calm_added_ms(through, direct) is None
