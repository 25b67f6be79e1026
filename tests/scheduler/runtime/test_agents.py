"""Jobs on several hosts: agents that come, fall silent and come back."""

from pathlib import Path
from typing import Any

import pytest
from lib.cluster.redis_server import RedisServer
from lone_scheduler import Scheduler, long_job, only, spec_of
from served_cluster import ServedCluster, kill, wait_until

from rose.node import watcher
from rose.scheduler.runtime.channel.messages import (
    Alive,
    Answer,
    Cancel,
    Completed,
    Dead,
    Exited,
    Granted,
    Hello,
    Release,
    SchedulerMessage,
    Start,
    Status,
    Stop,
)

LEASE_S = 20.0


def hello(scheduler: Scheduler, host: str, num_nodes: int = 1, **running: int) -> list[SchedulerMessage]:
    nodes = {"rollout": num_nodes, "train": num_nodes}
    return scheduler.call(
        Hello, client=host, host=host, num_nodes=nodes, running=running, log_folder=f"/{host}/logs"
    )


def silence_of(scheduler: Scheduler, host: str, *others: str) -> list[SchedulerMessage]:
    """The others' agents are heard, this one's is not; what everybody is told when its lease ends."""
    answers: list[SchedulerMessage] = []
    for _ in range(int(LEASE_S) + 1):
        for other in others:
            scheduler.call(Alive, client=other, host=other)
        answers += scheduler.wait(1.0)
    reply = only(Answer, scheduler.call(Status))
    assert [name for name, each in reply.body["hosts"].items() if not each["is_alive"]] == [host]
    return answers


def two_hosts(**cluster: Any) -> Scheduler:
    scheduler = Scheduler(policy="solo", groups={}, host_lease_s=LEASE_S, lease_s=1e6, **cluster)
    hello(scheduler, "one")
    assert only(Start, scheduler.submit("a", **{**spec_of("a"), "group": None})).job == "a"
    hello(scheduler, "two")
    assert only(Start, scheduler.submit("b", **{**spec_of("b"), "group": None})).job == "b"
    assert [scheduler.job(name)["host"] for name in "ab"] == ["one", "two"]
    return scheduler


def test_the_jobs_of_a_silent_host_wait_for_nodes_and_no_other_job_notices() -> None:
    scheduler = two_hosts()
    scheduler.call(Completed, job="a", attempt=1, iteration=0)
    answers = silence_of(scheduler, "one", "two")
    assert not [each for each in answers if isinstance(each, Start)], "two has no node left"
    assert scheduler.job("a")["host"] is None and scheduler.job("b")["attempt"] == 1
    scheduler.restart(scheduler.now, "clock 1")
    start = only(Start, hello(scheduler, "three"))
    assert (start.job, start.first_iteration) == ("a", 1)
    assert scheduler.job("a")["host"] == "three" and scheduler.job("b")["restarts"] == 0


def split_over_two_hosts() -> Scheduler:
    """a and b take turns on a rollout node of one, where both run, and on a training node of two."""
    scheduler = Scheduler(policy="weave", groups={}, host_lease_s=LEASE_S, lease_s=1e6)
    for host, nodes in (("one", (1, 0)), ("two", (0, 1)), ("three", (0, 1))):
        offer = {"rollout": nodes[0], "train": nodes[1]}
        scheduler.call(Hello, client=host, host=host, num_nodes=offer, running={}, log_folder="/logs")
    phases = {"rollout": {"seconds": 100.0}, "train": {"seconds": 100.0}}
    for name in "ab":
        scheduler.submit(name, group=None, slo=2.5, phases=phases)
    assert [scheduler.job(name)["host"] for name in "ab"] == ["one", "one"]
    return scheduler


def test_nodes_of_a_living_host_stay_with_a_process_until_it_is_known_to_have_ended() -> None:
    scheduler = split_over_two_hosts()
    assert only(Granted, scheduler.request("a")).job == "a"
    assert scheduler.request("b") == []
    lost = train_host(scheduler)
    answers = silence_of(scheduler, lost, "one", *({"two", "three"} - {lost}))
    assert {(each.job, each.attempt) for each in answers if isinstance(each, Stop)} == {("a", 1), ("b", 1)}
    assert not [each for each in answers if isinstance(each, Granted | Start)]
    late = scheduler.request("b")
    assert "attempt 1 has to end: host" in str(only(Answer, late).error)
    for name in "ba":
        answers = scheduler.call(Exited, job=name, attempt=1, exit_status=-9, client="one")
        assert only(Start, answers).job == name and not [e for e in answers if isinstance(e, Granted)]
    assert only(Granted, scheduler.request("b", attempt=2)).job == "b"
    assert [scheduler.job(name)["host"] for name in "ab"] == ["one", "one"]


@pytest.mark.parametrize("returns", [True, False])
def test_nodes_elsewhere_stay_with_the_processes_of_a_silent_host(returns: bool) -> None:
    """Until the host returns and has ended them, or somebody knows that it is off."""
    scheduler = split_over_two_hosts()
    grant = only(Granted, scheduler.request("a"))
    fields = {"job": "a", "attempt": 1, "phase": "rollout", "epoch": grant.epoch}
    scheduler.call(Release, **fields, client="a")
    assert only(Granted, scheduler.request("a", "train")).phase == "train"
    assert "host one is alive" in str(only(Answer, scheduler.call(Dead, host="one")).error)
    answers = silence_of(scheduler, "one", "two", "three")
    nodes = {"rollout": 1, "train": 0}
    scheduler.restart(scheduler.now, "clock 1")
    hello = {"num_nodes": nodes, "running": {}, "log_folder": "/logs"}
    answers += scheduler.call(Hello, client="four", host="four", **hello)
    assert not [each for each in answers if isinstance(each, Granted | Start)]
    assert scheduler.job("a")["holds"] == "train", "its process may still train on the other host"
    if returns:
        answers = scheduler.call(Hello, client="one", host="one", **{**hello, "running": {"a": 1, "b": 1}})
        assert {each.job for each in answers if isinstance(each, Stop)} == {"a", "b"}
        answers = [
            each
            for name in "ab"
            for each in scheduler.call(Exited, job=name, attempt=1, exit_status=-9, client="one")
        ]
    else:
        answers = scheduler.call(Dead, host="one")
        assert [each.body["freed"] for each in answers if isinstance(each, Answer)] == [["a", "b"]]
    assert {(each.job, each.attempt) for each in answers if isinstance(each, Start)} == {("a", 2), ("b", 2)}
    assert scheduler.job("a")["holds"] is None


def test_a_silent_phase_on_an_agents_host_keeps_its_nodes_until_its_end_is_known() -> None:
    scheduler = split_over_two_hosts()
    scheduler.cluster = scheduler.cluster.model_copy(update={"lease_s": 5.0, "host_lease_s": 1e6})
    scheduler.restart(scheduler.now, "clock 1")
    scheduler.request("a")
    scheduler.request("b")
    answers = scheduler.wait(30.0)
    assert {each.job for each in answers if isinstance(each, Stop)} == {"a"}, "once a lease"
    assert not [each for each in answers if isinstance(each, Granted | Start)]
    answers = scheduler.call(Exited, job="a", attempt=1, exit_status=-9, client="one")
    assert only(Granted, answers).job == "b"


def train_host(scheduler: Scheduler) -> str:
    return str(scheduler.control._state.hosts.homes["group-1"]["train-0"])


def test_a_waiting_job_gets_the_nodes_of_one_that_ends() -> None:
    scheduler = two_hosts()
    silence_of(scheduler, "one", "two")
    scheduler.call(Cancel, job="b")
    scheduler.call(Exited, job="b", attempt=1, exit_status=-15, client="two")
    answers = scheduler.wait(0.5)
    assert only(Start, answers).job == "a" and scheduler.job("a")["host"] == "two"


def test_a_job_gets_the_nodes_that_its_group_does_not_need_any_more() -> None:
    scheduler = Scheduler(groups={}, host_lease_s=LEASE_S, lease_s=1e6)
    offer = {"rollout": 2, "train": 1}
    scheduler.call(Hello, client="one", host="one", num_nodes=offer, running={}, log_folder="/logs")
    phases = {"rollout": {"seconds": 3600.0}, "train": {"seconds": 1.0, "memory_gb": 1}}
    for name in "ab":
        scheduler.submit(name, **{**long_job(name, 1.01), "phases": phases})
    assert [scheduler.job(name)["group"] for name in "ab"] == ["group-1", "group-1"]
    hello(scheduler, "two")
    silence_of(scheduler, "one", "two")
    assert [scheduler.job(name)["host"] for name in "ab"] == [None, None], "two has one rollout node"
    scheduler.call(Cancel, job="b")
    assert only(Start, scheduler.wait(0.5)).job == "a"
    assert scheduler.job("a")["host"] == "two"


@pytest.mark.parametrize("others", [["three"], []])
def test_a_job_that_lost_a_host_keeps_its_nodes_when_that_of_its_process_falls_silent(
    others: list[str],
) -> None:
    scheduler = Scheduler(policy="solo", groups={}, host_lease_s=LEASE_S, lease_s=1e6)
    for host, nodes in (("one", (1, 0)), ("two", (1, 0)), ("three", (0, 1))):
        offer = {"rollout": nodes[0], "train": nodes[1]}
        scheduler.call(Hello, client=host, host=host, num_nodes=offer, running={}, log_folder="/logs")
    phases = {"rollout": {"seconds": 1.0, "nodes": 2}, "train": {"seconds": 1.0}}
    scheduler.submit("a", group=None, phases=phases)
    assert scheduler.job("a")["host"] == "one"
    silence_of(scheduler, "two", "one", "three")
    for _ in range(int(LEASE_S) + 1):
        for other in others:
            scheduler.call(Alive, client=other, host=other)
        assert not [each for each in scheduler.wait(1.0) if isinstance(each, Start)]
    answers = hello(scheduler, "four", 2)
    assert not [each for each in answers if isinstance(each, Start)]
    job = scheduler.job("a")
    assert (job["host"], job["attempt"], job["restarts"]) == ("one", 1, 0)
    assert only(Start, scheduler.call(Dead, host="one")).attempt == 2


def test_a_host_that_comes_back_ends_what_it_should_not_run() -> None:
    scheduler = two_hosts()
    silence_of(scheduler, "one", "two")
    late = scheduler.call(Completed, job="a", attempt=1, iteration=0)
    assert "attempt 1 was replaced" in str(only(Answer, late).error)
    replies = scheduler.call(Alive, client="one", host="one")
    assert [each.seq for each in replies if isinstance(each, Answer)][-1] == 0, "it is to say hello"
    answers = hello(scheduler, "one", a=1)
    stop = only(Stop, answers)
    assert (stop.job, stop.attempt, stop.is_lost) == ("a", 1, True)
    start = only(Start, answers)
    assert (start.job, start.first_iteration) == ("a", 0) and start.attempt > 1


def test_a_host_without_room_is_not_given_jobs() -> None:
    scheduler = two_hosts()
    scheduler.submit("c", **{**spec_of("c"), "group": None})
    assert scheduler.job("c")["state"] == "queued" and "0 of 2 free" in scheduler.job("c")["why"]
    scheduler.call(Cancel, job="c")
    phases = {"rollout": {"seconds": 1.0, "nodes": 2}, "train": {"seconds": 1.0}}
    hello(scheduler, "three")
    hello(scheduler, "four")
    assert only(Start, scheduler.submit("d", **{**spec_of("d"), "group": None, "phases": phases}))


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_move_to_another_host_starts_the_job_there_behind_its_last_iteration(is_killed: bool) -> None:
    scheduler = Scheduler(policy="lifetime", groups={}, move_pause_s=60.0, lease_s=1e6)
    for host in ("one", "two"):
        hello(scheduler, host)
    for name in ("a", "x", "b"):
        assert only(Start, scheduler.submit(name, **long_job(name))).job == name
    scheduler.call(Cancel, job="x")
    scheduler.call(Exited, job="x", attempt=1, exit_status=-15, client="one")
    [mover] = [name for name in "ab" if scheduler.job(name)["moving_to"] is not None]
    old, [new] = scheduler.job(mover)["host"], {"one", "two"} - {scheduler.job(mover)["host"]}
    answers = scheduler.call(Completed, job=mover, attempt=1, iteration=0)
    assert only(Answer, answers).body["ends"] and only(Stop, answers).job == mover
    if is_killed:
        scheduler.restart(5.0)
    again = scheduler.call(Completed, job=mover, attempt=1, iteration=0)
    assert only(Answer, again).body["ends"], "asked again"
    answers = scheduler.call(Exited, job=mover, attempt=1, exit_status=0, client=old)
    start = only(Start, answers)
    assert (start.job, start.attempt, start.first_iteration) == (mover, 2, 1)
    scheduler.wait(3.0)
    scheduler.request(mover, "rollout", 1, attempt=2)
    job = scheduler.job(mover)
    assert (job["host"], job["restarts"]) == (new, 0)
    [move] = job["moves"]
    assert (move["is_warm"], move["pause_s"]) == (False, 3.0)


def test_a_killed_agents_job_resumes_on_another_host(tmp_path: Path, redis_server: RedisServer) -> None:
    # The host's lease alone is to end: that of the job's permit would start it again on the dead host, where
    # the scheduler stood still in between.
    leases: dict[str, Any] = {"host_lease_s": 15.0, "lease_s": 1e6}
    with ServedCluster(
        tmp_path, redis_server.url, has_agents=True, groups={}, policy="solo", **leases
    ) as cluster:
        assert cluster.submit("a", group=None, iterations=100_000).error is None
        assert cluster.job("a")["host"] is None, "no agent yet"
        with cluster.agent("one", 1) as one:
            wait_until(lambda: cluster.job("a")["host"] == "one", "the first agent")
            with cluster.agent("two", 2):
                wait_until(lambda: len(cluster.status()["hosts"]) == 2, "the second agent")
                assert cluster.submit("b", group=None, iterations=100_000).error is None
                wait_until(lambda: min(cluster.job(name)["iterations"][0] for name in "ab") >= 2, "both")
                done, pid = cluster.job("a")["iterations"][0], cluster.phases("a")[-1]["pid"]
                kill(one.pid)
                wait_until(lambda: watcher.group_members(pid) == [], "its job's end")
                wait_until(lambda: cluster.job("a")["host"] == "two", "the lease's end")
                wait_until(lambda: cluster.job("a")["iterations"][0] >= done + 3, "a to go on")
                again = [each for each in cluster.phases("a") if each["pid"] != pid]
                assert again[0]["phase"] == "rollout" and again[0]["iteration"] >= done
                trained = [each["iteration"] for each in again if each["phase"] == "train"]
                assert trained == list(range(trained[0], trained[0] + len(trained)))
                assert (cluster.job("a")["restarts"], cluster.job("b")["restarts"]) == (1, 0)
                assert len({each["pid"] for each in cluster.phases("b")}) == 1
                assert "one fell silent" in cluster.job("a")["note"]
