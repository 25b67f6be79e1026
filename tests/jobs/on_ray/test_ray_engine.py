"""`rose sched serve` on a Ray cluster of several nodes: jobs, their devices, and what is refused."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from lib.cluster.ray_rig import RayRig
from served_cluster import PATIENCE_S, kill, wait_until

from rose.node import watcher
from tests.jobs.on_ray.ray_rig import OnRay, ray_nodes

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shared(rig: RayRig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnRay]:
    with OnRay(tmp_path_factory.mktemp("served"), rig.address) as served:
        yield served


@pytest.fixture
def served(shared: OnRay) -> Iterator[OnRay]:
    """One server for all tests: no two tests may name a job alike."""
    try:
        yield shared
    finally:
        shared.end_jobs()


def test_a_job_of_two_ranks_on_two_nodes_is_killed_and_comes_back(served: OnRay) -> None:
    (served.folder / "hold-a").touch()
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
    (served.folder / "hold-a").unlink()
    assert served.wait_state("a", "done")["iterations"] == [5, 5]
    shown = served.command("logs", "a").stdout
    assert "rollout-0: rank 0 did 4" in shown and "train-0: rank 1 did 4" in shown


def test_what_a_killed_actor_leaves_is_ended_before_the_job_starts_again(served: OnRay) -> None:
    (served.folder / "hold-left").touch()
    served.submit("left", max_restarts=3)
    wait_until(lambda: len(served.notes("left", "phase")) == 2, f"both ranks; {served.server.log_tail()}")
    pid = served.notes("left", "told")[0]["pid"]
    os.kill(pid, signal.SIGSTOP)  # it would not end by itself
    actor = psutil.Process(pid).parent()
    assert actor is not None
    kill(actor.pid)
    wait_until(lambda: served.job("left")["attempt"] == 2, "the second attempt")
    assert watcher.group_members(pid) == []
    (served.folder / "hold-left").unlink()
    served.wait_state("left", "done")


def test_two_groups_on_one_host_share_no_device_and_code_is_sent(served: OnRay) -> None:
    names = "xyz"
    code = served.folder / "code"
    code.mkdir()
    (code / "train.py").symlink_to(Path(__file__).with_name("ranked_job.py"))
    environment = {"working_dir": str(code), "env_vars": {"EXTRA": "told"}}
    command = ["python", "train.py", str(served.folder)]
    for name in names:
        (served.folder / f"hold-{name}").touch()
        fields: dict[str, Any] = {"command": command, "runtime_env": environment, "placement": "spread"}
        assert served.submit(name, **fields).error is None
    wait_until(lambda: all(len(served.notes(name, "told")) == 2 for name in names), served.server.log_tail())
    used = [
        (place.partition("Ray node ")[2][:8], place.rpartition("GPU ")[2])
        for name in names
        for place in served.job(name)["places"]
    ]
    assert len(set(used)) == 6, used
    told = served.notes("x", "told")
    assert {each["extra"] for each in told} == {"told"}
    assert all(Path(each["folder"]) != code for each in told)
    assert served.submit("w").body["state"] == "queued", "all devices are in use"


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


def test_a_second_scheduler_on_one_ray_cluster_is_refused(rig: RayRig, served: OnRay, tmp_path: Path) -> None:
    wait_until(lambda: served.status()["runner"] is not None, served.server.log_tail())
    said = refusal(OnRay(tmp_path, rig.address))
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
