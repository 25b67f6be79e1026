"""Planned paths through the stages of a node, on timetables that can be checked by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.scheduler.node.plan import NodePlan


def test_an_idle_node_answers_after_its_stages() -> None:
    assert NodePlan(2).look(5.0, [1.0, 2.0])[1] == 3.0


def test_a_pass_waits_for_the_one_before_it_on_every_stage() -> None:
    plan = NodePlan(2)
    assert plan.add(0, 0.0, [1.0, 3.0]) == 4.0
    idle_s, response_s = plan.look(0.0, [1.0, 1.0])
    assert (idle_s, response_s) == (0.0, 5.0)  # stage 0 from 1 to 2, stage 1 from 4


def test_idleness_sums_what_every_stage_waits() -> None:
    plan = NodePlan(2)
    plan.add(0, 0.0, [1.0, 1.0])  # stage 0 until 1, stage 1 until 2
    assert plan.look(4.0, [1.0, 1.0])[0] == (4 - 1) + (5 - 2)


def with_backward(give_way_s: float = math.inf) -> NodePlan:
    """Forward 0-1 and 1-2; backward on stage 1 from 2 to 4, on stage 0 from 4 to 6."""
    plan = NodePlan(2, give_way_s)
    plan.add_backwards(0, plan.add(0, 0.0, [1.0, 1.0]), [2.0, 2.0])
    return plan


def test_backward_passes_are_planned_from_the_last_stage_to_the_first() -> None:
    plan = with_backward()
    # A forward that fits before stage 0's backward (4 to 6), and then must wait for stage 1's (2 to 4).
    assert plan.look(1.0, [1.0, 1.0])[1] == 5.0 - 1.0
    # One that does not fit before 4 starts at 6: a far dependency.
    assert plan.look(1.0, [3.5, 1.0])[1] == (6 + 3.5 + 1) - 1


def test_backwards_in_a_gap_do_not_count_as_idle() -> None:
    plan = with_backward()
    idle_s, _ = plan.look(7.0, [1.0, 1.0])
    assert idle_s == (7 - 1 - 2) + (8 - 2 - 2)


def test_a_guest_that_gives_way_delays_by_no_more_than_that() -> None:
    plan = with_backward(give_way_s=0.25)
    assert plan.look(4.5, [1.0, 1.0])[1] == pytest.approx(0.25 + 2)
    assert plan.look(5.9, [1.0, 1.0])[1] == pytest.approx(0.1 + 2)  # it is over before
    assert plan.look(1.5, [3.5, 1.0])[1] == pytest.approx(4.5)  # it would begin later, and begins behind


def test_training_that_gives_way_does_not_push_requests_back() -> None:
    plan = NodePlan(1, give_way_s=0.1)
    assert plan.add_guest(0, 0.0, [1.0], [2.0]) == 3.0
    assert plan.add_guest(1, 0.0, [1.0], [2.0]) == 6.0
    assert plan.look(0.5, [1.0])[1] == pytest.approx(1.1)


def test_later_plans_move_with_what_really_happened() -> None:
    plan = NodePlan(1)
    plan.add(0, 0.0, [1.0])
    plan.add(1, 0.0, [1.0])
    plan.calibrate(0, 0, 1.5)  # planned for 1.0
    assert plan.ends == [2.5]
    plan.calibrate(1, 0, 2.25)
    assert plan.ends == [2.25]  # nothing else is planned: the stage is free


def test_a_batch_that_ends_at_once_moves_later_plans_once() -> None:
    plan = NodePlan(1)
    for number in range(4):
        plan.add(number, 0.0, [1.0])
    for number in range(3):  # planned for 1, 2 and 3; the batch ends a little earlier than its last one
        plan.calibrate(number, 0, 2.8)
    assert plan.ends == [pytest.approx(3.8)]


def test_a_task_nobody_planned_changes_nothing() -> None:
    plan = with_backward()
    before = plan.look(1.0, [3.5, 1.0])
    plan.calibrate(99, 0, 50.0)
    plan.calibrate_backward(99, 1)
    assert plan.look(1.0, [3.5, 1.0]) == before


def test_passes_that_take_longer_than_the_profile_make_plans_longer() -> None:
    plan = NodePlan(1)
    for _ in range(200):
        plan.observe(1.0, 2.0)
    assert plan.scale == pytest.approx(2.0, rel=0.01)
    assert plan.look(0.0, [1.0])[1] == pytest.approx(2.0, rel=0.01)


seconds = st.floats(0.01, 5.0)


@given(
    tasks=st.lists(st.tuples(st.floats(0, 20), st.tuples(seconds, seconds), st.booleans()), max_size=12),
    now=st.floats(0, 20),
    give_way_s=st.sampled_from([math.inf, 0.5]),
)
def test_what_is_looked_at_is_what_is_planned(
    tasks: list[tuple[float, tuple[float, float], bool]], now: float, give_way_s: float
) -> None:
    plan = NodePlan(2, give_way_s)
    for number, (at_s, costs, is_training) in enumerate(sorted(tasks)):
        if is_training:
            plan.add_guest(number, at_s, costs, costs)
        else:
            plan.add(number, at_s, costs)
    idle_s, response_s = plan.look(now, [1.0, 1.0])
    assert idle_s >= 0 and response_s >= 2.0 - 1e-9
    assert plan.look(now, [1.0, 1.0]) == (idle_s, response_s)
    assert plan.add(99, now, [1.0, 1.0]) == pytest.approx(now + response_s)
