"""The memory policy as tables: budget, cut, freeze, growth, and what serving keeps or gives."""

from dataclasses import replace

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
def test_a_budget_is_cut_and_kept_by_what_serving_uses(
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
    assert POLICY.rollout_growth(serving_used=0, rollout_owned=0, budget=whole) == 99
    assert POLICY.rollout_growth(serving_used=0, rollout_owned=49, budget=whole) == 50
    # The slab of serving's padding block stays.
    assert POLICY.rollout_growth(serving_used=0, rollout_owned=99, budget=whole) == 0


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
    ("used", "owned", "budget", "growth"),
    [
        (20, 0, 60, 60),
        (0, 0, 60, 60),
        (20, 50, 60, 10),
        # 100 - 50 owned - 25 used - 20 headroom
        (25, 50, 60, 5),
        (30, 50, 60, 0),
        (90, 50, 60, 0),
        (0, 61, 60, 0),
        # The pinned slab may always be had.
        (99, 0, 60, 1),
    ],
)
def test_rollout_growth_spares_the_headroom(used: int, owned: int, budget: int, growth: int) -> None:
    assert POLICY.rollout_growth(serving_used=used, rollout_owned=owned, budget=budget) == growth


def test_rollout_engines_share_their_budget_equally_and_take_what_others_leave() -> None:
    def shares(*owned: int) -> list[int]:
        return [
            POLICY.rollout_share(budget=40, num_engines=len(owned), others_owned=sum(owned) - mine)
            for mine in owned
        ]

    assert shares(40) == [40]
    assert shares(40, 0) == [40, 20]  # the second may grow into its half, and the first gives it
    assert shares(30, 20) == [20, 20]
    assert shares(15, 15, 10) == [15, 15, 13]
    growths = [
        POLICY.rollout_growth(
            serving_used=0, rollout_owned=5, budget=40, num_engines=2, others_owned=others_owned
        )
        for others_owned in (30, 78)
    ]
    assert growths == [15, 0]


@pytest.mark.parametrize(
    ("others_owned", "part", "share"),
    [(20, 1.0, 20), (20, 0.25, 10), (10, 0.75, 30), (20, 0.75, 20), (0, 0.75, 30), (0, 0.001, 1)],
    ids=str,
)
def test_an_engine_with_a_part_of_the_budget_takes_no_more_of_what_others_leave(
    others_owned: int, part: float, share: int
) -> None:
    engines = {"budget": 40, "num_engines": 2, "others_owned": others_owned}
    assert POLICY.rollout_share(**engines, part=part) == share
    growth = POLICY.rollout_growth(serving_used=0, rollout_owned=0, **engines, part=part)
    assert growth == share


@pytest.mark.parametrize(("least", "share"), [(0, 4), (9, 9), (30, 20)])
def test_a_part_that_is_too_small_for_one_request_grows_to_it_within_the_engine_s_share(
    least: int, share: int
) -> None:
    engines = {"budget": 40, "num_engines": 2, "others_owned": 20}
    assert POLICY.rollout_share(**engines, part=0.1, least=least) == share


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 40))
def test_a_cut_that_every_rollout_engine_obeys_lands_within_the_budget(owned: list[int], budget: int) -> None:
    after = [
        min(mine, POLICY.rollout_share(budget=budget, num_engines=len(owned), others_owned=sum(owned) - mine))
        for mine in owned
    ]
    assert sum(after) <= max(budget, len(owned) * POLICY.min_slabs)


FLOOR = replace(POLICY, floor_slabs=50)


@pytest.mark.parametrize(("recent_peak", "budget"), [(0, 50), (30, 50), (31, 49), (80, 1)], ids=str)
def test_step_budget_leaves_serving_its_floor(recent_peak: int, budget: int) -> None:
    assert FLOOR.begin_step(recent_peak) == budget
    # The rollout engine doesn't know the floor: it goes by what serving says that it is to leave.
    assert POLICY.begin_step(FLOOR.reserve(recent_peak)) == budget


@pytest.mark.parametrize(
    ("missing", "must", "owned", "free", "lacks", "growth"),
    [
        # Nobody wants anything: cache may fill the pool.
        (10, 0, 60, 40, 0, 10),
        (50, 0, 60, 40, 0, 40),
        # What rollouts lack is left to them, and serving evicts instead ...
        (10, 0, 60, 40, 35, 5),
        (10, 0, 60, 40, 60, 0),
        # ... but not what its requests can't do without, and not below its floor.
        (10, 8, 60, 40, 60, 8),
        (10, 0, 45, 40, 60, 5),
        (10, 8, 60, 4, 60, 4),
    ],
)
def test_serving_grows_instead_of_evicting_while_rollouts_lack_nothing(
    missing: int, must: int, owned: int, free: int, lacks: int, growth: int
) -> None:
    grown = FLOOR.serving_growth(missing=missing, must=must, owned=owned, free=free, rollout_lacks=lacks)
    assert grown == growth


@pytest.mark.parametrize(
    ("owned", "used", "budget", "available", "lacks", "given"),
    [
        # No demand, no gift: however long serving is idle, and whatever it holds.
        (100, 0, 50, 0, 0, 0),
        (80, 10, 50, 0, 3, 3),
        (80, 10, 50, 2, 3, 1),
        (80, 10, 50, 3, 3, 0),
        (80, 10, 50, 0, 40, RETURN_PACE_SLABS),
        # Down to the floor, or to what is in use.
        (53, 10, 50, 0, 40, 3),
        (50, 10, 50, 0, 40, 0),
        (80, 78, 50, 0, 40, 2),
        # An engine out of service lends its floor with its headroom, all but its padding block's slab.
        (4, 0, 99, 0, 40, 3),
    ],
)
def test_serving_gives_what_rollouts_lack_down_to_its_floor(
    owned: int, used: int, budget: int, available: int, lacks: int, given: int
) -> None:
    gift = FLOOR.serving_gift(owned=owned, used=used, budget=budget, available=available, lacking=lacks)
    assert gift == given


@given(
    serving=st.integers(1, 100),
    used=st.integers(0, 100),
    peak=st.integers(0, 100),
    missing=st.integers(0, 60),
)
def test_what_rollouts_may_have_serving_gives_and_the_rest_it_keeps(
    serving: int, used: int, peak: int, missing: int
) -> None:
    """Step by step, until nothing moves: rollouts hold what budget and headroom allow."""
    used, rollout, serving_at_first = min(used, serving), 0, serving
    budget = FLOOR.begin_step(max(peak, used))
    while True:
        allowed = FLOOR.rollout_growth(serving_used=used, rollout_owned=rollout, budget=budget)
        lacks = min(max(missing - rollout, 0), allowed)
        free = FLOOR.num_slabs - serving - rollout
        taken = min(lacks, free)
        rollout += taken
        gift = FLOOR.serving_gift(
            owned=serving,
            used=used,
            budget=budget,
            available=free - taken,
            lacking=lacks - taken,
        )
        serving -= gift
        assert serving >= used
        if not taken and not gift:
            break
    assert rollout <= budget
    assert serving >= min(FLOOR.floor_slabs, serving_at_first)
    # Nothing is lacking, unless requests use all that serving holds.
    assert lacks == 0 or serving == max(used, FLOOR.min_slabs)


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
        {"headroom_slabs": 20, "floor_slabs": 100},
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
    assert peak.falls_at_s(100.0) == 110.0
    assert peak.peak(109.9) == 5
    assert peak.peak(110.0) == 2
    assert peak.falls_at_s(110.0) is None


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
