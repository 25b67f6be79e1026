import math
from dataclasses import replace

import numpy as np
import pytest
from sim.harm import HarmedServing, PoissonTraffic

from rose.admission.harm import (
    DAY_S,
    LEAST_OPEN,
    MEASURING_SHARE,
    MIN_GROUPS,
    MIN_REQUESTS,
    Estimate,
    HarmControl,
    HarmReport,
    RequestDelay,
    SliceTime,
    StepHarm,
    estimate_harm,
)
from rose.admission.reach import LEAST_BOUND, bound_problem, least_seconds_to_know
from rose.admission.slices import GROUP_SLICES, SLICE_S, ClosedSlices


def requests(count: int, ttft_waited_s: float = 0.0, tpot_waited_s: float = 0.0) -> list[RequestDelay]:
    return [
        RequestDelay(
            at_s=number,
            ttft_s=0.1 + 0.001 * (number % 50) + ttft_waited_s,
            ttft_waited_s=ttft_waited_s,
            tpot_s=0.01 + tpot_waited_s,
            tpot_waited_s=tpot_waited_s,
        )
        for number in range(count)
    ]


def slices(count: int, slowdown: float = 0.0) -> list[SliceTime]:
    """A tenth is closed; the machine drifts by half meanwhile."""
    closed = ClosedSlices(0.1)
    return [
        SliceTime(
            number=number,
            is_closed=(is_closed := closed.is_closed((number + 0.5) * SLICE_S)),
            seconds=0.1 * (1 + 0.5 * number / count) * (1 if is_closed else 1 + slowdown),
            predicted_s=0.1,
            fixed_s=0.08,
        )
        for number in range(count)
    ]


def report_of(value: float, low: float) -> HarmReport:
    worst = Estimate(value=value, low=low, high=2 * value - low)
    return HarmReport(
        num_requests=100,
        num_closed_slices=10,
        num_groups=10,
        slowdown=worst,
        latencies={"ttft_p99": worst},
        measured_s={"ttft_p99": 0.1},
    )


def test_waits_for_rollout_steps_count_in_full() -> None:
    found = estimate_harm(
        requests(200, ttft_waited_s=0.01, tpot_waited_s=0.001), StepHarm.of(slices(400))
    ).latencies
    assert found["tpot_p50"].value == pytest.approx(0.1, abs=0.01)
    assert found["ttft_p99"].low < 0.01 / 0.149 < found["ttft_p99"].high


def test_a_slowdown_that_nobody_counted_is_found_in_the_closed_slices() -> None:
    found = estimate_harm(requests(200), StepHarm.of(slices(400, slowdown=0.05)))
    assert found.slowdown is not None
    assert found.slowdown.value == pytest.approx(0.05, abs=0.005)
    assert found.slowdown.low <= 0.05 <= found.slowdown.high
    # A tenth of the requests meet no rollouts.
    assert found.latencies["ttft_p99"].value == pytest.approx(0.045, abs=0.005)


def test_a_drift_of_the_machine_is_no_harm() -> None:
    found = estimate_harm(requests(200), StepHarm.of(slices(400))).slowdown
    assert found is not None and found.low <= 0 <= found.high


@pytest.mark.parametrize("share", [MEASURING_SHARE, 0.5, 0.9])
@pytest.mark.parametrize(("noise", "count"), [(0.03, 2400), (0.2, 12_000)])
@pytest.mark.slow
def test_bounds_hold_whatever_share_is_closed(share: float, noise: float, count: int) -> None:
    closed, rng, missed = ClosedSlices(share), np.random.default_rng(1), 0
    places = [closed.is_closed((number + 0.5) * SLICE_S) for number in range(count)]
    for _ in range(40):
        seconds = 0.1 * np.exp(rng.normal(0, noise, count))
        without_harm = [
            SliceTime(number=number, is_closed=is_closed, seconds=one, predicted_s=0.1)
            for number, (is_closed, one) in enumerate(zip(places, seconds.tolist(), strict=True))
        ]
        found = StepHarm.of(without_harm).slowdown
        assert found is not None
        missed += not found.low <= 0 <= found.high
    assert missed <= 4  # of 40; 1 is expected


def test_too_little_is_unknown_rather_than_zero() -> None:
    assert not estimate_harm(requests(200), StepHarm.of(slices(GROUP_SLICES * (MIN_GROUPS - 1)))).latencies
    assert not estimate_harm(requests(MIN_REQUESTS - 1), StepHarm.of(slices(400))).latencies
    unprofiled = [SliceTime(number=n, is_closed=n % 2 == 0, seconds=0.1, predicted_s=0.0) for n in range(99)]
    assert estimate_harm(requests(200), StepHarm.of(unprofiled)).slowdown is None


def test_latencies_are_told_as_they_are_also_while_the_harm_is_unknown() -> None:
    found = estimate_harm(requests(200, ttft_waited_s=0.01), StepHarm.of(slices(10)))
    assert not found.latencies
    assert found.measured_s["ttft_p50"] == pytest.approx(0.1345, abs=0.001)
    assert found.measured_s["tpot_p99"] == pytest.approx(0.01)
    assert not estimate_harm(requests(MIN_REQUESTS - 1), StepHarm.of(slices(10))).measured_s


@pytest.mark.parametrize("allowed", [1e-6, 5e-5])
def test_a_bound_that_no_days_traffic_can_show_is_named_with_the_numbers(allowed: float) -> None:
    problem = bound_problem(allowed)
    assert problem is not None
    assert f"allow_harm is {allowed:g}" in problem
    assert "21,600 slices of a day" in problem and "0.008% at best" in problem
    assert problem.endswith("set allow_harm to at least 0.0001")


@pytest.mark.parametrize("allowed", [LEAST_BOUND, 0.02, 1.0])
def test_a_bound_that_some_traffic_can_show_is_allowed(allowed: float) -> None:
    assert bound_problem(allowed) is None
    assert MIN_GROUPS * SLICE_S / MEASURING_SHARE <= least_seconds_to_know(allowed) < DAY_S


def test_what_a_day_shows_follows_from_the_noise_of_the_slices() -> None:
    report = replace(report_of(0.05, 0.01), num_closed_slices=100, num_groups=100)  # half a width of 4 points
    assert report.shown_in_a_day(DAY_S / 100) == pytest.approx(0.004)
    assert replace(report, num_groups=10).shown_in_a_day(DAY_S) is None


def test_more_closed_slices_make_the_bounds_closer() -> None:
    report = report_of(0.05, 0.01)  # half a width of 4 points with 10 slices
    assert report.closed_slices_needed(0.02) == pytest.approx(40, abs=1)


def test_control_closes_what_the_bound_asks_and_opens_again() -> None:
    control = HarmControl(0.02)
    assert [control.closed_share, control.is_retreating] == [MEASURING_SHARE, False]
    control.update(report_of(0.04, 0.01), 0.0)
    assert [control.closed_share, control.is_retreating] == [pytest.approx(0.5), True]
    control.update(report_of(1.0, 0.5), 0.0)
    assert control.closed_share == pytest.approx(0.75)
    for _ in range(30):
        control.update(report_of(0.5, 0.4), 0.0)
    assert control.closed_share == pytest.approx(1 - LEAST_OPEN)
    for _ in range(40):
        control.update(report_of(0.01, -0.01), 0.0)
    assert control.closed_share == MEASURING_SHARE


def test_what_may_be_noise_or_is_unknown_changes_nothing() -> None:
    control = HarmControl(0.02)
    control.update(report_of(0.10, -0.01), 0.0)
    control.update(HarmReport.nothing(), 0.0)
    assert control.closed_share == MEASURING_SHARE


def test_the_latest_time_shows_a_sudden_harm_sooner_and_says_how_much_to_close() -> None:
    # Half of the long window lies before the harm began.
    control = HarmControl(0.05)
    control.update(report_of(0.051, 0.02), 0.0, report_of(0.10, 0.04))
    assert control.closed_share == pytest.approx(0.5)
    control = HarmControl(0.05)
    control.update(report_of(0.04, 0.01), 0.0, report_of(0.10, 0.06))
    assert control.closed_share == pytest.approx(0.5)


def test_a_retreat_closes_enough_to_measure_how_large_the_harm_is() -> None:
    control = HarmControl(0.05)
    control.update(report_of(0.051, 0.001), 0.0)
    assert control.closed_share == pytest.approx(0.25)


def test_light_traffic_is_held_back_for_as_long_as_it_takes_to_know_its_harm() -> None:
    control = HarmControl(0.02)
    control.update(report_of(0.04, 0.01), 0.0, seconds=600.0)
    few = replace(HarmReport.nothing(), num_requests=5)
    control.update(few, 599.0)
    assert control.closed_share == pytest.approx(0.5)
    control.update(few, 601.0)
    assert control.closed_share == MEASURING_SHARE
    control.update(report_of(0.04, 0.01), 602.0, seconds=600.0)
    # Nobody is harmed without requests.
    before = control.closed_share
    control.update(HarmReport.nothing(), 662.0)
    assert control.closed_share < before


def test_what_the_latest_time_shows_may_be_noise_up_to_the_bound() -> None:
    control = HarmControl(0.05)
    control.update(report_of(0.04, 0.01), 0.0, report_of(0.10, 0.04))
    control.update(HarmReport.nothing(), 0.0, report_of(0.10, 0.04))
    assert control.closed_share == MEASURING_SHARE


def test_a_full_retreat_leaves_an_open_slice_and_ends_when_traffic_does() -> None:
    control = HarmControl(0.02)
    for _ in range(30):
        control.update(report_of(5.0, 4.0), 0.0)
    closed = ClosedSlices(share=control.closed_share)
    for group in range(50):
        places = [group * GROUP_SLICES + place + 0.5 for place in range(GROUP_SLICES)]
        assert not all(closed.is_closed(place * SLICE_S) for place in places)
    for minute in range(1, 60):
        control.update(HarmReport.nothing(), 60.0 * minute)
    assert not control.is_retreating


def test_a_certain_violation_counts_beside_a_larger_uncertain_one() -> None:
    sure, unsure = (Estimate(value=v, low=low, high=1.0) for v, low in ((0.08, 0.05), (0.3, -0.1)))
    latencies = {"ttft_p99": unsure, "tpot_p99": sure}
    control = HarmControl(0.02)
    control.update(replace(report_of(0.08, 0.05), latencies=latencies), 0.0)
    assert control.closed_share == pytest.approx(0.5)


def test_a_mode_that_is_not_bounded_lets_rollouts_in_again() -> None:
    control = HarmControl(0.02)
    control.update(report_of(0.5, 0.4), 0.0)
    control.let_in(1.0)
    assert control.closed_share == MEASURING_SHARE


def test_bounds_stay_finite_where_steps_grow_with_the_batch_alone() -> None:
    whole = [replace(each, fixed_s=0.0) for each in slices(400, slowdown=0.05)]
    found = estimate_harm(requests(200), StepHarm.of(whole)).latencies
    assert found["ttft_p99"].high >= 1 and math.isfinite(found["ttft_p99"].high)


def test_an_engine_that_becomes_slower_beside_rollouts_shuts_them_out_within_a_minute() -> None:
    run = HarmedServing(
        PoissonTraffic(),
        horizon_s=300.0,
        seed=1,
        has_rollouts=True,
        slowdown=0.3,
        slow_from_s=100.0,
        allowed=0.1,
    ).run()
    share_at = dict(run.closed_shares)
    before = [share for at_s, share in share_at.items() if at_s < 100]
    after = [share for at_s, share in share_at.items() if at_s > 160]
    assert max(before) == MEASURING_SHARE
    assert after[0] > 0.3 and max(after) > 0.5
