"""How many own rollout nodes jobs keep beside lent serving GPUs."""

from dataclasses import replace
from pathlib import Path

import pytest
from cluster_jobs import HOUR_S, job
from hypothesis import given
from hypothesis import strategies as st

from rose.scheduler.cluster.candidates import isolated, own_limit_s
from rose.scheduler.cluster.pools import Pools
from rose.scheduler.cluster.right_sizing import (
    LastIterations,
    RightSizing,
    fewest_certified,
    kept_nodes,
    sized,
)
from rose.scheduler.group.model import Member
from rose.scheduler.runtime.command.explain import main as explain

POOLS = Pools()
ALL = range(1, 5)


def seen(num_nodes: int, rollout_s: float, lent_gpus: float, train_s: float = 100.0) -> LastIterations:
    return LastIterations(
        num_nodes=num_nodes, iteration_s=rollout_s + train_s, rollout_s=rollout_s, lent_gpus=lent_gpus
    )


@pytest.mark.parametrize(
    ("lent_gpus", "train_s", "wanted"),
    [
        (0.0, 100.0, []),  # without loans a node less costs more time than it saves
        (8.0, 100.0, []),
        (
            32.0,
            10.0,
            [1, 2],
        ),  # as much again is lent: with half of the own nodes rollouts take 1.33 times as long
        (64.0, 100.0, [1, 2, 3]),
        (0.0, 1000.0, [2, 3]),  # own rollout nodes idle most of the time
    ],
)
def test_own_nodes_are_handed_back_only_where_an_iteration_costs_less(
    lent_gpus: float, train_s: float, wanted: list[int]
) -> None:
    found = RightSizing(POOLS).wanted(seen(4, 300.0, lent_gpus, train_s), ALL, 1)
    assert found == wanted


def test_the_dollars_of_an_iteration_are_those_of_its_own_nodes_and_of_what_is_lent() -> None:
    pools = replace(POOLS, serving_dollars_per_gpu_hour=0.5)
    policy = RightSizing(pools)
    now = seen(4, 0.4 * HOUR_S, 32.0, 0.1 * HOUR_S)
    assert policy.dollars(now, 4, 1) == pytest.approx(0.5 * (4 * 14.80 + 42.24) + 0.4 * 32 * 0.5)
    # 64 GPUs become 48: the rollout takes 4/3 as long.
    later_h = 0.4 * 4 / 3
    assert policy.dollars(now, 2, 1) == pytest.approx(
        (later_h + 0.1) * (2 * 14.80 + 42.24) + later_h * 32 * 0.5
    )


@pytest.mark.parametrize("speed", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("nums", [(4, 2), (2, 4)])
def test_a_change_shows_what_a_lent_gpu_is_worth(speed: float, nums: tuple[int, int]) -> None:
    policy, work_s = RightSizing(POOLS), 300.0 * 32
    for num in nums:
        rollout_s = work_s / (8 * num + speed * 16)
        policy.wanted(seen(num, rollout_s, 16.0), ALL, 1)
    assert policy.gpu_speed == pytest.approx(speed)


def test_a_job_whose_loans_turn_out_to_be_worth_little_takes_its_nodes_back_and_keeps_them() -> None:
    policy, work_s, num = RightSizing(POOLS), 300.0 * 32, 4
    history = []
    for _ in range(6):
        rollout_s = work_s / (8 * num + 0.05 * 64)
        history.append(num)
        num = next(iter(policy.wanted(seen(num, rollout_s, 64.0), ALL, 1)), num)
    assert history[0] == 4 and history[1] < 4
    assert len(set(history[3:])) == 1 and history[3] > history[1], history


@given(
    num_nodes=st.integers(1, 8),
    num_other=st.integers(1, 8),
    rollout_s=st.floats(1.0, 1e4),
    train_s=st.floats(1.0, 1e4),
    slo=st.floats(1.01, 5.0),
)
def test_a_job_on_other_nodes_has_the_same_limit_and_the_same_work(
    num_nodes: int, num_other: int, rollout_s: float, train_s: float, slo: float
) -> None:
    asked = replace(job("a", rollout_s, train_s, slo=slo), num_rollout_nodes=num_nodes, rollout_bytes=10**12)
    other = sized(asked, num_other)
    assert own_limit_s(other) == pytest.approx(own_limit_s(asked))
    assert other.rollout_s * num_other == pytest.approx(rollout_s * num_nodes)
    back = sized(other, num_nodes)
    assert back.rollout_s == pytest.approx(rollout_s)
    assert back.slo == pytest.approx(slo)
    assert back.rollout_bytes == pytest.approx(asked.rollout_bytes)


@pytest.mark.parametrize(("slo", "fewest"), [(1.2, 4), (1.3, 3), (2.0, 2), (5.0, 1)])
def test_the_fewest_nodes_are_those_with_which_the_slo_is_kept_without_loans(slo: float, fewest: int) -> None:
    asked = replace(job("a", 200, 100, slo=slo), num_rollout_nodes=4, fewest_rollout_nodes=1)
    group = isolated(asked, "g", POOLS).group
    assert fewest_certified(group, asked, POOLS, own_limit_s, multi_rate=False) == fewest
    fixed = replace(asked, fewest_rollout_nodes=None)
    assert fewest_certified(group, fixed, POOLS, own_limit_s, multi_rate=False) == 4


def test_nodes_that_others_use_are_kept() -> None:
    asked = replace(job("a", 100, 100), num_rollout_nodes=3)
    group = isolated(asked, "g", POOLS).group
    beside = replace(group, members=(*group.members, Member(job=job("b", 10, 10), rollout_nodes=(2,))))
    assert kept_nodes(beside, "a", 1) == (2,)
    assert kept_nodes(beside, "a", 2) == (0, 2)


def test_explain_says_with_how_few_nodes_a_job_would_keep_its_slo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        """\
pools: {serving_gpus: 16}
jobs:
  - name: math
    slo: 2
    max_tokens: 1
    iterations: 9
    phases: {rollout: {nodes: 4, seconds: 200}, train: {seconds: 100}}
    borrow: {run_id: math-1, fewest_nodes: 1}
"""
    )
    assert explain([str(file)]) == 0
    said = capsys.readouterr().out
    assert "borrows 16 serving GPUs while they are free, and keeps at least 2 of its 4 rollout nodes" in said
