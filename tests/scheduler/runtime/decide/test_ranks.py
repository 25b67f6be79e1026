"""Jobs of several processes: one permit a phase for all ranks, and a name for each rank that is missing."""

from typing import Any

import pytest
from lone_scheduler import LEASE_S, Scheduler, error_of, only

from rose.scheduler.runtime.channel.messages import (
    Answer,
    Completed,
    Exited,
    Granted,
    Heartbeat,
    Hello,
    Release,
    Report,
    SchedulerMessage,
    Start,
    Stop,
)


@pytest.fixture
def scheduler() -> Scheduler:
    """With jobs a and b of two ranks each."""
    made = Scheduler()
    made.call(Hello, client="runner", running={}, log_folder="/logs")
    for name in ("a", "b"):
        made.submit(name, num_ranks=2)
    return made


def grants(answers: list[SchedulerMessage]) -> list[Granted]:
    return [each for each in answers if isinstance(each, Granted)]


def both_ask(scheduler: Scheduler, job: str, phase: str = "rollout", **fields: Any) -> list[Granted]:
    assert grants(scheduler.request(job, phase, **fields)) == []
    return grants(scheduler.request(job, phase, rank=1, **fields))


def release(scheduler: Scheduler, grant: Granted, rank: int) -> list[Granted]:
    answers = scheduler.call(
        Release, job=grant.job, attempt=grant.attempt, phase=grant.phase, epoch=grant.epoch, rank=rank
    )
    assert only(Answer, answers).error is None
    return grants(answers)


def beat(scheduler: Scheduler, grant: Granted, rank: int) -> None:
    beaten: dict[str, Any] = {
        "job": grant.job,
        "attempt": grant.attempt,
        "phase": grant.phase,
        "epoch": grant.epoch,
    }
    assert only(Answer, scheduler.call(Heartbeat, **beaten, rank=rank)).error is None


def test_all_ranks_get_one_permit_and_the_last_release_ends_it(scheduler: Scheduler) -> None:
    first, second = both_ask(scheduler, "a")
    assert first.epoch == second.epoch and first.seq != second.seq
    assert both_ask(scheduler, "b") == []
    assert release(scheduler, first, rank=0) == []
    assert scheduler.request("a", "train") == [], "rank 1 is still in its rollout"
    assert scheduler.job("a")["ranks_holding"] == [1]
    assert release(scheduler, first, rank=0) == [], "a call that arrives twice is one rank's"
    assert {each.job for each in release(scheduler, second, rank=1)} == {"b"}
    assert {each.phase for each in grants(scheduler.request("a", "train", rank=1))} == {"train"}


def test_what_ranks_have_asked_and_released_survives_the_scheduler(scheduler: Scheduler) -> None:
    grant, _ = both_ask(scheduler, "a")
    release(scheduler, grant, rank=1)
    assert both_ask(scheduler, "b") == []
    scheduler.restart(scheduler.now)
    assert scheduler.job("a")["ranks_holding"] == [0]
    assert [each.job for each in release(scheduler, grant, rank=0)] == ["b", "b"]
    scheduler.request("a", "train", rank=1)
    scheduler.restart(scheduler.now)
    assert len(grants(scheduler.request("a", "train"))) == 2


def test_a_silent_rank_ends_the_attempt_and_is_named(scheduler: Scheduler) -> None:
    grant, _ = both_ask(scheduler, "a")
    told: list[SchedulerMessage] = []
    for _ in range(6):
        beat(scheduler, grant, rank=0)
        told += scheduler.wait(LEASE_S / 4)
    assert only(Stop, told).job == "a"
    answers = scheduler.call(Exited, job="a", attempt=1, exit_status=-9, client="runner")
    assert only(Start, answers).attempt == 2
    assert scheduler.job("a")["note"].endswith("rank 1 fell silent in rollout of iteration 0")


@pytest.mark.parametrize("is_killed", [False, True])
def test_an_attempt_of_which_a_rank_calls_no_phase_is_ended(is_killed: bool) -> None:
    scheduler = Scheduler()
    scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
    scheduler.submit("a", num_ranks=2, start_s=20.0, max_restarts=1)
    for attempt in (1, 2):
        assert scheduler.job("a")["ranks_unheard"] == [0, 1]
        scheduler.wait(8.0)
        scheduler.request("a", rank=1, attempt=attempt)
        if is_killed:
            scheduler.restart(scheduler.now)
        assert scheduler.job("a")["ranks_unheard"] == [0]
        stops = [each for each in scheduler.wait(22.0) if isinstance(each, Stop)]
        assert {(each.job, each.attempt, each.is_lost) for each in stops} == {("a", attempt, True)}
        assert "start hung: rank 0 called no phase in 20 s (start_s)" in scheduler.job("a")["note"]
        scheduler.call(Exited, job="a", attempt=attempt, exit_status=-9, client="runner")
    job = scheduler.job("a")
    assert job["state"] == "failed" and "rank 0 called no phase" in job["note"]


def test_a_start_that_ends_while_the_scheduler_is_away_has_not_hung() -> None:
    scheduler = Scheduler()
    scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
    scheduler.submit("a", start_s=20.0)
    scheduler.now += 30.0  # as when the channel was gone: the call is on its way
    assert not [each for each in scheduler.wait(1.0) if isinstance(each, Stop)]
    assert only(Granted, scheduler.request("a")).job == "a"


def test_an_attempt_of_which_all_ranks_have_called_a_phase_has_started() -> None:
    scheduler = Scheduler()
    scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
    scheduler.submit("a", num_ranks=2, start_s=5.0)
    grant, _ = both_ask(scheduler, "a")
    assert scheduler.job("a")["ranks_unheard"] == []
    for _ in range(6):
        beat(scheduler, grant, rank=0)
        beat(scheduler, grant, rank=1)
        assert not [each for each in scheduler.wait(2.0) if isinstance(each, Stop)]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_rank_that_hangs_between_two_phases_ends_the_attempt_and_is_named(is_killed: bool) -> None:
    scheduler = Scheduler()
    scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
    outside = {"outside": {"after_rollout_s": 4.0}}
    scheduler.submit("a", num_ranks=2, hung_s=20.0, max_restarts=0, **outside)
    for grant, rank in zip(both_ask(scheduler, "a"), (0, 1), strict=True):
        release(scheduler, grant, rank)
    scheduler.wait(8.0)
    scheduler.request("a", "train", rank=1)
    if is_killed:
        scheduler.restart(scheduler.now)
    assert not [each for each in scheduler.wait(23.0) if isinstance(each, Stop)], "24 s after the last call"
    assert only(Stop, scheduler.wait(2.0)).is_lost
    said = "hung: rank 0 has not called for 20 s (hung_s), and is in no phase"
    assert scheduler.job("a")["note"] == said
    scheduler.call(Exited, job="a", attempt=1, exit_status=-9, client="runner")
    job = scheduler.job("a")
    assert job["state"] == "failed" and said in job["note"]


def test_ranks_in_phases_that_report_or_waiting_for_them_have_not_hung() -> None:
    scheduler = Scheduler()
    scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
    for name in ("a", "b"):
        scheduler.submit(name, hung_s=5.0, start_s=5.0)
    [grant] = grants(scheduler.request("a"))
    scheduler.request("b")
    for done in range(8):
        beat(scheduler, grant, rank=0)
        told: dict[str, Any] = {"phase": "rollout", "num_done": done, "num_total": 9}
        assert only(Answer, scheduler.call(Report, job="a", attempt=1, **told)).error is None
        assert not [each for each in scheduler.wait(2.0) if isinstance(each, Stop)]


def beats(scheduler: Scheduler, grant: Granted, ranks: tuple[int, ...], seconds: float) -> list[Stop]:
    """The ranks' heartbeats go on, as they do if the threads that compute hang."""
    told: list[SchedulerMessage] = []
    for _ in range(int(seconds / 2)):
        for rank in ranks:
            beat(scheduler, grant, rank)
        told += scheduler.wait(2.0)
    return [each for each in told if isinstance(each, Stop)]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_rank_that_hangs_in_its_first_phase_ends_the_attempt_though_its_heartbeats_go_on(
    is_killed: bool,
) -> None:
    scheduler = Scheduler()
    scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
    scheduler.submit("a", num_ranks=2, hung_s=6.0, start_s=30.0, max_restarts=0)
    grant, _ = both_ask(scheduler, "a")
    release(scheduler, grant, rank=0)
    if is_killed:
        scheduler.restart(scheduler.now)
    assert beats(scheduler, grant, (1,), 30.0) == [], "a first phase may take the time of a start"
    [stop] = beats(scheduler, grant, (1,), 2.0)
    assert (stop.job, stop.attempt, stop.is_lost) == ("a", 1, True)
    said = (
        "hung: rank 1 is in rollout of iteration 0, and has reported nothing for 30 s (start_s) more than "
        "the 1 s of its file"
    )
    assert scheduler.job("a")["note"] == said
    scheduler.call(Exited, job="a", attempt=1, exit_status=-9, client="runner")
    job = scheduler.job("a")
    assert job["state"] == "failed" and said in job["note"]


def test_a_later_phase_has_hung_after_a_shorter_time_than_the_first() -> None:
    scheduler = Scheduler()
    scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
    scheduler.submit("a", hung_s=6.0, start_s=30.0, max_restarts=1)
    [first] = grants(scheduler.request("a"))
    release(scheduler, first, rank=0)
    [second] = grants(scheduler.request("a", "train"))
    assert beats(scheduler, second, (0,), 6.0) == []
    assert len(beats(scheduler, second, (0,), 2.0)) == 1
    assert "its process is in train of iteration 0" in scheduler.job("a")["note"]
    scheduler.call(Exited, job="a", attempt=1, exit_status=-9, client="runner")
    [again] = grants(scheduler.request("a", attempt=2))
    assert beats(scheduler, again, (0,), 30.0) == [], "the next attempt has a first phase as well"


def test_a_job_that_saves_for_long_after_its_last_iteration_is_named_and_not_ended() -> None:
    scheduler = Scheduler()
    scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
    scheduler.submit("a", hung_s=6.0, iterations=1)
    for phase in ("rollout", "train"):
        [grant] = grants(scheduler.request("a", phase))
        release(scheduler, grant, rank=0)
    scheduler.call(Completed, job="a", attempt=1, iteration=0)
    assert not [each for each in scheduler.wait(60.0) if isinstance(each, Stop)]
    assert scheduler.job("a")["note"] == (
        "all iterations are complete, and its processes still run after 6 s (hung_s); rose sched cancel ends "
        "them"
    )
    scheduler.call(Exited, job="a", attempt=1, exit_status=0, client="runner")
    job = scheduler.job("a")
    assert job["state"] == "done" and job["note"] == ""


def test_a_rank_that_others_wait_for_is_named_after_a_lease(scheduler: Scheduler) -> None:
    scheduler.request("a", rank=1)
    assert scheduler.job("a")["ranks_waiting"] == [1]
    scheduler.wait(LEASE_S / 2)
    assert scheduler.job("a")["note"] == ""
    scheduler.wait(LEASE_S)
    assert scheduler.job("a")["note"] == "others wait: rank 0 has not come to rollout of iteration 0"
    grant = grants(scheduler.request("a"))[0]
    assert scheduler.job("a")["note"] == "", "it has come"
    release(scheduler, grant, rank=0)
    scheduler.restart(scheduler.now)
    for _ in range(6):
        beat(scheduler, grant, rank=1)
        scheduler.wait(LEASE_S / 4)
    assert scheduler.job("a")["note"] == "others wait: rank 1 is still in rollout of iteration 0"
    release(scheduler, grant, rank=1)
    assert scheduler.job("a")["note"] == ""
    scheduler.request("a", "train")
    scheduler.wait(2 * LEASE_S)
    assert scheduler.job("a")["note"] == "others wait: rank 1 has not come to train of iteration 0"
    scheduler.call(Exited, job="a", attempt=1, exit_status=1, client="runner")
    note = scheduler.job("a")["note"]
    assert note == "attempt 1 ended with status 1; others wait: rank 1 has not come to train of iteration 0"


def test_nothing_of_an_attempt_counts_for_the_next(scheduler: Scheduler) -> None:
    scheduler.request("a", rank=1)
    scheduler.call(Exited, job="a", attempt=1, exit_status=1, client="runner")
    assert scheduler.request("a", attempt=2) == [], "rank 1 of this attempt has not asked"
    assert len(grants(scheduler.request("a", attempt=2, rank=1))) == 2


def test_an_iteration_is_complete_when_all_ranks_say_so(scheduler: Scheduler) -> None:
    done: dict[str, Any] = {"job": "a", "attempt": 1, "iteration": 0}
    assert scheduler.call(Completed, **done, rank=1) == []
    assert scheduler.job("a")["iterations"][0] == 0
    answers = scheduler.call(Completed, **done, rank=0)
    assert [each.error for each in answers if isinstance(each, Answer)] == [None, None]
    assert scheduler.job("a")["iterations"][0] == 1
    again = only(Answer, scheduler.call(Completed, **done, rank=1))
    assert again.body["group"] == "main", "asked again, each rank hears the same"


def test_ranks_that_part_and_unknown_ranks_are_refused(scheduler: Scheduler) -> None:
    scheduler.request("a", "rollout", iteration=1)
    said = error_of(scheduler.request("a", "train", iteration=0, rank=1))
    assert said == (
        "rank 1 asks for train of iteration 0, rank 0 for rollout of iteration 1: all ranks must enter the "
        "same phases in the same order"
    )
    assert "no rank 2: the attempt has 2 ranks" in error_of(scheduler.request("a", rank=2))
