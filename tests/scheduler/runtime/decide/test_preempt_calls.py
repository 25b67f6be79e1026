"""Running jobs that give their places to waiting ones, with a clock of the test's own."""

from typing import Any

import pytest
from full_cluster import Full, pool
from lone_scheduler import HOUR_S, Scheduler, long_job, only
from pydantic import ValidationError

from rose.scheduler.dashboard.metrics import prometheus_text
from rose.scheduler.dashboard.view import state_view
from rose.scheduler.runtime.channel.messages import (
    Answer,
    Cancel,
    Completed,
    Dead,
    Exited,
    Granted,
    Hello,
    HoldJob,
    Overview,
    Release,
    ReleaseJob,
    SchedulerMessage,
    Start,
    Stop,
    Submit,
)
from rose.scheduler.runtime.job.spec import ServeSpec

NOW: dict[str, Any] = {"preemption": {"min_run_s": 0}}
ITERATIONS = 100


def submit(full: Full, name: str, priority: int = 0, num_nodes: int = 1, **fields: Any) -> dict[str, Any]:
    return full.submit(name, num_nodes, priority=priority, iterations=ITERATIONS, **fields)


def iterate(full: Full, name: str) -> tuple[bool, list[SchedulerMessage]]:
    """One iteration; whether the job's process has to end after it, and all that was said at its end."""
    scheduler = full.scheduler
    job = scheduler.job(name)
    iteration, attempt = job["iterations"][0], job["attempt"]
    for phase in ("rollout", "train"):
        permit = only(Granted, scheduler.request(name, phase, iteration, attempt))
        scheduler.wait(1.0)
        scheduler.call(
            Release, client=name, job=name, attempt=attempt, phase=permit.phase, epoch=permit.epoch
        )
    said = scheduler.call(Completed, client=name, job=name, attempt=attempt, iteration=iteration)
    return only(Answer, said).body["ends"], said


def exited(full: Full, name: str, attempt: int = 1, status: int = 0) -> list[str]:
    """The job's process has ended; who starts now."""
    answers = full.scheduler.call(Exited, job=name, attempt=attempt, exit_status=status, client="runner")
    return [each.job for each in answers if isinstance(each, Start)]


def test_a_job_of_higher_priority_takes_the_place_after_the_iteration() -> None:
    full = Full(**NOW)
    submit(full, "low")
    assert iterate(full, "low")[0] is False
    assert submit(full, "high", 5)["takes_place_of"] == ["low"]
    scheduler = full.scheduler
    assert scheduler.job("low")["gives_way"]["to"] == "high"
    assert scheduler.job("high")["takes_place_of"][0]["iteration"] == 1
    assert full.states() == {"low": "running", "high": "queued"}, "not in the middle of an iteration"
    ends, said = iterate(full, "low")
    assert ends
    assert [each.forget for each in said if isinstance(each, Stop)] == [True]
    assert full.states() == {"low": "preempting", "high": "queued"}, "its process may still be there"
    assert exited(full, "low") == ["high"]
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


def test_the_next_attempt_starts_behind_the_last_iteration_and_host_copies_are_freed() -> None:
    full = Full(**NOW)
    submit(full, "low")
    submit(full, "high", 5)
    iterate(full, "low")
    answers = full.scheduler.call(Exited, job="low", attempt=1, exit_status=0, client="runner")
    assert [each.forget for each in answers if isinstance(each, Stop)] == [True], "what it wrote meanwhile"
    full.scheduler.call(Cancel, job="high")
    answers = full.scheduler.call(Exited, job="high", attempt=1, exit_status=0, client="runner")
    start = only(Start, answers)
    assert (start.job, start.attempt, start.first_iteration) == ("low", 2, 1)


@pytest.mark.parametrize("how", [Cancel, HoldJob])
def test_a_job_is_spared_when_the_waiting_one_is_withdrawn(how: type[Cancel | HoldJob]) -> None:
    full = Full(**NOW)
    submit(full, "low")
    submit(full, "high", 5)
    full.scheduler.call(how, job="high")
    assert full.scheduler.job("low")["gives_way"] is None
    assert iterate(full, "low")[0] is False
    assert full.states()["low"] == "running"


def test_a_job_is_spared_when_another_place_comes_free() -> None:
    full = Full(2, **NOW)
    submit(full, "low")
    submit(full, "other", 9)
    submit(full, "high", 5)
    assert full.scheduler.job("low")["gives_way"] is not None
    assert full.end("other") == ["high"]
    assert full.scheduler.job("low")["gives_way"] is None
    assert iterate(full, "low")[0] is False


def test_a_job_runs_a_least_time_before_it_is_preempted() -> None:
    full = Full(preemption={"min_run_s": 60})
    submit(full, "low")
    submit(full, "high", 5)
    assert iterate(full, "low")[0] is False
    full.scheduler.restart(full.scheduler.now, clock="clock 1")
    full.scheduler.call(Hello, client="runner", running={"low": 1}, log_folder="/logs")
    assert full.scheduler.job("low")["gives_way"]["not_before_s"] == pytest.approx(58.0)
    assert full.scheduler.job("high")["earliest"]["in_s"] == pytest.approx(58.0, abs=2.1)
    full.scheduler.wait(58.0)
    assert iterate(full, "low")[0] is True


def test_several_small_jobs_give_way_to_a_large_one_and_nobody_takes_its_room() -> None:
    full = Full(3, **NOW)
    for name in ("a", "b", "c"):
        submit(full, name, priority=1 if name == "a" else 0)
    submit(full, "large", 5, num_nodes=2)
    assert [full.scheduler.job(name)["gives_way"] is not None for name in "abc"] == [False, True, True]
    iterate(full, "b")
    assert exited(full, "b") == [], "the large job needs two nodes"
    submit(full, "small", 1)
    assert full.states()["small"] == full.states()["b"] == "queued"
    assert "behind large, which takes the place of c" in full.scheduler.job("small")["why"]
    iterate(full, "c")
    assert exited(full, "c") == ["large"]


def test_a_job_is_spared_when_others_make_room_enough() -> None:
    full = Full(3, **NOW)
    for name in ("a", "b", "c"):
        submit(full, name)
    submit(full, "large", 5, num_nodes=2)
    assert [full.scheduler.job(name)["gives_way"] is not None for name in "abc"] == [False, True, True]
    full.end("a")
    spared = [full.scheduler.job(name)["gives_way"] is None for name in "bc"]
    assert sorted(spared) == [False, True]


def test_a_job_that_crashes_gives_its_place_away_at_once() -> None:
    full = Full(**NOW)
    submit(full, "low")
    submit(full, "high", 5)
    assert exited(full, "low", status=1) == ["high"]
    assert full.scheduler.job("low")["restarts"] == 1, "for the crash"
    assert full.end("high") == ["low"]


def test_a_preempted_job_is_cancelled_while_its_process_ends() -> None:
    full = Full(**NOW)
    submit(full, "low")
    submit(full, "high", 5)
    iterate(full, "low")
    full.scheduler.call(Cancel, job="low")
    assert exited(full, "low") == ["high"]
    assert full.states()["low"] == "cancelled"


@pytest.mark.parametrize("how", [Cancel, HoldJob])
def test_a_job_whose_process_ends_already_is_placed_again_if_the_other_is_withdrawn(
    how: type[Cancel | HoldJob],
) -> None:
    full = Full(**NOW)
    submit(full, "low")
    submit(full, "high", 5)
    iterate(full, "low")
    full.scheduler.call(how, job="high")
    assert exited(full, "low") == ["low"]
    assert full.scheduler.job("low")["iterations"][0] == 1
    if how is HoldJob:
        full.scheduler.call(ReleaseJob, job="high")
        assert full.scheduler.job("low")["gives_way"]["to"] == "high"


def test_a_job_does_not_leave_twice_for_one_that_has_not_started_since() -> None:
    full = Full(2, teams={"a": {}}, **NOW)
    submit(full, "low", num_nodes=2)
    submit(full, "high", 5, num_nodes=2, team="a")
    iterate(full, "low")
    with_quota(full, {"a": {"max_rollout_nodes": 1}})
    exited(full, "low")
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


@pytest.mark.parametrize("runs", [True, False])
def test_a_scheduler_that_dies_goes_on_with_the_preemption(runs: bool) -> None:
    full = Full(**NOW)
    submit(full, "low")
    submit(full, "high", 5)
    iterate(full, "low")
    full.scheduler.restart(5.0)
    assert full.states() == {"low": "preempting", "high": "queued"}
    running = {"low": 1} if runs else {}
    answers = full.scheduler.call(Hello, client="runner", running=running, log_folder="/logs")
    if runs:
        assert only(Stop, answers).is_lost
        assert exited(full, "low") == ["high"]
    else:
        assert [each.job for each in answers if isinstance(each, Start)] == ["high"]
    assert full.states() == {"low": "queued", "high": "running"}


def test_a_takeover_outlives_the_scheduler() -> None:
    full = Full(**NOW)
    submit(full, "low")
    submit(full, "high", 5)
    full.scheduler.restart(5.0)
    full.scheduler.call(Hello, client="runner", running={"low": 1}, log_folder="/logs")
    assert [each["job"] for each in full.scheduler.job("high")["takes_place_of"]] == ["low"]
    assert iterate(full, "low")[0] is True


def test_a_job_that_can_not_be_started_again_is_not_preempted() -> None:
    full = Full(**NOW)
    submit(full, "low", max_restarts=0)
    assert submit(full, "high", 5)["takes_place_of"] == []


def test_nobody_is_preempted_where_the_file_says_so() -> None:
    full = Full(preemption={"by_priority": False})
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
    full = Full(2, teams={"a": {}, "b": {}}, preemption={"by_share": True, "min_run_s": 0})
    for name in ("a1", "a2", "a3"):
        submit(full, name, team="a")
    assert submit(full, "b1", team="b")["takes_place_of"] == ["a2"]
    assert "team b uses less for its share than team a" in full.scheduler.job("a2")["gives_way"]["why"]
    assert submit(full, "b2", team="b")["takes_place_of"] == [], "both teams will use one node"
    iterate(full, "a2")
    assert exited(full, "a2") == ["b1"]
    for name in ("a1", "b1"):
        assert iterate(full, name)[0] is False


def test_the_job_that_waits_for_a_place_gets_it_though_the_other_team_uses_less_then() -> None:
    full = Full(4, teams={"a": {}, "b": {}}, preemption={"by_share": True, "min_run_s": 0})
    submit(full, "a1", num_nodes=3, team="a")
    submit(full, "b1", team="b")
    assert submit(full, "b2", team="b")["takes_place_of"] == ["a1"]
    iterate(full, "a1")
    assert exited(full, "a1") == ["b2"], "a uses nothing now, and would be first by its share"


def test_the_wait_costs_none_of_the_time_that_the_slo_allows() -> None:
    full = Full(**NOW)
    submit(full, "low", slo=1.5, slo_kind="lifetime")
    submit(full, "high", 5)
    iterate(full, "low")
    exited(full, "low")
    full.scheduler.wait(300.0)
    assert full.end("high") == ["low"]
    state = full.scheduler.control._state
    assert state.resident("low", full.scheduler.now).bank_s == pytest.approx(1.0), "one iteration of 2 s in 3"
    state.groups.check_integrity(full.scheduler.now)


def test_a_job_takes_the_place_of_its_own_team_where_the_quota_is_used_up() -> None:
    full = Full(4, teams={"a": {"max_rollout_nodes": 1}}, **NOW)
    submit(full, "low", team="a")
    submit(full, "other")
    assert submit(full, "high", 5, team="a")["takes_place_of"] == ["low"], (
        "the other's leaving would not help"
    )
    iterate(full, "low")
    assert exited(full, "low") == ["high"]


def test_jobs_that_share_a_group_go_on_when_one_of_them_is_preempted() -> None:
    pools = {"rollout": pool("h20", 1), "train": pool("h800", 1)}
    scheduler = Scheduler(policy="lifetime-static", groups={}, pools=pools, **NOW)
    scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
    for name, priority in (("stays", 3), ("low", 0)):
        answer = only(Answer, scheduler.submit(name, **long_job(name), priority=priority))
        assert answer.body["state"] == "running"
    only(Answer, scheduler.submit("high", **long_job("high"), priority=2))
    assert scheduler.job("low")["gives_way"]["to"] == "high"
    full = Full.__new__(Full)
    full.scheduler = scheduler
    scheduler.now += HOUR_S
    iterate(full, "low")
    assert exited(full, "low") == ["high"]
    assert scheduler.job("stays")["group"] == scheduler.job("high")["group"]
    assert scheduler.job("stays")["state"] == "running"
    scheduler.control._state.groups.check_integrity(scheduler.now)


def test_a_queued_job_that_ran_on_a_host_that_is_off_is_not_started_by_that() -> None:
    full = Full(**NOW)
    full.scheduler.call(
        Hello, client="agent", running={}, log_folder="/l", host="h", num_nodes={"rollout": 0}
    )
    submit(full, "low")
    submit(full, "high", 5)
    iterate(full, "low")
    exited(full, "low")
    assert "is alive" in str(only(Answer, full.scheduler.call(Dead, host="local")).error)
    assert full.states()["low"] == "queued"


def test_the_dashboard_and_its_metrics_show_preemptions() -> None:
    full = Full(**NOW)
    submit(full, "low")
    submit(full, "high", 5)

    def jobs() -> dict[str, Any]:
        return {each["name"]: each for each in view()["jobs"]}

    def view() -> dict[str, Any]:
        return state_view(only(Answer, full.scheduler.call(Overview)).body, [])

    assert jobs()["low"]["gives_way"]["to"] == "high"
    assert jobs()["high"]["takes_place_of"][0]["job"] == "low"
    iterate(full, "low")
    assert view()["states"] == {"preempting": 1, "queued": 1}
    exited(full, "low")
    assert [each["by"] for each in jobs()["low"]["preemptions"]] == ["high"]
    assert b'rose_sched_preemptions_total{job="low"} 1.0' in prometheus_text(view())


def test_shares_without_teams_are_refused_with_one_line() -> None:
    with pytest.raises(ValidationError, match="there are none: add `teams`, or remove it"):
        ServeSpec.model_validate({"preemption": {"by_share": True}})
    with pytest.raises(ValidationError, match="min_run_s"):
        ServeSpec.model_validate({"preemption": {"min_run_s": -1}})
