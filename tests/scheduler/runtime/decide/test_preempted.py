"""What becomes of a job that is preempted, whoever dies meanwhile."""

from typing import Any

import msgspec
import pytest
from full_cluster import NOW, Full, submit
from lone_scheduler import HOUR_S, LEASE_S, long_job, only

from rose.scheduler.dashboard.metrics import prometheus_text
from rose.scheduler.dashboard.view import state_view
from rose.scheduler.runtime.channel.messages import (
    Answer,
    Cancel,
    Completed,
    Exited,
    Hello,
    HoldJob,
    Overview,
    ReleaseJob,
    Start,
    Stop,
)


def test_the_next_attempt_starts_behind_the_last_iteration_and_host_copies_are_freed() -> None:
    full = Full(**NOW)
    submit(full, "low")
    submit(full, "high", 5)
    full.iterate("low")
    answers = full.scheduler.call(Exited, job="low", attempt=1, exit_status=0, client="runner")
    assert [each.forget for each in answers if isinstance(each, Stop)] == [True], "what it wrote meanwhile"
    full.scheduler.call(Cancel, job="high")
    answers = full.scheduler.call(Exited, job="high", attempt=1, exit_status=0, client="runner")
    start = only(Start, answers)
    assert (start.job, start.attempt, start.first_iteration) == ("low", 2, 1)


def test_a_job_that_crashes_gives_its_place_away_at_once() -> None:
    full = Full(**NOW)
    submit(full, "low")
    submit(full, "high", 5)
    assert full.exited("low", status=1) == ["high"]
    assert full.scheduler.job("low")["restarts"] == 1, "for the crash"
    assert full.end("high") == ["low"]


def test_a_preempted_job_is_cancelled_while_its_process_ends() -> None:
    full = Full(**NOW)
    submit(full, "low")
    submit(full, "high", 5)
    full.iterate("low")
    full.scheduler.call(Cancel, job="low")
    assert full.exited("low") == ["high"]
    assert full.states()["low"] == "cancelled"


@pytest.mark.parametrize("how", [Cancel, HoldJob])
def test_a_job_whose_process_ends_already_is_placed_again_if_the_other_is_withdrawn(
    how: type[Cancel | HoldJob],
) -> None:
    full = Full(**NOW)
    submit(full, "low")
    submit(full, "high", 5)
    full.iterate("low")
    full.scheduler.call(how, job="high")
    assert full.exited("low") == ["low"]
    assert full.scheduler.job("low")["iterations"][0] == 1
    if how is HoldJob:
        full.scheduler.call(ReleaseJob, job="high")
        assert full.scheduler.job("low")["gives_way"]["to"] == "high"


@pytest.mark.parametrize("runs", [True, False])
def test_a_scheduler_that_dies_goes_on_with_the_preemption(runs: bool) -> None:
    full = Full(**NOW)
    submit(full, "low")
    submit(full, "high", 5)
    full.iterate("low")
    full.scheduler.restart(5.0)
    assert full.states() == {"low": "preempting", "high": "queued"}
    running = {"low": 1} if runs else {}
    answers = full.scheduler.call(Hello, client="runner", running=running, log_folder="/logs")
    if runs:
        assert only(Stop, answers).is_lost
        assert full.exited("low") == ["high"]
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
    assert full.iterate("low")[0] is True


def test_the_wait_costs_none_of_the_time_that_the_slo_allows() -> None:
    full = Full(**NOW)
    submit(full, "low", slo=1.5, slo_kind="lifetime")
    submit(full, "high", 5)
    full.iterate("low")
    full.exited("low")
    full.scheduler.wait(300.0)
    assert full.end("high") == ["low"]
    state = full.scheduler.control._state
    assert state.resident("low", full.scheduler.now).bank_s == pytest.approx(1.0), "one iteration of 2 s in 3"
    state.groups.check_integrity(full.scheduler.now)


def test_jobs_that_share_a_group_go_on_when_one_of_them_is_preempted() -> None:
    full = Full(policy="lifetime-static", **NOW)
    scheduler = full.scheduler
    for name, priority in (("stays", 3), ("low", 0), ("high", 2)):
        answer = only(Answer, scheduler.submit(name, **long_job(name), priority=priority))
        assert answer.body["state"] == ("queued" if name == "high" else "running")
    assert scheduler.job("low")["gives_way"]["to"] == "high"
    scheduler.now += HOUR_S
    full.iterate("low")
    assert full.exited("low") == ["high"]
    assert scheduler.job("stays")["group"] == scheduler.job("high")["group"]
    assert scheduler.job("stays")["state"] == "running"
    scheduler.control._state.groups.check_integrity(scheduler.now)


def test_all_ranks_of_a_preempted_job_are_told_to_end_when_the_last_has_completed() -> None:
    full = Full(**NOW)
    submit(full, "low", num_ranks=2)
    submit(full, "high", 5)
    done: dict[str, Any] = {"job": "low", "attempt": 1, "iteration": 0}
    assert [each for each in full.scheduler.call(Completed, **done) if isinstance(each, Answer)] == []
    assert full.states()["low"] == "running", "the other rank has not completed it"
    said = full.scheduler.call(Completed, **done, rank=1)
    assert [each.body["ends"] for each in said if isinstance(each, Answer)] == [True, True]
    assert full.exited("low") == ["high"]


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
    full.iterate("low")
    assert view()["states"] == {"preempting": 1, "queued": 1}
    full.exited("low")
    assert [each["by"] for each in jobs()["low"]["preemptions"]] == ["high"]
    assert b'rose_sched_preemptions_total{job="low"} 1.0' in prometheus_text(view())


def test_a_victim_without_a_host_is_queued_at_once_and_the_status_still_answers() -> None:
    full = Full(2, **NOW)
    for name in ("stays", "hostless"):
        submit(full, name)
    state = full.scheduler.control._state
    state.jobs["hostless"].host = None
    submit(full, "large", 5, num_nodes=2)
    assert full.scheduler.job("large")["earliest"]["after"] == "stays"
    assert full.states() == {"stays": "running", "hostless": "queued", "large": "queued"}
    assert state.takeovers == {"large": ("stays",)}


def test_a_cancelled_victim_does_not_come_back_when_its_runner_is_gone() -> None:
    full = Full(**NOW)
    submit(full, "low")
    full.scheduler.request("low")
    submit(full, "high", 5)
    full.scheduler.call(Cancel, job="low")
    full.scheduler.wait(2 * LEASE_S + 1.0)
    assert full.states()["low"] == "cancelled"


def test_the_quota_that_a_job_waits_for_goes_to_no_job_behind_it() -> None:
    full = Full(20, teams={"a": {"max_rollout_nodes": 2}}, **NOW)
    for name in ("v1", "v2"):
        submit(full, name, team="a")
    submit(full, "large", 5, num_nodes=2, team="a")
    submit(full, "small", 1, team="a")
    full.iterate("v2")
    assert full.exited("v2") == []
    assert full.states()["small"] == "queued"
    full.iterate("v1")
    assert full.exited("v1") == ["large"]


def test_a_job_of_an_older_scheduler_is_preempted_a_least_time_after_the_new_one_began() -> None:
    full = Full(preemption={"by_priority": True, "min_run_s": 30})
    submit(full, "low")
    row = msgspec.json.decode(full.scheduler.rows["job:low"])
    del row["placed_s"]
    full.scheduler.rows["job:low"] = msgspec.json.encode(row)
    full.scheduler.restart(full.scheduler.now, clock="clock 1")
    full.scheduler.call(Hello, client="runner", running={"low": 1}, log_folder="/logs")
    submit(full, "high", 5)
    full.scheduler.wait(30.0)
    assert full.iterate("low")[0] is True


def test_an_iteration_that_a_crash_has_cost_counts_for_the_slo() -> None:
    full = Full(**NOW)
    submit(full, "low")
    submit(full, "high", 5)
    full.scheduler.now += 7.0
    full.exited("low", status=1)
    assert full.scheduler.control._state.jobs["low"].spent_s == pytest.approx(7.0)
