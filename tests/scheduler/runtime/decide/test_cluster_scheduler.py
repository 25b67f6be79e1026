"""The scheduler's decisions, with a clock of the test's own."""

from typing import Any

import pytest
from lone_scheduler import LEASE_S, Scheduler, error_of, only, spec_of

from rose.errors import ConfigError
from rose.scheduler.group.model import Phase
from rose.scheduler.runtime.channel.messages import (
    Answer,
    Cancel,
    Completed,
    Drain,
    Exited,
    Granted,
    Heartbeat,
    Hello,
    Release,
    Start,
    Status,
    Stop,
    Submit,
)
from rose.scheduler.runtime.decide.cluster_scheduler import ClusterScheduler
from rose.scheduler.runtime.job.spec import ServeSpec


@pytest.fixture
def scheduler() -> Scheduler:
    """With a runner, and two jobs started."""
    made = Scheduler()
    made.call(Hello, client="runner", running={}, log_folder="/logs")
    for name in ("a", "b"):
        start = only(Start, made.submit(name))
        assert (start.job, start.attempt, start.first_iteration) == (name, 1, 0)
    return made


def test_a_release_hands_the_nodes_to_the_next(scheduler: Scheduler) -> None:
    first = only(Granted, scheduler.request("a"))
    assert scheduler.request("b") == [], "waits"
    answers = scheduler.call(Release, job="a", attempt=1, phase="rollout", epoch=first.epoch, client="a")
    second = only(Granted, answers)
    assert (second.job, second.phase) == ("b", "rollout")
    assert only(Granted, scheduler.request("a", "train")).epoch > second.epoch


def test_calls_that_arrive_twice_change_nothing(scheduler: Scheduler) -> None:
    submit = Submit(seq=99, spec={**spec_of("c"), "group": None})
    assert only(Answer, scheduler.deliver(submit, "cli")).error is None
    [again] = scheduler.deliver(submit, "cli")
    assert isinstance(again, Answer) and again.error is None
    grant = only(Granted, scheduler.request("a"))
    assert only(Granted, scheduler.request("a")).epoch == grant.epoch
    release = Release(seq=7, job="a", attempt=1, phase=Phase.ROLLOUT, epoch=grant.epoch)
    assert only(Answer, scheduler.deliver(release)).error is None
    assert only(Answer, scheduler.deliver(release)).error is None
    exited = Exited(seq=8, job="a", attempt=1, exit_status=1)
    assert only(Start, scheduler.deliver(exited, "runner")).attempt == 2
    assert not [each for each in scheduler.deliver(exited, "runner") if isinstance(each, Start)]


@pytest.mark.parametrize("now", [0.0, 1e9])
def test_a_new_scheduler_goes_on_whatever_its_clock_says(scheduler: Scheduler, now: float) -> None:
    held = only(Granted, scheduler.request("a"))
    assert scheduler.request("b") == []
    scheduler.restart(now)
    assert scheduler.wait(LEASE_S / 2) == [], "holders have a whole lease to be heard of again"
    beat = scheduler.call(Heartbeat, job="a", attempt=1, phase="rollout", epoch=held.epoch)
    assert only(Answer, beat).error is None
    answers = scheduler.call(Release, job="a", attempt=1, phase="rollout", epoch=held.epoch)
    granted = only(Granted, answers)
    assert granted.job == "b" and granted.epoch > held.epoch, (
        "b's request is remembered, and fences a's permit"
    )
    assert scheduler.job("a")["attempt"] == 1


def test_a_silent_holder_is_ended_before_its_nodes_go_on(scheduler: Scheduler) -> None:
    held = only(Granted, scheduler.request("a"))
    scheduler.request("b")
    stop = only(Stop, scheduler.wait(LEASE_S + 1))
    assert (stop.job, stop.is_lost) == ("a", True)
    answers = scheduler.call(Exited, job="a", attempt=1, exit_status=-9, client="runner")
    assert only(Granted, answers).job == "b"
    assert only(Start, answers).attempt == 2
    late = scheduler.call(Release, job="a", attempt=1, phase="rollout", epoch=held.epoch)
    assert "attempt 1 was replaced by attempt 2" in error_of(late)


def test_without_a_runner_a_silent_holder_blocks_for_two_leases(scheduler: Scheduler) -> None:
    scheduler.request("a")
    scheduler.request("b")
    answers = scheduler.wait(LEASE_S * 2 + 1)
    assert only(Granted, answers).job == "b"


def test_heartbeats_keep_a_permit(scheduler: Scheduler) -> None:
    held = only(Granted, scheduler.request("a"))
    scheduler.request("b")
    for _ in range(10):
        assert scheduler.wait(LEASE_S / 2) == []
        beat = scheduler.call(Heartbeat, job="a", attempt=1, phase="rollout", epoch=held.epoch)
        assert only(Answer, beat).error is None
    stale = scheduler.call(Heartbeat, job="a", attempt=1, phase="rollout", epoch=held.epoch - 1)
    assert "taken back" in error_of(stale)


def test_time_in_which_nobody_could_be_heard_does_not_count(scheduler: Scheduler) -> None:
    scheduler.request("a")
    scheduler.now += 100 * LEASE_S
    scheduler.control.tick(scheduler.now)
    assert scheduler.wait(LEASE_S / 2) == []


def test_a_crash_starts_the_job_behind_its_last_iteration(scheduler: Scheduler) -> None:
    scheduler.call(Completed, job="a", attempt=1, iteration=0)
    scheduler.call(Completed, job="a", attempt=1, iteration=1)
    scheduler.restart(5.0)
    start = only(Start, scheduler.call(Exited, job="a", attempt=1, exit_status=1, client="runner"))
    assert (start.attempt, start.first_iteration) == (2, 2)


def test_a_new_runner_gets_every_job_that_it_does_not_have(scheduler: Scheduler) -> None:
    answers = scheduler.call(Hello, client="other", running={"a": 1, "gone": 4}, log_folder="/logs")
    assert only(Start, answers).job == "b" and only(Start, answers).attempt == 2
    assert only(Stop, answers).job == "gone"


def test_jobs_wait_for_a_runner() -> None:
    scheduler = Scheduler()
    assert not [each for each in scheduler.submit("a") if isinstance(each, Start)]
    answers = scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
    assert only(Start, answers).attempt == 1


def test_an_exit_before_the_last_iteration_is_a_failure(scheduler: Scheduler) -> None:
    scheduler.call(Exited, job="a", attempt=1, exit_status=0, client="runner")
    assert scheduler.job("a")["state"] == "failed"
    assert "after 0 of 3 iterations" in scheduler.job("a")["note"]


def test_cancelling_a_job_frees_its_nodes_when_its_process_is_gone(scheduler: Scheduler) -> None:
    scheduler.request("a")
    scheduler.request("b")
    answers = scheduler.call(Cancel, job="a")
    assert only(Stop, answers).job == "a" and not [each for each in answers if isinstance(each, Granted)]
    answers = scheduler.call(Exited, job="a", attempt=1, exit_status=-15, client="runner")
    assert only(Granted, answers).job == "b"
    assert scheduler.job("a")["state"] == "cancelled"
    assert "no job 'x'; the jobs are: a, b" in error_of(scheduler.call(Cancel, job="x"))


def test_a_drained_node_takes_no_jobs_until_that_is_undone(scheduler: Scheduler) -> None:
    reply = only(Answer, scheduler.call(Drain, group="main", node="rollout-0"))
    assert reply.body == {"drained": ["rollout-0"], "still_used_by": ["a", "b"]}
    scheduler.submit("c")
    assert "rollout-0 of group main is drained" in scheduler.job("c")["why"]
    scheduler.restart(0.0)
    scheduler.submit("d")
    assert "rollout-0 of group main is drained" in scheduler.job("d")["why"]
    answers = scheduler.call(Drain, group="main", node="rollout-0", undo=True)
    assert only(Start, answers).job == "c"
    assert "no node 'rollout-7'" in error_of(scheduler.call(Drain, group="main", node="rollout-7"))


def test_a_dry_run_changes_nothing(scheduler: Scheduler) -> None:
    rows = dict(scheduler.rows)
    spec = {**spec_of("c", 2.0), "phases": {"rollout": {"seconds": 2.0}, "train": {"seconds": 1.0}}}
    reply = only(Answer, scheduler.call(Submit, spec=spec, dry_run=True))
    assert reply.body["state"] == "would run" and reply.body["iteration_s"] == 4.0
    assert scheduler.rows == rows


def test_a_job_waits_for_a_full_group() -> None:
    scheduler = Scheduler(pools={"max_residents": 1})
    scheduler.submit("a")
    scheduler.submit("b")
    assert scheduler.job("b")["state"] == "queued"
    assert scheduler.job("b")["why"].startswith("group main has 1 jobs, at most 1 may share one")


def test_a_job_that_names_no_group_is_placed_by_the_policy() -> None:
    scheduler = Scheduler()
    first = only(Answer, scheduler.submit("a", group=None)).body
    assert (first["group"], first["rollout_nodes"]) == ("group-1", [0])
    assert "isolated provisioning by lifetime-static, $57.04/h more" in first["why"]
    second = only(Answer, scheduler.submit("b", group=None)).body
    assert second["group"] == "group-1" and "direct packing" in second["why"], "it fits into the idle halves"
    scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
    scheduler.request("a")
    scheduler.restart(3.0)
    [reply] = scheduler.call(Status)
    assert isinstance(reply, Answer)
    assert reply.body["groups"]["group-1"]["jobs"] == {"a": [0], "b": [0]}
    assert reply.body["groups"]["group-1"]["holders"] == {"a": "rollout"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"group": "other"}, "no group 'other'; the groups are main"),
        ({"rollout_nodes": [3]}, "rollout nodes [3]: group main has rollout nodes 0; choose among these"),
        ({"rollout_nodes": [0, 1]}, "expected 1 different numbers from 0"),
        ({"group": None, "rollout_nodes": [0]}, "belong to no group: add `group`"),
        ({"slo": 1.0}, "slo 1 allows no slowdown"),
        ({"iterations": 0}, "iterations"),
        ({"name": "no/slash"}, "name"),
        ({"steps": []}, "steps: unknown key"),
        ({"command": []}, "command"),
    ],
)
def test_an_impossible_job_is_refused_with_the_reason(fields: dict[str, Any], words: str) -> None:
    scheduler = Scheduler()
    assert words in error_of(scheduler.submit("a", **fields))
    assert not [key for key in scheduler.rows if key.startswith("job:")]


def test_a_job_waits_until_its_state_fits_in_the_hosts_memory(scheduler: Scheduler) -> None:
    scheduler.submit("c")
    scheduler.submit("d")
    assert scheduler.job("d")["state"] == "queued"
    assert "training nodes: 2400.0 of 2000.0 GB" in scheduler.job("d")["why"]


def test_a_group_whose_nodes_changed_while_its_jobs_run_is_refused(scheduler: Scheduler) -> None:
    cluster = ServeSpec.model_validate({"groups": {"main": {"num_train_nodes": 2}}})
    with pytest.raises(
        ConfigError,
        match=r"job a runs in group main of 1 rollout and 1 training nodes, the cluster's file says 1 and 2",
    ):
        ClusterScheduler(cluster, scheduler.rows, 0.0, 3, "clock 3")


def test_a_cancelled_job_that_waits_is_granted_nothing(scheduler: Scheduler) -> None:
    held = only(Granted, scheduler.request("a"))
    assert scheduler.request("b") == []
    scheduler.call(Cancel, job="b")
    answers = scheduler.call(Release, job="a", attempt=1, phase="rollout", epoch=held.epoch)
    assert not [each for each in answers if isinstance(each, Granted)]
    scheduler.call(Exited, job="b", attempt=1, exit_status=-15, client="runner")
    assert scheduler.job("b")["state"] == "cancelled"


def test_rows_that_another_version_has_written_are_refused_by_name() -> None:
    scheduler = Scheduler()
    scheduler.submit("a")
    scheduler.rows["job:a"] = b'{"spec": {}}'
    with pytest.raises(ConfigError, match=r"row 'job:a' that another version .* missing required field"):
        scheduler.restart(scheduler.now)
