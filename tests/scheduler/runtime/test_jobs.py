"""Jobs under `rose sched serve`, on both channels: turns, crashes, restarts of every part."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from lib.cluster.redis_server import RedisServer
from served_cluster import JOB, ServedCluster, kill, overlap, wait_until

from rose.node import watcher
from rose.scheduler.runtime.channel.messages import Cancel


def iterations_of(cluster: ServedCluster, job: str, phase: str) -> list[int]:
    return [each["iteration"] for each in cluster.phases(job) if each["phase"] == phase]


def holder_pid(cluster: ServedCluster, job: str) -> int:
    """The pid of a job that has begun an iteration, from its log."""
    wait_until(lambda: cluster.phases(job), f"{job} to run")
    return int(cluster.phases(job)[-1]["pid"])


def holds_rollout(job: dict[str, Any], iteration: int) -> bool:
    """Whether it has the nodes: a test that holds this rollout then knows where the job is."""
    return (job["iterations"][0], job["holds"]) == (iteration, "rollout")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    """One cluster for the tests that break none of its parts, each with a group of its own."""
    groups: dict[str, dict[str, int]] = {name: {} for name in ("crash", "none", "cancel", "slow", "cli")}
    groups["wide"] = {"num_rollout_nodes": 2}
    with ServedCluster(tmp_path_factory.mktemp("shared"), groups=groups) as cluster:
        yield cluster


@pytest.mark.slow
def test_two_jobs_take_turns_on_every_node_and_finish(tmp_path: Path, channel_url: str) -> None:
    with ServedCluster(tmp_path, channel_url) as cluster:
        for name in ("a", "b"):
            assert cluster.submit(name).error is None
        for name in ("a", "b"):
            assert cluster.wait_state(name, "done")["iterations"] == [3, 3]
        assert overlap(cluster.phases()) == []
        for name in ("a", "b"):
            assert iterations_of(cluster, name, "rollout") == [0, 1, 2]
            assert len({each["pid"] for each in cluster.phases(name)}) == 1, "a suspended process is kept"
        assert cluster.status()["groups"]["main"]["holders"] == {}


def test_jobs_on_other_nodes_run_at_the_same_time(shared: ServedCluster) -> None:
    for node, name in enumerate(("wide-a", "wide-b")):
        assert shared.submit(name, group="wide", rollout_nodes=[node], rollout_s=3600.0).error is None
    holders = {"wide-a": "rollout", "wide-b": "rollout"}
    wait_until(lambda: shared.status()["groups"]["wide"]["holders"] == holders, "both rollouts")


@pytest.mark.slow
def test_a_job_that_is_ahead_is_held_back_also_by_the_next_scheduler(tmp_path: Path) -> None:
    """Two nodes, one training pool, no slack: a's rollout now, and its next one would take b's time twice."""
    with ServedCluster(tmp_path, groups={"main": {"num_rollout_nodes": 2}}) as cluster:
        worst = {"rollout_s": 3600.0, "train_s": 3600.0, "slo": 1.001, "iterations": 10_000}
        fast = [sys.executable, str(JOB), str(tmp_path), "0.01", "0.01"]
        assert cluster.submit("a", command=fast, rollout_nodes=[0], **worst).error is None
        wait_until(lambda: cluster.job("a")["iterations"][0] >= 1, "a's first iteration")
        assert cluster.submit("b", rollout_nodes=[1], **worst).error is None

        def is_held_back() -> bool:
            a, b = cluster.job("a"), cluster.job("b")
            return (b["holds"], a["waits_for"], a["behind"]) == ("rollout", "rollout", [])

        wait_until(is_held_back, "a to wait for a free node")
        done, scheduler = cluster.job("a")["iterations"][0], cluster.status()["scheduler_pid"]
        kill(scheduler)
        wait_until(lambda: cluster.status()["scheduler_pid"] != scheduler, "another scheduler")
        assert is_held_back()
        assert cluster.job("a")["iterations"][0] == done
        assert cluster.ask(Cancel, job="b").error is None
        wait_until(lambda: cluster.job("a")["iterations"][0] > done, "a to go on without b")


@pytest.mark.slow
def test_a_killed_holder_starts_again_behind_its_last_iteration(tmp_path: Path) -> None:
    with ServedCluster(tmp_path) as cluster:
        with cluster.held(4, "a"):
            cluster.submit("a", iterations=30)
            cluster.submit("b", iterations=6)
            wait_until(lambda: cluster.job("a")["iterations"][0] >= 2, "a's second iteration")
            done = cluster.job("a")["iterations"][0]
            first_pid = holder_pid(cluster, "a")
            kill(first_pid)
        wait_until(lambda: holder_pid(cluster, "a") != first_pid, "another attempt")
        again = [each for each in cluster.phases("a") if each["pid"] != first_pid]
        assert again[0]["phase"] == "rollout" and again[0]["iteration"] >= done
        assert cluster.job("a")["restarts"] == 1
        assert cluster.wait_state("b", "done")["restarts"] == 0
        assert len({each["pid"] for each in cluster.phases("b")}) == 1
        assert overlap(cluster.phases()) == []


@pytest.mark.slow
def test_jobs_outlive_a_killed_scheduler(tmp_path: Path, channel_url: str) -> None:
    with ServedCluster(tmp_path, channel_url) as cluster:
        with cluster.held(4, "a"):
            for name in ("a", "b"):
                cluster.submit(name, iterations=12)
            wait_until(lambda: cluster.job("a")["iterations"][0] >= 2, "a's second iteration")
            scheduler = cluster.status()["scheduler_pid"]
            kill(scheduler)
        for name in ("a", "b"):
            job = cluster.wait_state(name, "done")
            assert (job["restarts"], job["attempt"]) == (0, 1)
            assert iterations_of(cluster, name, "train") == list(range(12)), "no phase is lost or run twice"
        assert cluster.status()["scheduler_pid"] != scheduler
        assert overlap(cluster.phases()) == []


@pytest.mark.slow
def test_jobs_outlive_a_killed_redis(tmp_path: Path, redis_server: RedisServer) -> None:
    with ServedCluster(tmp_path, redis_server.url) as cluster:
        with cluster.held(4, "a"):
            for name in ("a", "b"):
                cluster.submit(name, iterations=12)
            wait_until(lambda: cluster.job("a")["iterations"][0] >= 2, "a's second iteration")
            kill(redis_server.pid)
            redis_server.start_again()
        for name in ("a", "b"):
            assert cluster.wait_state(name, "done")["restarts"] == 0
            assert iterations_of(cluster, name, "train") == list(range(12))
        assert overlap(cluster.phases()) == []


@pytest.mark.slow
def test_another_serve_goes_on_with_the_jobs_of_a_killed_one(tmp_path: Path) -> None:
    with ServedCluster(tmp_path) as first, first.held(4, "a"):
        first.submit("a", iterations=8)
        wait_until(lambda: first.job("a")["iterations"][0] >= 2, "a's second iteration")
        pids = [holder_pid(first, "a"), first.status()["scheduler_pid"]]
        kill(first.server.pid)
        wait_until(lambda: not any(map(watcher.group_members, pids)), "the watchers to end job and scheduler")
    with ServedCluster(tmp_path) as second:
        job = second.wait_state("a", "done")
        assert job["attempt"] == 2
        assert sorted(set(iterations_of(second, "a", "train"))) == list(range(8))


def test_a_job_that_keeps_crashing_fails_and_says_so(shared: ServedCluster) -> None:
    command = ["sh", "-c", "echo so it goes; exit 7"]
    shared.submit("bad", group="crash", command=command, max_restarts=1)
    job = shared.wait_state("bad", "failed")
    assert "status 7" in job["note"] and job["restarts"] == 1
    assert "so it goes" in Path(job["log"]).read_text()
    assert shared.submit("bad", group="crash", command=["true"]).error is None, "its name is free again"
    wait_until(lambda: "0 of 3 iterations" in shared.job("bad")["note"], "its end")


def test_a_command_that_does_not_exist_fails_the_job_alone(shared: ServedCluster) -> None:
    shared.submit("none", group="none", command=["/no/such/program"])
    job = shared.wait_state("none", "failed")
    assert "can't start ['/no/such/program']" in job["note"] and job["attempt"] == 1, "at once"
    assert "No such file or directory: '/no/such/program'" in Path(job["log"]).read_text()
    assert "No such file or directory: '/no/such/program'" in " ".join(
        shared.command("status").stdout.split()
    )
    shared.submit("nowhere", group="none", folder="/no/such/folder")
    assert "No such file or directory: '/no/such/folder'" in shared.wait_state("nowhere", "failed")["note"]
    shared.submit("some", group="none")
    shared.wait_state("some", "done")


def test_cancelling_ends_the_process_group_and_frees_the_nodes(shared: ServedCluster) -> None:
    shared.submit("long", group="cancel", rollout_s=3600.0)
    wait_until(lambda: shared.job("long")["holds"] == "rollout", "its rollout")
    assert shared.submit("short", group="cancel", slo=1e9).error is None
    shared.ask(Cancel, job="long")
    shared.wait_state("short", "done")
    assert shared.job("long")["state"] == "cancelled"


@pytest.mark.slow
def test_a_stopped_holder_loses_its_permit_after_the_lease(tmp_path: Path) -> None:
    # Longer than the machine may stall: b must keep its own.
    with ServedCluster(tmp_path, lease_s=6.0) as cluster:
        with cluster.held(1, "a"):
            cluster.submit("a", iterations=1000)
            cluster.submit("b", iterations=1000)
            wait_until(lambda: holds_rollout(cluster.job("a"), 1), "a's second rollout")
            pid = holder_pid(cluster, "a")
            os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: cluster.job("a")["restarts"] == 1, "the next attempt")
        assert watcher.group_members(pid) == []
        assert cluster.job("b")["restarts"] == 0
        assert overlap(cluster.phases()) == []


@pytest.mark.slow
def test_a_second_scheduler_on_a_channel_is_refused(tmp_path: Path, channel_url: str) -> None:
    with ServedCluster(tmp_path, channel_url) as first:
        pid = first.status()["scheduler_pid"]
        first.submit("a", rollout_s=3600.0)
        (tmp_path / "second").mkdir()
        second = ServedCluster(tmp_path / "second", channel_url)
        with second.server as server:
            wait_until(lambda: not server.is_alive(), "the second to end")
            said = server.log_tail()
            assert f"{pid}" in said and "already" in said
            assert not first.url.startswith("unix:") or f"started by pid {first.server.pid}" in said
        assert first.status()["scheduler_pid"] == pid
        assert first.job("a")["attempt"] == 1


def test_a_job_waits_for_a_neighbour_that_would_become_too_slow(shared: ServedCluster) -> None:
    shared.submit("tight", group="slow", rollout_s=3600.0, train_s=1.0, slo=1.5)
    taken = shared.submit("tight", group="slow").error
    assert taken is not None and "a job of this name is running" in taken
    slow = shared.submit("other", group="slow", rollout_s=3600.0, train_s=1.0).body
    assert slow["state"] == "queued"
    logs = shared.command("logs", "other")
    assert logs.returncode == 2 and "other is queued and has printed nothing yet: " in logs.stderr
    assert "7200 s" in slow["why"] and "5401.5 s (1.5 x 3601 s alone)" in slow["why"]


def test_the_policy_packs_jobs_that_name_no_group(shared: ServedCluster) -> None:
    with shared.held(1, "free-a", "free-b"):  # so that the second one comes while the first one runs
        for name in ("free-a", "free-b"):
            assert shared.submit(name, group=None, iterations=3).error is None
        assert {shared.job(name)["group"] for name in ("free-a", "free-b")} == {"group-1"}
    for name in ("free-a", "free-b"):
        shared.wait_state(name, "done")
    assert overlap([*shared.phases("free-a"), *shared.phases("free-b")]) == []
    assert "group-1" not in shared.status()["groups"], "its nodes are given back"


def test_the_commands_speak_json_and_refuse_in_one_line(shared: ServedCluster, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(shared.spec("cli", group="cli", rollout_s=3600.0)))
    dry = json.loads(shared.command("submit", str(path), "--dry-run").stdout)
    assert dry["state"] == "would run" and "cli" not in shared.status()["jobs"]
    assert json.loads(shared.command("submit", str(path)).stdout)["state"] == "running"
    refused = shared.command("submit", str(path))
    assert refused.returncode == 2 and refused.stdout == ""
    assert refused.stderr.count("\n") == 1 and "a job of this name is running" in refused.stderr
    assert "rose sched cancel cli" in refused.stderr
    assert json.loads(shared.command("status", "cli", "--json").stdout)["jobs"][0]["name"] == "cli"
    drained = json.loads(shared.command("drain", "train", "--group", "cli").stdout)
    assert drained["still_used_by"] == ["cli"]
    wait_until(lambda: shared.job("cli")["holds"], "its process")
    assert json.loads(shared.command("cancel", "cli").stdout)["job"] == "cli"
    shared.wait_state("cli", "cancelled")
    assert shared.command("logs", "cli", "--follow").returncode == 0
    events = [json.loads(line) for line in shared.command("events").stdout.splitlines()]
    assert [each["event"] for each in events if each["job"] == "cli"] == [
        *("submitted", "placed", "started", "granted", "exited", "cancelled")
    ]


@pytest.mark.slow
def test_a_user_watches_and_orders_the_queue(tmp_path: Path) -> None:
    pools = {
        kind: {"name": kind, "dollars_per_gpu_hour": 1.0, "num_nodes": 1} for kind in ("rollout", "train")
    }
    with ServedCluster(tmp_path, groups={}, policy="solo", pools=pools) as cluster:
        path = tmp_path / "job.yaml"

        def submit(name: str, *flags: str) -> dict[str, Any]:
            path.write_text(yaml.safe_dump(cluster.spec(name, group=None, rollout_s=3600.0)))
            answer: dict[str, Any] = json.loads(cluster.command("submit", str(path), *flags).stdout)
            return answer

        assert submit("a")["state"] == "running"
        assert submit("b")["state"] == "queued"
        assert submit("c", "--priority", "3")["ahead"] == 0
        assert "priority 0, 1 ahead of it" in cluster.command("status").stdout
        explained = cluster.command("explain", "--job", "b").stdout
        assert "b is queued: fits no group, and a new one needs 1 nodes of pool rollout" in explained
        assert json.loads(cluster.command("hold", "c").stdout)["state"] == "held"
        scheduler = cluster.status()["scheduler_pid"]
        kill(scheduler)
        wait_until(lambda: cluster.status()["scheduler_pid"] != scheduler, "another scheduler")
        assert json.loads(cluster.command("cancel", "a").stdout)["job"] == "a"
        cluster.wait_state("b", "running")
        assert json.loads(cluster.command("release", "c").stdout)["state"] == "queued"
        cluster.command("cancel", "b")
        cluster.wait_state("c", "running")
