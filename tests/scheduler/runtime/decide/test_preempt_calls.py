"""Running jobs that give their places to waiting ones, with a clock of the test's own."""

from typing import Any

import pytest
from full_cluster import ITERATIONS, NOW, Full, pool, submit
from lone_scheduler import long_job, only
from pydantic import ValidationError

from rose.scheduler.cluster.preemption import MAX_VICTIMS
from rose.scheduler.runtime.channel.messages import (
    Answer,
    Cancel,
    Hello,
    HoldJob,
    Stop,
    Submit,
)
from rose.scheduler.runtime.decide.preempt_calls import MAX_TAKEOVERS
from rose.scheduler.runtime.job.spec import ServeSpec


def test_a_job_of_higher_priority_takes_the_place_after_the_iteration() -> None:
    full = Full(**NOW)
    submit(full, "low")
    assert full.iterate("low")[0] is False
    assert submit(full, "high", 5)["takes_place_of"] == ["low"]
    scheduler = full.scheduler
    assert scheduler.job("low")["gives_way"]["to"] == "high"
    assert scheduler.job("high")["takes_place_of"][0]["iteration"] == 1
    assert full.states() == {"low": "running", "high": "queued"}, "not in the middle of an iteration"
    ends, said = full.iterate("low")
    assert ends
    assert [each.forget for each in said if isinstance(each, Stop)] == [True]
    assert full.states() == {"low": "preempting", "high": "queued"}, "its process may still be there"
    assert full.exited("low") == ["high"]
    low = scheduler.job("low")
    assert (low["state"], low["iterations"], low["restarts"]) == ("queued", [2, ITERATIONS], 0)
    assert low["group"] == "" and "0 of 1 free" in low["why"]
    assert [(each["by"], each["iteration"], each["waited_s"]) for each in low["preemptions"]] == [
        ("high", 2, None)
    ]
    scheduler.wait(30.0)
    assert full.end("high") == ["low"]
    low = scheduler.job("low")
    assert (low["state"], low["attempt"], low["iterations"][0]) == ("running", 2, 2)
    assert low["preemptions"][0]["waited_s"] == pytest.approx(30.0)


@pytest.mark.parametrize("how", [Cancel, HoldJob])
def test_a_job_is_spared_when_the_waiting_one_is_withdrawn(how: type[Cancel | HoldJob]) -> None:
    full = Full(**NOW)
    submit(full, "low")
    submit(full, "high", 5)
    full.scheduler.call(how, job="high")
    assert full.scheduler.job("low")["gives_way"] is None
    assert full.iterate("low")[0] is False
    assert full.states()["low"] == "running"


def test_a_job_is_spared_when_another_place_comes_free() -> None:
    full = Full(2, **NOW)
    submit(full, "low")
    submit(full, "other", 9)
    submit(full, "high", 5)
    assert full.scheduler.job("low")["gives_way"] is not None
    assert full.end("other") == ["high"]
    assert full.scheduler.job("low")["gives_way"] is None
    assert full.iterate("low")[0] is False


def test_a_job_runs_a_least_time_before_it_is_preempted() -> None:
    full = Full(preemption={"by_priority": True, "min_run_s": 60})
    submit(full, "low")
    submit(full, "high", 5)
    assert full.iterate("low")[0] is False
    full.scheduler.restart(full.scheduler.now, clock="clock 1")
    full.scheduler.call(Hello, client="runner", running={"low": 1}, log_folder="/logs")
    assert full.scheduler.job("low")["gives_way"]["not_before_s"] == pytest.approx(58.0)
    assert full.scheduler.job("high")["earliest"]["in_s"] == pytest.approx(58.0, abs=2.1)
    full.scheduler.wait(58.0)
    assert full.iterate("low")[0] is True


def test_several_small_jobs_give_way_to_a_large_one_and_nobody_takes_its_room() -> None:
    full = Full(3, **NOW)
    for name in ("a", "b", "c"):
        submit(full, name, priority=1 if name == "a" else 0)
    submit(full, "large", 5, num_nodes=2)
    assert [full.scheduler.job(name)["gives_way"] is not None for name in "abc"] == [False, True, True]
    full.iterate("b")
    assert full.exited("b") == [], "the large job needs two nodes"
    submit(full, "small", 1)
    assert full.states()["small"] == full.states()["b"] == "queued"
    assert "behind large, which takes the place of c" in full.scheduler.job("small")["why"]
    full.iterate("c")
    assert full.exited("c") == ["large"]


def test_a_job_that_leaves_the_waiting_one_its_room_comes_before_the_victim_has_left() -> None:
    full = Full(3, **NOW)
    submit(full, "low", num_nodes=2)
    assert submit(full, "high", 5, num_nodes=2)["takes_place_of"] == ["low"]
    assert submit(full, "small")["state"] == "running", "high gets low's two nodes"
    assert submit(full, "other")["state"] == "queued"
    full.iterate("low")
    assert full.exited("low") == ["high"]
    assert full.states() == {"low": "queued", "high": "running", "small": "running", "other": "queued"}


def test_a_job_is_spared_when_others_make_room_enough() -> None:
    full = Full(3, **NOW)
    for name in ("a", "b", "c"):
        submit(full, name)
    submit(full, "large", 5, num_nodes=2)
    assert [full.scheduler.job(name)["gives_way"] is not None for name in "abc"] == [False, True, True]
    full.end("a")
    spared = [full.scheduler.job(name)["gives_way"] is None for name in "bc"]
    assert sorted(spared) == [False, True]


def test_a_job_does_not_leave_twice_for_one_that_has_not_started_since() -> None:
    full = Full(2, teams={"a": {}}, **NOW)
    submit(full, "low", num_nodes=2)
    submit(full, "high", 5, num_nodes=2, team="a")
    full.iterate("low")
    with_quota(full, {"a": {"max_rollout_nodes": 1}})
    full.exited("low")
    full.scheduler.wait(0.25)
    assert full.states() == {"low": "running", "high": "queued"}, "high is over its new quota"
    with_quota(full, {"a": {}})
    assert full.scheduler.job("low")["gives_way"] is None


def with_quota(full: Full, teams: dict[str, Any]) -> None:
    """A scheduler with another file goes on."""
    content = {**full.scheduler.cluster.model_dump(), "teams": teams}
    full.scheduler.cluster = ServeSpec.model_validate(content)
    full.scheduler.restart(full.scheduler.now)
    attempt = full.scheduler.job("low")["attempt"]
    full.scheduler.call(Hello, client="runner", running={"low": attempt}, log_folder="/logs")


def test_a_job_that_can_not_be_started_again_is_not_preempted() -> None:
    full = Full(**NOW)
    submit(full, "low", max_restarts=0)
    assert submit(full, "high", 5)["takes_place_of"] == []


def test_nobody_is_preempted_where_the_file_says_so() -> None:
    full = Full(preemption={})
    submit(full, "low")
    assert submit(full, "high", 5)["takes_place_of"] == []
    assert full.scheduler.job("low")["gives_way"] is None


def test_a_dry_run_says_whose_place_the_job_would_take_and_changes_nothing() -> None:
    full = Full(**NOW)
    submit(full, "low")
    answer = submit(full, "low-too", 0)
    assert answer["takes_place_of"] == []
    spec = {**long_job("high"), "priority": 5}
    said = only(Answer, full.scheduler.call(Submit, spec=spec, dry_run=True)).body
    assert (said["state"], said["takes_place_of"]) == ("would be queued", ["low"])
    assert full.scheduler.job("low")["gives_way"] is None


def test_a_team_below_its_share_takes_a_place_of_one_above_and_it_ends_there() -> None:
    full = Full(
        2, teams={"a": {}, "b": {}}, preemption={"by_priority": True, "by_share": True, "min_run_s": 0}
    )
    for name in ("a1", "a2", "a3"):
        submit(full, name, team="a")
    assert submit(full, "b1", team="b")["takes_place_of"] == ["a2"]
    assert "team b uses less for its share than team a" in full.scheduler.job("a2")["gives_way"]["why"]
    assert submit(full, "b2", team="b")["takes_place_of"] == [], "both teams will use one node"
    full.iterate("a2")
    assert full.exited("a2") == ["b1"]
    for name in ("a1", "b1"):
        assert full.iterate(name)[0] is False


def test_the_job_that_waits_for_a_place_gets_it_though_the_other_team_uses_less_then() -> None:
    full = Full(
        4, teams={"a": {}, "b": {}}, preemption={"by_priority": True, "by_share": True, "min_run_s": 0}
    )
    submit(full, "a1", num_nodes=3, team="a")
    submit(full, "b1", team="b")
    assert submit(full, "b2", team="b")["takes_place_of"] == ["a1"]
    full.iterate("a1")
    assert full.exited("a1") == ["b2"], "a uses nothing now, and would be first by its share"


def test_a_job_that_names_its_group_takes_the_place_of_one_there() -> None:
    groups: dict[str, Any] = {"main": {}, "other": {}}
    pools = {"rollout": pool("h20", 100), "train": pool("h800", 100), "max_residents": 1}
    full = Full(groups=groups, pools=pools, **NOW)
    submit(full, "there", priority=1, group="main")
    submit(full, "elsewhere", group="other")
    for number in range(MAX_VICTIMS):
        submit(full, f"low-{number}")
    assert submit(full, "high", 5, group="main")["takes_place_of"] == ["there"]
    full.iterate("there")
    assert full.exited("there") == ["high"]


def test_only_so_many_jobs_wait_for_victims_and_the_next_follow() -> None:
    full = Full(MAX_TAKEOVERS + 1, **NOW)
    for number in range(MAX_TAKEOVERS + 1):
        submit(full, f"low-{number}")
    for number in range(MAX_TAKEOVERS):
        assert len(submit(full, f"high-{number}", 5)["takes_place_of"]) == 1
    assert submit(full, "late", 5)["takes_place_of"] == []
    assert submit(full, "higher", 6)["takes_place_of"] == ["low-0"], "those of lower priority don't count"
    full.iterate("low-8")
    assert full.exited("low-8") == ["higher"]


def test_a_job_takes_the_place_of_its_own_team_where_the_quota_is_used_up() -> None:
    full = Full(4, teams={"a": {"max_rollout_nodes": 1}}, **NOW)
    submit(full, "low", team="a")
    submit(full, "other")
    assert submit(full, "high", 5, team="a")["takes_place_of"] == ["low"], (
        "the other's leaving would not help"
    )
    full.iterate("low")
    assert full.exited("low") == ["high"]


def test_shares_without_teams_are_refused_with_one_line() -> None:
    with pytest.raises(ValidationError, match="there are none: add `teams`, or remove it"):
        ServeSpec.model_validate({"preemption": {"by_priority": True, "by_share": True}})
    with pytest.raises(ValidationError, match="min_run_s"):
        ServeSpec.model_validate({"preemption": {"by_priority": True, "min_run_s": -1}})
