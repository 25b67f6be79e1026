"""A request may ask for latencies of its own and name its tenant; other values count as nothing."""

from typing import Any

import pytest

from rose.engine.scheduling.request_keys import key_problem, requested_slo, requested_tenant
from rose.types import SLO

DEPLOYMENT = SLO(ttft_s=0.5, tpot_s=0.15)
NO_LATENCIES = [-1, 0, "soon", "", [100], None, float("nan"), float("inf"), 10**400]


@pytest.mark.parametrize(
    ("extra_args", "expected"),
    [
        (None, None),
        ({"other": 1}, None),
        ({"rose_ttft_ms": 100}, SLO(ttft_s=0.1, tpot_s=0.15)),
        ({"rose_ttft_ms": "200", "rose_tpot_ms": 20.0}, SLO(ttft_s=0.2, tpot_s=0.02)),
        ({"rose_tpot_ms": -1, "rose_ttft_ms": "soon"}, DEPLOYMENT),
        ({"rose_tpot_ms": float("inf")}, DEPLOYMENT),
        ({"rose_tpot_ms": 10**400, "rose_ttft_ms": 100}, SLO(ttft_s=0.1, tpot_s=0.15)),
    ],
)
def test_a_request_names_its_own_slo(extra_args: dict[str, Any] | None, expected: SLO | None) -> None:
    assert requested_slo(extra_args, DEPLOYMENT) == expected


@pytest.mark.parametrize("key", ["rose_ttft_ms", "rose_tpot_ms"])
@pytest.mark.parametrize("value", NO_LATENCIES, ids=lambda value: repr(value)[:20])
def test_a_value_that_is_no_latency_is_named_with_what_is_allowed(key: str, value: Any) -> None:
    problem = key_problem({key: value})
    assert problem is not None
    assert problem.startswith(f"vllm_xargs.{key} is {repr(value)[:100]}: send milliseconds above 0")


@pytest.mark.parametrize("extra_args", [{}, {"other": -1}, {"rose_ttft_ms": 0.5, "rose_tpot_ms": "20"}])
def test_latencies_and_other_keys_are_no_problem(extra_args: dict[str, Any]) -> None:
    assert key_problem(extra_args) is None


@pytest.mark.parametrize("name", ["", "two\nlines", 7, None, "x" * 65, "ü" * 33])
def test_a_tenant_is_a_short_name(name: Any) -> None:
    assert requested_tenant({"rose_tenant": name}) == ""
    problem = key_problem({"rose_tenant": name})
    assert problem is not None and "send a printable name of 1 to 64 bytes" in problem


def test_a_request_without_a_tenant_has_none() -> None:
    assert requested_tenant(None) == requested_tenant({"rose_ttft_ms": 5}) == ""
    assert requested_tenant({"rose_tenant": "search ü"}) == "search ü"
    assert key_problem({"rose_tenant": "search ü"}) is None
