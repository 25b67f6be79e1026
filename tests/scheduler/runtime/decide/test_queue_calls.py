"""Jobs that wait for a place, with a clock of the test's own."""

from typing import Any

import pytest
from full_cluster import Full, pool
from lone_scheduler import Scheduler, error_of, hello, long_job, only, spec_of

from rose.scheduler.dashboard.view import state_view
from rose.scheduler.runtime.channel.messages import (
    Answer,
    Cancel,
    Completed,
    Drain,
    Exited,
    Granted,
    Hello,
    HoldJob,
    Nodes,
    Overview,
    ReleaseJob,
    Start,
    Submit,
)
from rose.scheduler.runtime.decide.records import MAX_OVERTAKEN
from rose.scheduler.runtime.decide.state import NUM_ENDED


def test_a_job_without_room_is_queued_with_the_reason_and_starts_when_a_node_comes_free() -> None:
    full = Full()
    assert full.submit("a")["state"] == "running"
    queued = full.submit("b")
    assert (queued["state"], queued["ahead"]) == ("queued", 0)
    assert "a new one needs 1 nodes of pool h20, 0 of 1 free" in queued["why"]
    assert full.submit("c")["ahead"] == 1
    job = full.scheduler.job("b")
    assert (job["state"], job["group"], job["why"]) == ("queued", "", queued["why"])
    assert full.end("a") == ["b"]
    assert full.scheduler.job("c")["ahead"] == 0


def test_a_higher_priority_starts_first_and_equal_ones_in_the_order_of_submission() -> None:
    full = Full()
    for name, priority in (("a", 0), ("b", 0), ("c", 5), ("d", 5), ("e", -1)):
        full.submit(name, priority=priority)
    order = []
    running = "a"
    for _ in range(4):
        [running] = full.end(running)
        order.append(running)
    assert order == ["c", "d", "b", "e"]


def test_a_job_that_fits_does_not_wait_behind_one_that_does_not() -> None:
    full = Full(num_nodes=2)
    full.submit("a")
    assert full.submit("big", num_nodes=2)["state"] == "queued"
    assert full.submit("small")["state"] == "running"
    assert full.scheduler.job("big")["num_overtaken"] == 1


def test_small_jobs_overtake_a_large_one_only_so_often() -> None:
    full = Full(num_nodes=2)
    full.submit("first")
    full.submit("big", num_nodes=2)
    for number in range(MAX_OVERTAKEN):
        assert full.submit(f"small-{number}")["state"] == "running"
        full.end(f"small-{number}")
    late = full.submit("late")
    assert (
        late["state"] == "queued" and f"behind big, which {MAX_OVERTAKEN} jobs have overtaken" in late["why"]
    )
    full.scheduler.restart(0.0)
    assert full.end("first") == ["big"], "the scheduler's restart has forgotten nothing"
    assert full.end("big") == ["late"]


def test_nodes_that_a_group_no_longer_uses_do_not_make_its_pool_larger() -> None:
    pools = {"rollout": pool("h20", 2), "train": pool("h800", 20), "max_residents": 2}
    full = Full(policy="lifetime-static", pools=pools)

    def submit(name: str, num_nodes: int = 1) -> str:
        phases = {"rollout": {"seconds": 1.0, "nodes": num_nodes}, "train": {"seconds": 1.0, "nodes": 1}}
        answer = only(Answer, full.scheduler.submit(name, group=None, phases=phases))
        return f"{answer.body['state']} {answer.body.get('group')}"

    assert submit("large", 2) == submit("beside") == "running group-1"
    full.end("large")
    assert submit("x") == "running group-1", "on one node; the group's other one is free"
    assert submit("y") == submit("z") == "running group-2"
    assert submit("u") == "queued None", "both nodes have two jobs"
    full.scheduler.control._state.groups.check_integrity(full.scheduler.now)


def test_a_job_is_overtaken_only_by_those_that_could_use_its_nodes() -> None:
    full = Full(groups={"main": {}, "other": {}}, pools={"max_residents": 1})
    full.submit("first", group="main")
    assert full.submit("waits", group="main")["state"] == "queued"
    for number in range(2):
        full.submit(f"job-{number}", group="other")
        full.end(f"job-{number}")
    assert full.scheduler.job("waits")["num_overtaken"] == 0
    full.submit("anywhere")
    assert full.scheduler.job("waits")["num_overtaken"] == 1


@pytest.mark.parametrize("is_overtaken_first", [False, True])
def test_a_job_whose_group_is_drained_keeps_nobody_waiting(is_overtaken_first: bool) -> None:
    full = Full(groups={"main": {}}, pools={"max_residents": 1})
    full.submit("first", group="main")
    if not is_overtaken_first:
        full.scheduler.call(Drain, group="main", node="train")
    full.submit("stuck", group="main")
    for number in range(MAX_OVERTAKEN):
        assert full.submit(f"job-{number}")["state"] == "running"
        full.end(f"job-{number}")
    if is_overtaken_first:
        assert full.submit("late")["state"] == "queued"
        full.scheduler.call(Drain, group="main", node="train")
    assert full.submit("last")["state"] == "running"
    full.scheduler.call(Drain, group="main", node="train", undo=True)
    assert "behind stuck" in full.submit("later")["why"]


def test_a_job_whose_nodes_are_gone_keeps_nobody_waiting_until_they_are_back() -> None:
    full = Full()
    full.scheduler = Scheduler(policy="solo", groups={}, lease_s=1e6)
    hello(full.scheduler, 2)
    full.scheduler.call(Nodes, client="ray", num_nodes={"rollout": 1, "train": 1})
    full.submit("big", num_nodes=2)
    for number in range(MAX_OVERTAKEN + 1):
        assert full.submit(f"job-{number}")["state"] == "running"
        if number < MAX_OVERTAKEN:
            full.end(f"job-{number}")
    full.scheduler.call(Nodes, client="ray", num_nodes={"rollout": 2, "train": 2})
    assert "behind big" in full.submit("late")["why"]
    assert full.end(f"job-{MAX_OVERTAKEN}") == ["big"]


def test_a_job_that_needs_the_nodes_of_a_drained_group_keeps_nobody_waiting_until_they_are_free() -> None:
    full = Full(num_nodes=2)
    full.submit("first")
    full.scheduler.call(Drain, group="group-1", node="train")
    full.submit("big", num_nodes=2)
    for number in range(MAX_OVERTAKEN + 1):
        assert full.submit(f"job-{number}")["state"] == "running"
        if number < MAX_OVERTAKEN:
            full.end(f"job-{number}")
    assert full.end("first") == []
    assert "behind big" in full.submit("late")["why"]
    assert full.end(f"job-{MAX_OVERTAKEN}") == ["big"]


def test_a_held_job_lets_others_by_and_keeps_its_turn() -> None:
    full = Full()
    for name in ("a", "b", "c", "d"):
        full.submit(name)
    assert only(Answer, full.scheduler.call(HoldJob, job="b")).body["state"] == "held"
    assert full.end("a") == ["c"]
    assert only(Answer, full.scheduler.call(ReleaseJob, job="b")).body["state"] == "queued"
    assert full.end("c") == ["b"]
    assert "d is" not in full.scheduler.job("d")["why"]
    assert "b is running: only a job that is queued" in error_of(full.scheduler.call(HoldJob, job="b"))
    assert "no job 'x'" in error_of(full.scheduler.call(ReleaseJob, job="x"))


def test_a_queued_job_is_cancelled_at_once() -> None:
    full = Full()
    for name in ("a", "b", "c"):
        full.submit(name)
    assert only(Answer, full.scheduler.call(Cancel, job="b")).body["state"] == "cancelled"
    assert full.end("a") == ["c"]
    assert full.submit("b")["state"] == "queued", "the name is free again"


@pytest.mark.parametrize("now", [0.0, 1e9])
def test_the_queue_survives_the_scheduler(now: float) -> None:
    full = Full()
    for name, priority in (("a", 0), ("b", 0), ("c", 1), ("d", 0)):
        full.submit(name, priority=priority)
    full.scheduler.call(HoldJob, job="b")
    full.scheduler.restart(now)
    assert full.states() == {"a": "running", "b": "held", "c": "queued", "d": "queued"}
    assert full.end("a") == ["c"]
    assert full.end("c") == ["d"]


def test_a_job_that_could_never_run_is_refused_with_the_numbers() -> None:
    full = Full(num_nodes=2, groups={"main": {}})
    phases = {"rollout": {"seconds": 1.0, "nodes": 3}, "train": {"seconds": 1.0}}
    refused = full.scheduler.submit("a", group=None, phases=phases)
    assert "rollout needs 3 nodes, but pool h20 has 2" in error_of(refused)
    memory = {"rollout": {"seconds": 1.0}, "train": {"seconds": 1.0, "memory_gb": 3000}}
    assert "keeps 3000 GB" in error_of(full.scheduler.submit("a", group="main", phases=memory))
    assert "a" not in full.states()


def test_a_job_that_wants_more_nodes_than_all_hosts_offer_is_refused() -> None:
    scheduler = Scheduler(policy="solo", groups={})
    hello(scheduler, 2)
    phases = {"rollout": {"seconds": 1.0, "nodes": 3}, "train": {"seconds": 1.0}}
    error = error_of(scheduler.submit("a", **{**spec_of("a"), "group": None, "phases": phases}))
    assert "rollout needs 3 nodes, but all hosts together offer 2" in error
    scheduler.call(Nodes, client="ray", num_nodes={"rollout": 1, "train": 1})
    phases["rollout"]["nodes"] = 2
    reply = only(Answer, scheduler.submit("a", **{**spec_of("a"), "group": None, "phases": phases}))
    assert reply.body["state"] == "queued", "nodes that are gone may come back"


def test_a_node_that_comes_starts_what_is_queued() -> None:
    scheduler = Scheduler(policy="solo", groups={})
    hello(scheduler, 1)
    for name in ("a", "b"):
        scheduler.submit(name, **{**spec_of(name), "group": None})
    assert scheduler.job("b")["state"] == "queued"
    answers = scheduler.call(Nodes, client="ray", num_nodes={"rollout": 2, "train": 2})
    assert only(Start, answers).job == "b"


def test_a_drained_node_that_returns_starts_what_is_queued() -> None:
    full = Full(groups={"main": {}}, pools={})
    full.scheduler.call(Drain, group="main", node="train")
    assert full.submit("a", group="main")["state"] == "queued"
    answers = full.scheduler.call(Drain, group="main", node="train", undo=True)
    assert only(Start, answers).job == "a"


def banked(name: str, phase_s: float) -> dict[str, Any]:
    phases = {kind: {"seconds": phase_s} for kind in ("rollout", "train")}
    return {"name": name, "phases": phases, "slo": 1.5, "slo_kind": "lifetime", "iterations": 100}


def test_what_a_job_has_saved_of_its_lifetimes_slo_lets_another_in_beside_it() -> None:
    """The certificate allows what the policy allows, also in the next scheduler and on the dashboard."""
    scheduler = Scheduler(policy="lifetime-static", groups={})
    scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
    scheduler.submit("a", group=None, **banked("a", 100.0))
    early = only(Answer, scheduler.submit("early", group=None, **banked("early", 180.0))).body
    assert early["group"] == "group-2", "a cycle of 360 s is more than 1.5 x 200 s"
    scheduler.call(Cancel, job="early")
    scheduler.call(Exited, job="early", attempt=1, exit_status=-15, client="runner")
    for iteration in range(60):
        scheduler.now += 200.0
        scheduler.call(Completed, job="a", attempt=1, iteration=iteration)
    late = only(Answer, scheduler.submit("late", group=None, **banked("late", 180.0))).body
    assert late["group"] == "group-1" and "direct packing" in late["why"]
    scheduler.restart(scheduler.now, "clock 1")
    assert only(Granted, scheduler.request("a", iteration=60)).job == "a"
    facts = only(Answer, scheduler.call(Overview)).body
    [group] = state_view(facts, [])["groups"]
    assert group["problem"] is None and group["cycle_s"] == 360.0


def test_a_job_that_is_about_to_leave_keeps_nobody_out_by_what_it_was_not_promised() -> None:
    scheduler = Scheduler(policy="lifetime-static", groups={})
    scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
    scheduler.submit("a", group=None, **banked("a", 100.0))
    for iteration in range(60):
        scheduler.now += 200.0
        scheduler.call(Completed, job="a", attempt=1, iteration=iteration)
    scheduler.submit("b", group=None, **banked("b", 180.0))
    scheduler.control._state.groups.leave("a", "group-1")
    late = only(Answer, scheduler.submit("late", group="group-1", **{**banked("late", 1.0), "slo": 200.0}))
    assert late.body["state"] == "running", late.body["why"]


@pytest.mark.parametrize(("num_done", "lost_s", "late_s"), [(60, 6300.0, 180.0), (0, 20_000.0, 120.0)])
def test_time_without_a_process_uses_up_what_a_job_has_saved(
    num_done: int, lost_s: float, late_s: float
) -> None:
    scheduler = Scheduler(policy="lifetime-static", groups={})
    scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
    scheduler.submit("a", group=None, **banked("a", 100.0))
    for iteration in range(num_done):
        scheduler.now += 200.0
        scheduler.call(Completed, job="a", attempt=1, iteration=iteration)
    scheduler.now += lost_s
    scheduler.call(Exited, job="a", attempt=1, exit_status=1, client="runner")
    late = only(Answer, scheduler.submit("late", group=None, **banked("late", late_s))).body
    assert late["group"] == "group-2" and "isolated provisioning" in late["why"]


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_job_inherits_nothing_from_an_earlier_one_of_its_name(is_restarted: bool) -> None:
    scheduler = Scheduler()
    scheduler.call(Hello, client="runner", running={}, log_folder="/logs")
    scheduler.submit("a", group="main", **banked("a", 100.0))
    for iteration in range(60):
        scheduler.now += 200.0
        scheduler.call(Completed, job="a", attempt=1, iteration=iteration)
    scheduler.call(Cancel, job="a")
    scheduler.call(Exited, job="a", attempt=1, exit_status=-15, client="runner")
    scheduler.submit("b", group="main", **{**banked("b", 180.0), "slo": 2.0})
    if is_restarted:
        scheduler.restart(scheduler.now, "clock 1")
    again = only(Answer, scheduler.submit("a", group="main", **banked("a", 100.0))).body
    assert again["state"] == "queued" and "its SLO is 300 s" in again["why"]


def test_status_shows_all_jobs_that_are_not_over_and_the_last_of_those_that_are() -> None:
    full = Full(num_nodes=2)
    full.submit("first")
    for number in range(NUM_ENDED + 2):
        full.submit(f"job-{number}")
        full.end(f"job-{number}")
    full.scheduler.restart(0.0)
    names = list(full.states())
    assert names[:2] == ["first", "job-2"] and len(names) == NUM_ENDED + 1
    assert full.scheduler.job("job-0")["state"] == "cancelled", "one that is asked for by its name"


def test_a_dry_run_says_that_the_job_would_be_queued() -> None:
    full = Full()
    full.submit("a")
    rows = dict(full.scheduler.rows)
    spec = {**spec_of("b"), "group": None}
    reply = only(Answer, full.scheduler.call(Submit, spec=spec, dry_run=True))
    assert (reply.body["state"], reply.body["ahead"]) == ("would be queued", 0)
    assert full.scheduler.rows == rows


def test_a_new_group_has_no_drained_nodes_of_an_earlier_one_of_its_name() -> None:
    scheduler = Scheduler(groups={})
    scheduler.call(Hello, client="runner", host="local", running={}, log_folder="/logs")
    for name in ("early", "later"):
        scheduler.call(Submit, spec=long_job(name, slo=4.0), client="cli")
        assert scheduler.job(name)["group"] == "group-1"
        if name == "early":
            scheduler.call(Drain, group="group-1", node="train")
            scheduler.call(Cancel, job="early")
            scheduler.call(Exited, client="runner", job="early", attempt=1, exit_status=0)
            assert list(scheduler.control.groups) == []
    scheduler.restart(2000.0)
    scheduler.call(Submit, spec=long_job("beside", slo=4.0), client="cli")
    assert scheduler.job("beside")["group"] == "group-1"
