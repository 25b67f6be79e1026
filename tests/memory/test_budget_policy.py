"""The memory policy as tables: budget, cut, freeze, growth, and what serving keeps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.memory.ledger.policy_word import Pressure
from rose.memory.policy.budget import RETURN_PACE_SLABS, BudgetDecision, BudgetEvent, BudgetPolicy, RecentPeak

NORMAL, PRESSURE, FROZEN = Pressure.NORMAL, Pressure.PRESSURE, Pressure.FROZEN
POLICY = BudgetPolicy(num_slabs=100, headroom_slabs=20)


@pytest.mark.parametrize(("recent_peak", "budget"), [(0, 80), (10, 70), (79, 1), (80, 1), (100, 1)], ids=str)
def test_step_budget_sets_recent_peak_and_headroom_aside(recent_peak: int, budget: int) -> None:
    assert POLICY.begin_step(recent_peak) == budget


@pytest.mark.parametrize(
    ("used", "owned", "budget", "state", "expected"),
    [
        # Peak 20 left 60 for rollout; half of the headroom of 20 is eaten at 30.
        (20, 60, 60, NORMAL, (60, NORMAL, None)),
        (30, 60, 60, NORMAL, (60, NORMAL, None)),
        (31, 60, 60, NORMAL, (30, PRESSURE, BudgetEvent.CUT)),
        # Nothing to give up: the cut has landed at once.
        (31, 30, 60, NORMAL, (30, FROZEN, BudgetEvent.CUT)),
        # Pressure lasts until rollout is within the budget, and no second cut is made meanwhile.
        (45, 40, 30, PRESSURE, (30, PRESSURE, None)),
        (90, 40, 30, PRESSURE, (30, PRESSURE, None)),
        (45, 30, 30, PRESSURE, (30, FROZEN, BudgetEvent.FROZEN)),
        # Frozen: quiet serving brings nothing back; eating what the cut gave cuts again.
        (0, 5, 30, FROZEN, (30, FROZEN, None)),
        (60, 30, 30, FROZEN, (30, FROZEN, None)),
        (61, 30, 30, FROZEN, (15, PRESSURE, BudgetEvent.CUT)),
        (61, 31, 30, FROZEN, (30, FROZEN, None)),
        # Never below the minimum.
        (100, 2, 2, FROZEN, (1, PRESSURE, BudgetEvent.CUT)),
        (100, 1, 1, FROZEN, (1, FROZEN, None)),
        (100, 1, 1, NORMAL, (1, NORMAL, None)),
    ],
)
def test_observation(
    used: int, owned: int, budget: int, state: Pressure, expected: tuple[int, Pressure, BudgetEvent | None]
) -> None:
    decision = POLICY.observe(serving_used=used, rollout_owned=owned, budget=budget, state=state)
    assert decision == BudgetDecision(budget=expected[0], state=expected[1], event=expected[2])


@pytest.mark.parametrize(
    ("used", "owned", "budget", "expected"),
    [
        (0, 99, 99, (99, NORMAL, None)),
        (1, 99, 99, (79, PRESSURE, BudgetEvent.TAKEN_BACK)),
        (30, 99, 99, (50, PRESSURE, BudgetEvent.TAKEN_BACK)),
        # Nothing to give up: no freeze either, the headroom may be lent again.
        (30, 40, 99, (50, NORMAL, BudgetEvent.TAKEN_BACK)),
        (100, 99, 81, (1, PRESSURE, BudgetEvent.TAKEN_BACK)),
    ],
)
def test_a_lent_headroom_ends_with_servings_first_slab(
    used: int, owned: int, budget: int, expected: tuple[int, Pressure, BudgetEvent | None]
) -> None:
    decision = POLICY.observe(serving_used=used, rollout_owned=owned, budget=budget, state=NORMAL)
    assert decision == BudgetDecision(budget=expected[0], state=expected[1], event=expected[2])


def test_an_instance_out_of_service_is_lent_whole() -> None:
    whole = POLICY.whole_budget
    assert whole == 99
    assert [POLICY.has_headroom_lent(budget) for budget in (whole, 81, POLICY.begin_step(0))] == [
        True,
        True,
        False,
    ]
    assert POLICY.rollout_growth(free=99, serving_used=0, rollout_owned=0, budget=whole) == 99
    assert POLICY.rollout_growth(free=50, serving_used=0, rollout_owned=49, budget=whole) == 50
    # The slab of serving's padding block is never free.
    assert POLICY.rollout_growth(free=0, serving_used=0, rollout_owned=99, budget=whole) == 0


def test_watermark_and_cut_factor_are_settings() -> None:
    policy = BudgetPolicy(num_slabs=100, headroom_slabs=20, high_watermark=0.0, cut_factor=4, min_slabs=2)
    assert policy.pressure_threshold(60) == 20
    decision = policy.observe(serving_used=21, rollout_owned=60, budget=60, state=NORMAL)
    assert (decision.budget, decision.event) == (15, BudgetEvent.CUT)


@given(st.lists(st.integers(0, 100), max_size=40), st.integers(0, 100))
def test_budget_never_grows_within_a_step(serving_used: list[int], peak: int) -> None:
    budget, state, num_cuts = POLICY.begin_step(peak), NORMAL, 0
    start = budget
    for used in serving_used:
        decision = POLICY.observe(serving_used=used, rollout_owned=budget, budget=budget, state=state)
        assert POLICY.min_slabs <= decision.budget <= budget
        assert (decision.event is BudgetEvent.CUT) == (decision.budget < budget)
        num_cuts += decision.event is BudgetEvent.CUT
        budget, state = decision.budget, decision.state
    assert budget == max(start >> num_cuts, POLICY.min_slabs)
    assert (state is NORMAL) == (num_cuts == 0)


@pytest.mark.parametrize(
    ("free", "used", "owned", "budget", "growth"),
    [
        (80, 20, 0, 60, 60),
        (80, 0, 0, 60, 60),
        (30, 20, 50, 60, 10),
        (5, 20, 50, 60, 5),
        # 100 - 50 owned - 25 used - 20 headroom
        (30, 25, 50, 60, 5),
        (30, 30, 50, 60, 0),
        (30, 90, 50, 60, 0),
        (30, 0, 61, 60, 0),
        # The pinned slab may always be had, unless the pool is empty.
        (1, 99, 0, 60, 1),
        (0, 99, 0, 60, 0),
    ],
)
def test_rollout_growth_spares_the_headroom(
    free: int, used: int, owned: int, budget: int, growth: int
) -> None:
    assert POLICY.rollout_growth(free=free, serving_used=used, rollout_owned=owned, budget=budget) == growth


@pytest.mark.parametrize(
    ("owned", "used", "recent_peak", "target", "released"),
    [
        (30, 5, 20, 20, RETURN_PACE_SLABS),
        (24, 5, 20, 20, 4),
        (20, 5, 20, 20, 0),
        (10, 5, 20, 20, 0),
        (40, 33, 20, 33, 7),
        (1, 0, 0, 1, 0),
        (100, 0, 120, 100, 0),
    ],
)
def test_serving_keeps_its_recent_peak_and_returns_the_rest_paced(
    owned: int, used: int, recent_peak: int, target: int, released: int
) -> None:
    assert POLICY.serving_target(used=used, recent_peak=recent_peak) == target
    assert POLICY.serving_release(owned=owned, used=used, recent_peak=recent_peak) == released


@pytest.mark.parametrize(
    ("owned", "empty", "wanted", "released"),
    [
        (32, 6, 0, 4),
        (32, 6, 3, 1),
        (32, 6, 5, 0),
        (32, 2, 0, 0),
        (4, 2, 0, 1),
        (100, 60, 0, RETURN_PACE_SLABS),
        (1, 0, 0, 0),
    ],
)
def test_rollout_returns_slabs_that_cache_nothing_but_those_wanted_and_a_spare(
    owned: int, empty: int, wanted: int, released: int
) -> None:
    assert POLICY.rollout_release(owned=owned, empty=empty, wanted=wanted) == released


@pytest.mark.parametrize(
    "settings",
    [
        {"headroom_slabs": 100},
        {"headroom_slabs": -1},
        {"headroom_slabs": 20, "high_watermark": 1.5},
        {"headroom_slabs": 20, "cut_factor": 1},
        {"headroom_slabs": 20, "min_slabs": 101},
    ],
)
def test_bad_settings_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        BudgetPolicy(num_slabs=100, **settings)


def test_peak_holds_for_the_window_after_the_level_fell() -> None:
    peak = RecentPeak(window_s=10.0)
    assert peak.peak(0.0) == 0
    peak.update(5, 0.0)
    assert peak.peak(100.0) == 5
    peak.update(2, 100.0)
    assert peak.peak(109.9) == 5
    assert peak.peak(110.0) == 2


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), max_size=40), st.integers(1, 8))
def test_peak_agrees_with_looking_at_all_of_history(steps: list[tuple[int, int]], window: int) -> None:
    peak, now = RecentPeak(float(window)), 0
    spans: list[tuple[int, float, float]] = [(0, -1e9, 1e9)]  # level, from, to
    for level, pause in steps:
        now += pause
        last, start, _ = spans[-1]
        spans[-1] = (last, start, now)
        spans.append((level, now, 1e9))
        peak.update(level, now)
        peak.check_integrity()
        assert peak.peak(now) == max(v for v, _, end in spans if end > now - window)
