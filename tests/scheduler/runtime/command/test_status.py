"""The table that `rose sched status` prints."""

from typing import Any

from rose.scheduler.runtime.command.status import earliest_line, status_lines

JOB: dict[str, Any] = {
    "name": "math-7b",
    "state": "running",
    "is_over": False,
    "host": "local",
    "group": "group-1",
    "iterations": [3, 500],
    "restarts": 0,
    "num_ranks": 1,
    "ranks_holding": [],
    "ranks_waiting": [],
    "ranks_unheard": [],
    "holds": None,
    "waits_for": None,
    "behind": [],
    "progress": None,
    "moving_to": None,
    "moves": [],
    "takes_place_of": [],
    "gives_way": None,
    "preemptions": [],
    "note": "",
    "places": [],
    "serving_gpus": None,
    "serving_gpu_s": 0.0,
    "serving_dollars": 0.0,
}


def test_a_job_takes_one_line_that_says_what_it_does() -> None:
    jobs = [
        {**JOB, "holds": "rollout", "progress": [12, 64]},
        {**JOB, "name": "code-32b", "waits_for": "train", "behind": ["math-7b"]},
        {**JOB, "name": "x", "host": None},
        {**JOB, "name": "y", "num_ranks": 3, "ranks_unheard": [0, 2]},
        {**JOB, "name": "old", "state": "done", "is_over": True, "iterations": [500, 500]},
    ]
    assert status_lines(jobs, 80) == [
        "JOB       STATE    GROUP    ITERATIONS  NOW",
        "math-7b   running  group-1  3 of 500    runs rollout, 12 of 64 responses",
        "code-32b  running  group-1  3 of 500    waits for train nodes, held by math-7b",
        "x         running  group-1  3 of 500    waits for a runner",
        "y         running  group-1  3 of 500    waits for ranks 0, 2 of 3 to start",
        "old       done     group-1  500 of 500",
    ]


def test_ranks_that_others_wait_for_are_told_by_those_that_came() -> None:
    four = {**JOB, "num_ranks": 4}
    jobs = [
        {**four, "holds": "train", "ranks_holding": [1]},
        {**four, "waits_for": "train", "ranks_waiting": [0, 2]},
        {**four, "waits_for": "train", "ranks_waiting": [0, 1, 2, 3]},
        {**four, "holds": "rollout", "ranks_holding": [0, 1, 2, 3]},
    ]
    assert [line.split("  ")[-1] for line in status_lines(jobs, 80)[1:]] == [
        "runs train, rank 1 of 4 still in it",
        "ranks 0, 2 of 4 waiting for the others",
        "waits for train nodes, not yet due",
        "runs rollout",
    ]


def test_what_went_wrong_and_every_move_stand_below_the_job() -> None:
    ends = {"from": {"group": "group-2"}, "to": {"group": "group-1"}}
    moves = [{**ends, "pause_s": 2.125}, {**ends, "pause_s": None}]
    seen = {"restarts": 2, "places": ["train-0 on b"], "note": "lease ran out"}
    job = {**JOB, **seen, "moves": moves, "moving_to": "main"}
    assert [line.strip() for line in status_lines([job], 80)[2:]] == [
        "started again 2 times",
        "train-0 on b",
        "moved from group-2 to group-1 (paused 2.1 s)",
        "moved from group-2 to group-1 (on its way)",
        "moves to main after this iteration",
        "lease ran out",
    ]


def test_the_table_fits_80_columns_whatever_the_names() -> None:
    job = {
        **JOB,
        "name": "n" * 64,
        "group": "g" * 64,
        "state": "cancelling",
        "waits_for": "rollout",
        "behind": ["b" * 20, "c" * 20],
        "note": f"attempt 4 ended with status 127: can't start ['{'p' * 90}']",
    }
    lines = status_lines([job], 80)
    assert max(map(len, lines)) <= 80
    assert "nnn…" in lines[1], "a name that is cut says so"


def test_without_jobs_it_says_how_to_submit_one() -> None:
    assert status_lines([], 80) == ["no jobs; submit one with: rose sched submit JOB.yaml"]


def test_the_earliest_start_is_said_in_hours_and_minutes() -> None:
    assert (
        earliest_line({"in_s": 30.0, "after": "a"}) == "it could start in 1 min at the earliest, when a ends"
    )
    assert "in 2 h 1 min at" in earliest_line({"in_s": 7201.0, "after": "a"})
    assert "not known" in earliest_line(None)


def test_who_gives_its_place_to_whom_stands_below_the_jobs() -> None:
    queued = {**JOB, "state": "queued", "group": "", "priority": 0, "ahead": 1, "why": "no node is free"}
    gives_way = {"to": "new", "why": "priority 5 over 0", "not_before_s": 0.0}
    before = {"by": "new", "iteration": 3, "why": "priority 5 over 0", "waited_s": None}
    victim = {"job": "math-7b", "iteration": 3, "not_before_s": 12.2}
    jobs = [
        {**JOB, "gives_way": gives_way},
        {**JOB, "state": "preempting", "gives_way": gives_way},
        {**queued, "preemptions": [before]},
        {**JOB, "preemptions": [{**before, "waited_s": 90.4}]},
        {**queued, "name": "new", "takes_place_of": [victim]},
    ]
    assert [line.strip() for line in status_lines(jobs, 120) if line.startswith("  ")] == [
        "gives its place to new after iteration 3: priority 5 over 0",
        "gives its place to new now: priority 5 over 0",
        "preempted by new before iteration 3: priority 5 over 0",
        "no node is free",
        "preempted by new before iteration 3, waited 90 s: priority 5 over 0",
        "takes the place of math-7b after its iteration 3 or a later one, in 13 s at the earliest",
        "no node is free",
    ]
    assert "ends, and goes back to the queue" in status_lines(jobs, 120)[3]
    assert "when a gives its place away" in earliest_line({"in_s": 1, "after": "a", "is_preempted": True})
