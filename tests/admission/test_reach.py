"""An SLO below what the profile says is named, with what could be reached."""

import pytest

from rose.admission.reach import floors_s, missed_slo, unreachable_slo
from rose.admission.step_time import StepTimeModel
from rose.types import SLO, Deployment

# One-token prefill 10.1 ms, one decode 11 ms; half as much again at the 99th percentile, and 1 ms
MODEL = StepTimeModel(base_s=0.01, per_prefill_token_s=1e-4, per_decode_s=1e-3, ratio_q99=1.5, margin_s=0.001)


def test_the_shortest_reachable_latencies_include_the_profiles_error() -> None:
    assert floors_s(MODEL) == pytest.approx((0.01615, 0.0175))


def test_an_slo_at_the_floor_is_reachable() -> None:
    ttft_s, tpot_s = floors_s(MODEL)
    assert unreachable_slo(SLO(ttft_s=ttft_s, tpot_s=tpot_s), floors_s(MODEL), Deployment.COLLOCATED) is None


@pytest.mark.parametrize(
    ("slo", "message"),
    [
        (
            SLO(ttft_s=0.5, tpot_s=0.005),
            "slo_tpot_ms is 5, but one decoded token takes up to 17.5 ms (99th percentile); "
            "set slo_tpot_ms to at least 18",
        ),
        (
            SLO(ttft_s=0.01, tpot_s=0.15),
            "slo_ttft_ms is 10, but the prefill of one token takes up to 16.2 ms (99th percentile); "
            "set slo_ttft_ms to at least 17",
        ),
    ],
)
def test_an_slo_below_the_floor_is_named_with_what_is_reachable(slo: SLO, message: str) -> None:
    assert unreachable_slo(slo, floors_s(MODEL), Deployment.COLLOCATED) == message


def test_an_slo_with_both_objectives_out_of_reach_names_both() -> None:
    found = unreachable_slo(SLO(ttft_s=0.001, tpot_s=0.001), floors_s(MODEL), Deployment.COLLOCATED)
    assert found is not None and "slo_ttft_ms" in found and "slo_tpot_ms" in found


def test_an_instance_is_held_to_its_own_objective_alone() -> None:
    slo = SLO(ttft_s=0.001, tpot_s=0.001)
    prefiller = unreachable_slo(slo, floors_s(MODEL), Deployment.PREFILL)
    decoder = unreachable_slo(slo, floors_s(MODEL), Deployment.DECODE)
    assert prefiller is not None and prefiller.startswith("slo_ttft_ms") and "tpot" not in prefiller
    assert decoder is not None and decoder.startswith("slo_tpot_ms") and "ttft" not in decoder


def test_an_slo_that_serving_misses_at_its_load_is_named_with_what_it_keeps() -> None:
    slo = SLO(ttft_s=0.5, tpot_s=0.1)
    found = missed_slo(slo, {"ttft": (0.812, 0.79), "tpot": (0.11, 0.09)}, Deployment.COLLOCATED)
    assert found == (
        "the TTFT P99 of serving alone is 812 ms (at least 790), above slo_ttft_ms of 500, and rollouts are "
        "not the reason; lower the load, or set slo_ttft_ms to at least 812"
    )
    assert missed_slo(slo, {"ttft": (0.812, 0.79)}, Deployment.DECODE) is None
    assert missed_slo(slo, {}, Deployment.COLLOCATED) is None
