from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.scheduler.group.certificate import certify
from rose.scheduler.group.cycle import promised_s, round_robin_s
from rose.scheduler.group.model import Group, Job, Member
from rose.scheduler.group.order import round_robin


def member(name: str, rollout_s: float, train_s: float, nodes: tuple[int, ...]) -> Member:
    return Member(job=Job(name=name, rollout_s=rollout_s, train_s=train_s), rollout_nodes=nodes)


def group(*members: Member, num_rollout_nodes: int) -> Group:
    return Group(name="g", num_train_nodes=1, num_rollout_nodes=num_rollout_nodes, members=members)


def test_two_alike_jobs_take_turns_without_waiting() -> None:
    alike = group(member("a", 100, 100, (0,)), member("b", 100, 100, (0,)), num_rollout_nodes=1)
    assert promised_s(alike) == (200, 200)


def test_the_counterexample_of_jobs_on_several_nodes_takes_longer_than_the_theorems_bound() -> None:
    jobs = (member("a", 35, 41, (0,)), member("b", 39, 23, (0, 1)), member("c", 35, 5, (1,)))
    orders = [(0, 1, 2), (0, 2, 1)]
    found = [group(*(jobs[k] for k in order), num_rollout_nodes=2) for order in orders]
    assert found[0].round_robin_s == 76
    assert min(round_robin_s(one) for one in found) == pytest.approx(77.5)  # 78 in whole seconds


def test_time_outside_of_phases_makes_cycles_longer_than_the_theorems_bound() -> None:
    jobs = [member("a", 50, 50, (0,)), member("b", 1, 40, (0,)), member("c", 1, 1, (0,))]
    jobs[2] = replace(jobs[2], job=replace(jobs[2].job, after_train_s=100))
    one = group(*jobs, num_rollout_nodes=1)
    limits_s = dict.fromkeys("abc", 1000.0)
    assert one.round_robin_s == 102
    assert round_robin_s(one) == pytest.approx(certify(one, round_robin(one), limits_s).cycle_s) == 121


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(1, 100), st.integers(0, 2)), min_size=1, max_size=5)
)
def test_any_order_reaches_the_theorems_bound_while_jobs_sit_on_one_node(
    jobs: list[tuple[int, int, int]],
) -> None:
    members = [
        member(f"j{k}", rollout_s, train_s, (node,)) for k, (rollout_s, train_s, node) in enumerate(jobs)
    ]
    single = group(*members, num_rollout_nodes=5)
    # A job on two nodes of its own that takes no time sends the search through the general path.
    idle = member("idle", 1e-6, 1e-6, (3, 4))
    general = group(*members, idle, num_rollout_nodes=5)
    assert round_robin_s(general) == pytest.approx(single.round_robin_s, abs=1e-3)
