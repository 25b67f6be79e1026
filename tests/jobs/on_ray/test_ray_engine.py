"""`rose sched serve` on a Ray cluster of several nodes: jobs, their devices, and what is refused."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from served_cluster import PATIENCE_S, kill, wait_until

from rose.node import watcher
from tests.jobs.on_ray.ray_rig import OnRay, RayRig, ray_nodes


def test_a_job_of_two_ranks_on_two_nodes_is_killed_and_comes_back(rig: RayRig, tmp_path: Path) -> None:
    with OnRay(tmp_path, rig.address) as served:
        (tmp_path / "hold-a").touch()
        assert served.submit("a", max_restarts=3).error is None
        wait_until(lambda: len(served.notes("a", "phase")) == 2, f"both ranks; {served.server.log_tail()}")
        first, second = sorted(served.notes("a", "told"), key=lambda each: each["rank"])
        assert first["told"]["WORLD_SIZE"] == second["told"]["WORLD_SIZE"] == "2"
        assert first["told"]["MASTER_PORT"] == second["told"]["MASTER_PORT"]
        assert first["told"]["MASTER_ADDR"] == first["nodes"][0][1]
        assert [name for name, _, _ in second["nodes"]] == ["rollout-0", "train-0"]
        for rank, each in enumerate((first, second)):
            assert [each["told"]["CUDA_VISIBLE_DEVICES"]] == each["nodes"][rank][2]
        assert len(ray_nodes(served.job("a"))) == 2
        kill(second["pid"])
        wait_until(lambda: served.job("a")["attempt"] == 2, "the second attempt")
        assert watcher.group_members(first["pid"]) == [], "the other rank has ended before"
        (tmp_path / "hold-a").unlink()
        assert served.wait_state("a", "done")["iterations"] == [5, 5]
        shown = served.command("logs", "a").stdout
        assert "rollout-0: rank 0 did 4" in shown and "train-0: rank 1 did 4" in shown


def test_what_a_killed_actor_leaves_is_ended_before_the_job_starts_again(rig: RayRig, tmp_path: Path) -> None:
    with OnRay(tmp_path, rig.address) as served:
        (tmp_path / "hold-a").touch()
        served.submit("a", max_restarts=3)
        wait_until(lambda: len(served.notes("a", "phase")) == 2, f"both ranks; {served.server.log_tail()}")
        pid = served.notes("a", "told")[0]["pid"]
        os.kill(pid, signal.SIGSTOP)  # it would not end by itself
        actor = psutil.Process(pid).parent()
        assert actor is not None
        kill(actor.pid)
        wait_until(lambda: served.job("a")["attempt"] == 2, "the second attempt")
        assert watcher.group_members(pid) == []
        (tmp_path / "hold-a").unlink()
        served.wait_state("a", "done")


def test_two_groups_on_one_host_share_no_device_and_code_is_sent(rig: RayRig, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").symlink_to(Path(__file__).with_name("ranked_job.py"))
    with OnRay(tmp_path, rig.address) as served:
        environment = {"working_dir": str(code), "env_vars": {"EXTRA": "told"}}
        command = ["python", "train.py", str(tmp_path)]
        for name in "abc":
            (tmp_path / f"hold-{name}").touch()
            fields: dict[str, Any] = {"command": command, "runtime_env": environment, "placement": "spread"}
            assert served.submit(name, **fields).error is None
        wait_until(
            lambda: all(len(served.notes(name, "told")) == 2 for name in "abc"), served.server.log_tail()
        )
        used = [
            (place.partition("Ray node ")[2][:8], place.rpartition("GPU ")[2])
            for name in "abc"
            for place in served.job(name)["places"]
        ]
        assert len(set(used)) == 6, used
        told = served.notes("a", "told")
        assert {each["extra"] for each in told} == {"told"}
        assert all(Path(each["folder"]) != code for each in told)
        assert served.submit("d").body["state"] == "queued", "all devices are in use"


@pytest.mark.parametrize(
    ("ray", "problem"),
    [
        ({"rollout": {"GPU": 16}}, "ray.rollout: a rollout node takes GPU 16, and none of the 4 Ray nodes"),
        ({"address": "127.0.0.1:1"}, "ray.address 127.0.0.1:1: no Ray cluster there"),
    ],
)
def test_a_cluster_that_can_hold_no_node_is_refused(
    ray: dict[str, Any], problem: str, rig: RayRig, tmp_path: Path
) -> None:
    assert problem in refusal(OnRay(tmp_path, **{"address": rig.address, **ray}))


def test_a_second_scheduler_on_one_ray_cluster_is_refused(rig: RayRig, tmp_path: Path) -> None:
    second = tmp_path / "second"
    second.mkdir()
    with OnRay(tmp_path, rig.address) as served:
        served.status()
        said = refusal(OnRay(second, rig.address))
        assert f"has a scheduler already (host {os.uname().nodename}, pid {served.server.pid}" in said


def refusal(served: OnRay) -> str:
    """What `rose sched serve` says when it refuses to start: one line."""
    run = subprocess.run(
        served.argv,
        env={**os.environ, **served.environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert run.returncode == 2, run.stderr
    return run.stderr.splitlines()[-1]
