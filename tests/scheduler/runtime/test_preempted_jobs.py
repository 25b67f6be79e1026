"""Jobs under `rose sched serve` that take the places of others at the end of an iteration."""

from pathlib import Path
from typing import Any

import pytest
from full_cluster import pool
from served_cluster import ServedCluster, kill, overlap, wait_until

from rose.config import Settings
from rose.jobs.serve import cache_root
from rose.scheduler.runtime.channel.messages import Cancel

ONE_NODE: dict[str, Any] = {
    "policy": "solo",
    "groups": {},
    "pools": {"rollout": pool("h20", 1), "train": pool("h800", 1)},
    "preemption": {"by_priority": True, "min_run_s": 0},
}


def submit(cluster: ServedCluster, name: str, priority: int, iterations: int) -> dict[str, Any]:
    answer = cluster.submit(name, group=None, priority=priority, iterations=iterations)
    assert answer.error is None, answer.error
    return answer.body


def trained(cluster: ServedCluster, name: str) -> list[int]:
    return [each["iteration"] for each in cluster.phases(name) if each["phase"] == "train"]


@pytest.mark.parametrize("killed", ["nobody", "scheduler"])
@pytest.mark.slow
def test_a_preempted_job_goes_on_after_the_other_and_runs_each_iteration_once(
    tmp_path: Path, killed: str
) -> None:
    with ServedCluster(tmp_path, **ONE_NODE) as cluster:
        copies = cache_root(Settings.from_environment(), cluster.url) / "low"
        with cluster.held(2, "low"):
            assert submit(cluster, "low", 0, 5)["state"] == "running"
            wait_until(lambda: cluster.job("low")["iterations"][0] == 2, "two iterations")
            assert copies.exists()
            assert submit(cluster, "high", 5, 3)["takes_place_of"] == ["low"]
            if killed == "scheduler":
                scheduler = cluster.status()["scheduler_pid"]
                kill(scheduler)
                wait_until(lambda: cluster.status()["scheduler_pid"] != scheduler, "another scheduler")
            said = cluster.command("explain", "--job", "high")
            assert "takes the place of low after its iteration 2" in said.stdout, said.stderr
            status = cluster.command("status").stdout
            assert "gives its place to high after iteration 2: priority 5 over 0" in status
        with cluster.held(0, "high"):
            cluster.wait_state("high", "running")
            low = cluster.job("low")
            assert (low["state"], low["iterations"][0], low["restarts"]) == ("queued", 3, 0)
            wait_until(lambda: not copies.exists(), "its host copies to be freed")
            said = cluster.command("explain", "--job", "low")
            assert "low is queued: " in said.stdout
            assert "preempted by high before iteration 3: priority 5 over 0" in said.stdout
        cluster.wait_state("low", "done")
        assert trained(cluster, "low") == list(range(5)), "each exactly once"
        assert trained(cluster, "high") == list(range(3))
        assert overlap(cluster.phases()) == []
        pids = [each["pid"] for each in cluster.phases("low")]
        assert len(set(pids)) == 2 and pids.count(pids[0]) == 2 * 3
        [preemption] = cluster.job("low")["preemptions"]
        assert (preemption["by"], preemption["iteration"]) == ("high", 3)
        assert cluster.job("low")["restarts"] == 0
        events = cluster.command("events").stdout
        assert all(f'"event": "{kind}"' in events for kind in ("preemption_decided", "preempted"))


@pytest.mark.slow
def test_a_job_goes_on_if_the_other_is_cancelled_while_it_waits(tmp_path: Path) -> None:
    with ServedCluster(tmp_path, **ONE_NODE) as cluster:
        with cluster.held(1, "low"):
            submit(cluster, "low", 0, 4)
            wait_until(lambda: cluster.job("low")["iterations"][0] == 1, "an iteration")
            submit(cluster, "high", 5, 3)
            assert cluster.job("low")["gives_way"]["to"] == "high"
            assert cluster.ask(Cancel, job="high").error is None
            assert cluster.job("low")["gives_way"] is None
        low = cluster.wait_state("low", "done")
        assert trained(cluster, "low") == list(range(4))
        assert (low["attempt"], low["preemptions"]) == (1, [])
        assert len({each["pid"] for each in cluster.phases("low")}) == 1, "the same process"
        assert cluster.phases("high") == []
