"""A request may ask for latencies of its own; nonsense leaves it with the deployment's."""

from typing import Any

import pytest

from rose.engine.scheduling.slo_class import requested_slo
from rose.types import SLO

DEPLOYMENT = SLO(ttft_s=0.5, tpot_s=0.15)


@pytest.mark.parametrize(
    ("extra_args", "expected"),
    [
        (None, None),
        ({"other": 1}, None),
        ({"rose_ttft_ms": 100}, SLO(ttft_s=0.1, tpot_s=0.15)),
        ({"rose_ttft_ms": "200", "rose_tpot_ms": 20.0}, SLO(ttft_s=0.2, tpot_s=0.02)),
        ({"rose_tpot_ms": -1, "rose_ttft_ms": "soon"}, DEPLOYMENT),
        ({"rose_tpot_ms": float("inf")}, DEPLOYMENT),
    ],
)
def test_a_request_names_its_own_slo(extra_args: dict[str, Any] | None, expected: SLO | None) -> None:
    assert requested_slo(extra_args, DEPLOYMENT) == expected
