"""Jobs on a Ray cluster as the scheduler decides about them: nodes that die, drain and come back."""

from typing import Any

import pytest
from lone_scheduler import Scheduler, error_of, hello, long_job, only, spec_of

from rose.scheduler.runtime.channel.messages import (
    Answer,
    Awaiting,
    Cancel,
    Completed,
    Exited,
    Granted,
    Hello,
    Nodes,
    Placed,
    SchedulerMessage,
    Start,
    Status,
    Stop,
)

RAY = {"address": "auto", "rollout": {"GPU": 2}, "train": {"GPU": 2}}


def two_jobs() -> Scheduler:
    """a and b run, each on nodes of its own."""
    scheduler = Scheduler(policy="solo", groups={}, lease_s=1e6, ray=RAY)
    hello(scheduler, 2)
    for name in "ab":
        assert only(Start, scheduler.submit(name, **{**spec_of(name), "group": None})).job == name
    return scheduler


def exited(scheduler: Scheduler, job: str, attempt: int = 1, **fields: Any) -> list[SchedulerMessage]:
    how = {"job": job, "attempt": attempt, "exit_status": -9, **fields}
    return scheduler.call(Exited, client="ray", **how)


def test_a_job_whose_node_died_starts_again_behind_its_last_iteration_and_that_is_no_crash() -> None:
    scheduler = two_jobs()
    scheduler.call(Completed, job="a", attempt=1, iteration=0)
    for attempt in range(1, 10):
        start = only(Start, exited(scheduler, "a", attempt, lost="Ray node 12 on 10.0.0.2 died"))
        assert (start.job, start.attempt, start.first_iteration) == ("a", attempt + 1, 1)
    assert "Ray node 12" in scheduler.job("a")["note"]
    assert (scheduler.job("b")["attempt"], scheduler.job("b")["restarts"]) == (1, 0)


def test_a_job_whose_nodes_are_drained_ends_after_its_iteration_and_goes_on_elsewhere() -> None:
    scheduler = two_jobs()
    nodes = {"rollout": 1, "train": 1}
    scheduler.call(Nodes, client="ray", num_nodes=nodes, leaving={"a": 1})
    assert [each for each in scheduler.wait(1.0) if isinstance(each, Stop)] == []
    answers = scheduler.call(Completed, job="a", attempt=1, iteration=0)
    assert only(Answer, answers).body["ends"] and only(Stop, answers).job == "a"
    start = only(Start, exited(scheduler, "a", exit_status=0))
    assert (start.job, start.attempt, start.first_iteration) == ("a", 2, 1)
    assert scheduler.job("a")["restarts"] == 0
    assert not only(Answer, scheduler.call(Completed, job="b", attempt=1, iteration=0)).body["ends"]


def test_a_job_whose_nodes_are_drained_leaves_them_though_the_scheduler_was_killed_meanwhile() -> None:
    scheduler = two_jobs()
    scheduler.call(Nodes, client="ray", num_nodes={"rollout": 1, "train": 1}, leaving={"a": 1})
    scheduler.restart(scheduler.now, "clock 1")
    hello(scheduler, 2, a=1, b=1)
    answers = scheduler.call(Completed, job="a", attempt=1, iteration=0)
    assert only(Answer, answers).body["ends"] and only(Stop, answers).job == "a"


def test_a_silent_phase_keeps_its_nodes_until_its_end_is_known() -> None:
    scheduler = Scheduler(ray=RAY)
    hello(scheduler, 1)
    for name in "ab":
        scheduler.submit(name)
    scheduler.request("a")
    scheduler.request("b")
    answers = scheduler.wait(60.0)
    assert {each.job for each in answers if isinstance(each, Stop)} == {"a"}, "once a lease"
    assert not [each for each in answers if isinstance(each, Granted | Start)]
    assert only(Granted, exited(scheduler, "a")).job == "b"


def test_a_runner_that_comes_back_ends_what_it_should_not_run_and_starts_what_it_lacks() -> None:
    scheduler = two_jobs()
    scheduler.restart(scheduler.now, "clock 1")
    answers = hello(scheduler, 2, b=1, c=3)
    assert [(each.job, each.is_lost) for each in answers if isinstance(each, Stop)] == [("c", True)]
    assert (only(Start, answers).job, only(Start, answers).attempt) == ("a", 2)


def test_a_job_that_was_placed_before_its_runner_came_starts_with_it() -> None:
    scheduler = Scheduler()
    assert not [each for each in scheduler.submit("a") if isinstance(each, Start)]
    answers = scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
    assert only(Start, answers).job == "a"


def test_a_job_is_queued_until_the_runner_has_joined_ray_and_says_what_is_waited_for() -> None:
    scheduler = Scheduler(policy="solo", groups={}, ray=RAY)
    answer = only(Answer, scheduler.submit("a", **{**spec_of("a"), "group": None}))
    assert (answer.body["state"], answer.body["why"]) == ("queued", "the scheduler waits for its runner")
    scheduler.call(Awaiting, what="the Ray head at h:1 to answer", client="ray")
    assert scheduler.job("a")["why"] == "the scheduler waits for the Ray head at h:1 to answer"
    assert only(Start, hello(scheduler, 1)).job == "a"
    scheduler.restart(scheduler.now, "clock 1")
    assert only(Answer, scheduler.call(Status)).body["waits_for"] == "its runner"
    assert not [each for each in hello(scheduler, 1, a=1) if isinstance(each, Start | Stop)]


def test_a_job_that_comes_while_the_head_is_away_starts_once_nodes_are_seen_again() -> None:
    scheduler = two_jobs()
    scheduler.call(Awaiting, what="the Ray head at h:1 to answer", client="ray")
    scheduler.submit("c", **{**spec_of("c"), "group": None})
    assert scheduler.job("c")["why"] == "the scheduler waits for the Ray head at h:1 to answer"
    nodes = {"rollout": 3, "train": 3}
    assert only(Start, scheduler.call(Nodes, num_nodes=nodes, leaving={}, client="ray")).job == "c"
    assert only(Answer, scheduler.call(Status)).body["waits_for"] is None
    assert [scheduler.job(name)["attempt"] for name in "ab"] == [1, 1]


def test_a_job_that_ended_while_its_runner_was_away_gives_its_nodes_back() -> None:
    scheduler = two_jobs()
    scheduler.restart(scheduler.now, "clock 1")
    stops = [each for each in hello(scheduler, 2, a=1, b=1, gone=4) if isinstance(each, Stop)]
    assert [(each.job, each.is_lost, each.forget) for each in stops] == [("gone", True, True)]


def test_a_job_that_is_submitted_again_goes_on_counting_its_attempts() -> None:
    scheduler = two_jobs()
    scheduler.call(Cancel, job="a")
    exited(scheduler, "a")
    assert only(Start, scheduler.submit("a", **{**spec_of("a"), "group": None})).attempt == 2
    exited(scheduler, "a")  # it comes again
    assert (scheduler.job("a")["state"], scheduler.job("a")["attempt"]) == ("running", 2)


@pytest.mark.parametrize("is_known", [False, True])
def test_what_runs_of_a_forgotten_job_is_not_taken_for_a_new_one_of_its_name(is_known: bool) -> None:
    scheduler = Scheduler(policy="solo", groups={}, ray=RAY)
    if is_known:
        scheduler.submit("a", **{**spec_of("a"), "group": None})
    answers = hello(scheduler, 2, a=1)
    stop = only(Stop, answers)
    assert (stop.job, stop.attempt, stop.is_lost, stop.forget) == ("a", 1, True, True)
    if not is_known:
        answers = scheduler.submit("a", **{**spec_of("a"), "group": None})
    assert only(Start, answers).attempt == 2


def test_the_note_of_a_crash_has_what_the_runner_knows_of_it() -> None:
    scheduler = two_jobs()
    exited(scheduler, "a", why="train-0 on Ray node 12: no answer for 60 s")
    assert scheduler.job("a")["note"] == (
        "attempt 1 ended with status -9 (SIGKILL): train-0 on Ray node 12: no answer for 60 s"
    )


@pytest.mark.parametrize("is_killed", [False, True])
def test_time_in_which_ray_has_no_room_counts_not_as_the_start_of_a_job(is_killed: bool) -> None:
    scheduler = Scheduler(policy="solo", groups={}, lease_s=1e6, ray=RAY)
    hello(scheduler, 1)
    scheduler.submit("a", **{**spec_of("a"), "group": None, "start_s": 5.0})
    placed: dict[str, Any] = {"job": "a", "attempt": 1, "client": "ray"}
    scheduler.call(Placed, places=["waits for Ray"], runs=False, **placed)
    if is_killed:  # its runner goes on, and says nothing twice
        scheduler.restart(scheduler.now, "clock 1")
        hello(scheduler, 1, a=1)
    assert scheduler.wait(6.0) == []
    scheduler.call(Placed, places=["rollout-0"], runs=True, **placed)
    assert scheduler.wait(4.0) == []
    assert only(Stop, scheduler.wait(2.0)).is_lost


def test_it_is_shown_where_an_attempt_runs_until_the_next_one_starts() -> None:
    scheduler = two_jobs()
    for job, attempt, place in (("a", 1, "rollout-0 on 10.0.0.2"), ("b", 7, "of another attempt")):
        scheduler.call(Placed, job=job, attempt=attempt, places=[place], runs=True, client="ray")
    assert (scheduler.job("a")["places"], scheduler.job("b")["places"]) == (["rollout-0 on 10.0.0.2"], [])
    exited(scheduler, "a", lost="its node died")
    assert scheduler.job("a")["places"] == []


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_move_on_ray_starts_the_job_on_the_other_nodes_behind_its_last_iteration(is_killed: bool) -> None:
    scheduler = Scheduler(policy="lifetime", groups={}, move_pause_s=60.0, lease_s=1e6, ray=RAY)
    hello(scheduler, 2)
    for name in ("a", "x", "b"):
        assert only(Start, scheduler.submit(name, **long_job(name))).job == name
    scheduler.call(Cancel, job="x")
    exited(scheduler, "x")
    [mover] = [name for name in "ab" if scheduler.job(name)["moving_to"] is not None]
    answers = scheduler.call(Completed, job=mover, attempt=1, iteration=0)
    assert only(Answer, answers).body["ends"]
    assert (only(Stop, answers).job, only(Stop, answers).forget) == (mover, True)
    if is_killed:
        scheduler.restart(5.0)
    again = scheduler.call(Completed, job=mover, attempt=1, iteration=0)
    assert only(Answer, again).body["ends"], "asked again"
    start = only(Start, exited(scheduler, mover, exit_status=0))
    assert (start.job, start.attempt, start.first_iteration) == (mover, 2, 1)
    scheduler.wait(3.0)
    scheduler.request(mover, "rollout", 1, attempt=2)
    job = scheduler.job(mover)
    [move] = job["moves"]
    assert (job["restarts"], move["is_warm"], move["pause_s"]) == (0, False, 3.0)


def test_jobs_of_different_placement_share_no_group() -> None:
    scheduler = Scheduler(policy="weave", groups={"main": {}}, lease_s=1e6, ray=RAY)
    hello(scheduler, 4)
    for name, placement in (("a", "pack"), ("b", "spread"), ("c", "pack")):
        scheduler.submit(name, **{**spec_of(name), "group": None, "placement": placement})
    groups = [scheduler.job(name)["group"] for name in "abc"]
    assert groups[0] == groups[2] != groups[1]
    refused = scheduler.submit("d", group=groups[0], placement="strict-pack")
    assert "d: placement strict-pack: the jobs of group" in error_of(refused)


def test_more_ranks_than_devices_are_refused_with_the_numbers() -> None:
    scheduler = Scheduler(groups={}, ray=RAY)
    hello(scheduler, 2)
    spec = {**spec_of("a"), "group": None, "launch": "per-rank"}
    refused = scheduler.submit("a", **{**spec, "num_ranks": 6})
    assert "num_ranks 6 on 2 nodes are 3 on each, and a rollout node has 2 GPUs" in error_of(refused)
    uneven = error_of(scheduler.submit("a", **{**spec, "num_ranks": 3}))
    assert "num_ranks 3 on 2 nodes: launch per-rank starts equally many on each node" in uneven
    assert only(Start, scheduler.submit("a", **{**spec, "num_ranks": 4})).job == "a"


@pytest.mark.parametrize("launch", ["once", "per-node", "per-rank"])
def test_more_ranks_than_devices_of_one_machine_are_refused(launch: str) -> None:
    """All nodes of a job are that machine."""
    scheduler = Scheduler()
    scheduler.call(Hello, client="here", running={}, log_folder="/logs", num_devices=2)
    refused = scheduler.submit("a", **{**spec_of("a"), "launch": launch, "num_ranks": 4})
    said = f"a: num_ranks 4: launch {launch} starts all of them on this machine, which has 2 GPUs; use at"
    assert said in error_of(refused)
    assert only(Start, scheduler.submit("a", **{**spec_of("a"), "launch": launch, "num_ranks": 2})).job == "a"
    scheduler.call(Hello, client="here", running={"a": 1}, log_folder="/logs")
    without_gpus = scheduler.submit("b", **{**spec_of("b"), "launch": launch, "num_ranks": 4})
    assert only(Answer, without_gpus).error is None


@pytest.mark.parametrize(
    ("launch", "num_ranks", "said"),
    [
        ("once", 3, "launch once starts all of them on the first rollout node, which has 2 GPUs"),
        ("per-node", 5, "num_ranks 5 on 2 nodes are 3 on each, and a rollout node has 2 GPUs"),
    ],
)
def test_torchrun_with_more_ranks_than_devices_is_refused(launch: str, num_ranks: int, said: str) -> None:
    scheduler = Scheduler(groups={}, ray=RAY)
    hello(scheduler, 2)
    spec = {**spec_of("a"), "group": None, "launch": launch}
    assert said in error_of(scheduler.submit("a", **{**spec, "num_ranks": num_ranks}))
    fitting = 2 if launch == "once" else 4
    assert only(Start, scheduler.submit("a", **{**spec, "num_ranks": fitting})).job == "a"
