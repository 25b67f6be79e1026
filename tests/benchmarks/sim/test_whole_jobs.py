"""The baselines that schedule whole jobs get what their nodes and the paper's prices allow."""

import pytest
from sim.group.micro import micro_groups
from sim.group.scenario import group_of
from sim.group.whole_jobs import H800_ROLLOUT, gavel, interleaved, verl

pytest.importorskip("ortools")


def test_whole_jobs_that_need_both_kinds_of_nodes_take_turns_and_gain_nothing() -> None:
    group = group_of([(100.0, 100.0, (0,)), (100.0, 100.0, (0,))])
    assert gavel(group, trains_on_rollout_nodes=False) == pytest.approx(1.0, rel=1e-4)
    assert interleaved(group) == pytest.approx(2.0)


def test_whole_jobs_share_kinds_of_nodes_where_that_gives_every_job_more() -> None:
    group = group_of([(100.0, 1.0, (0,)), (1.0, 100.0, (0,))])
    assert gavel(group) > 1.5, "one job rolls out for most of its time, the other trains"


def test_a_job_on_training_nodes_alone_is_worth_what_its_slower_rollouts_leave() -> None:
    group = group_of([(100.0, 100.0, (0,))])
    saved = (1.85 + 5.28) / 5.28
    assert verl(group) == pytest.approx(saved * 200 / (100 * H800_ROLLOUT + 100))


def test_no_baseline_gets_more_than_interleaved_phases_in_the_papers_groups() -> None:
    for group in micro_groups():
        assert interleaved(group) > max(gavel(group), verl(group), verl(group, slowdown=1.0)), group.name
