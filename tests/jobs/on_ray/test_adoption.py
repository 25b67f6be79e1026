"""`rose sched serve` on Ray is killed and started again: jobs go on, and what no job owns is ended."""

import socket
from pathlib import Path

import psutil
import pytest
from lib.cluster.ray_rig import RayRig
from served_cluster import wait_until

from rose.jobs.on_ray.leftovers import identity
from tests.jobs.on_ray.ray_rig import OnRay

pytestmark = pytest.mark.slow


def test_jobs_go_on_when_the_scheduler_is_killed_and_the_next_one_has_them(
    rig: RayRig, tmp_path: Path
) -> None:
    with OnRay(tmp_path, rig.address) as served:
        for name in "ab":
            (tmp_path / f"hold-{name}").touch()
            served.submit(name, max_restarts=0)
        wait_until(
            lambda: all(len(served.notes(name, "phase")) == 2 for name in "ab"), served.server.log_tail()
        )
        pids = {name: sorted(each["pid"] for each in served.notes(name, "told")) for name in "ab"}
        places = {name: served.job(name)["places"] for name in "ab"}
        served.kill()
        (tmp_path / "hold-a").unlink()  # its phase ends while nobody schedules
        served.start_again()
        job = served.wait_state("a", "done")
        assert (job["attempt"], job["restarts"], job["iterations"]) == (1, 0, [5, 5])
        assert {each["pid"] for each in served.notes("a", "phase")} == set(pids["a"])
        shown = served.command("logs", "a").stdout
        assert "rollout-0: rank 0 did 0" in shown and "train-0: rank 1 did 4" in shown

        job = served.job("b")
        assert (job["attempt"], job["holds"], job["places"]) == (1, "rollout", places["b"])
        assert all(psutil.pid_exists(pid) for pid in pids["b"])
        served.kill()
        for path in (tmp_path / "ch").glob("state.db*"):
            path.unlink()
        served.start_again()
        wait_until(lambda: not any(map(psutil.pid_exists, pids["b"])), "the end of what no job owns")
        wait_until(
            lambda: served.status()["runner"]["num_nodes"] == {"rollout": 3, "train": 3},
            "its devices to be free",
        )


def test_a_part_that_hangs_is_named_and_the_job_starts_again(rig: RayRig, tmp_path: Path) -> None:
    with OnRay(tmp_path, rig.address, hung_s=10) as served:
        (tmp_path / "hold-a").touch()
        served.submit("a", max_restarts=1)
        wait_until(lambda: len(served.notes("a", "phase")) == 2, served.server.log_tail())
        [first] = [each["pid"] for each in served.notes("a", "told") if each["rank"] == 0]
        actor = psutil.Process(first).parent()
        assert actor is not None
        actor.suspend()
        wait_until(
            lambda: (
                "waits for rollout-0 on Ray node" in served.job("a")["places"][0]
                or served.job("a")["attempt"] == 2
            ),
            "the part to be named",
        )
        wait_until(lambda: served.job("a")["attempt"] == 2, "the second attempt")
        assert "rollout-0 on Ray node" in served.job("a")["note"]
        assert "no answer for 10 s" in served.job("a")["note"]
        wait_until(lambda: not psutil.pid_exists(first), "the end of the first attempt")
        (tmp_path / "hold-a").unlink()
        assert served.wait_state("a", "done")["iterations"] == [5, 5]


def test_a_part_that_hangs_without_a_scheduler_has_ended_before_its_job_starts_again(
    rig: RayRig, tmp_path: Path
) -> None:
    with OnRay(tmp_path, rig.address, hung_s=10) as served:
        (tmp_path / "hold-a").touch()
        served.submit("a", max_restarts=0)
        wait_until(lambda: len(served.notes("a", "phase")) == 2, served.server.log_tail())
        pids = [each["pid"] for each in served.notes("a", "told")]
        actor = psutil.Process(pids[0]).parent()
        assert actor is not None
        actor.suspend()
        served.kill()
        served.start_again()
        wait_until(lambda: served.job("a")["attempt"] == 2, "the second attempt")
        assert [identity(pid) for pid in (*pids, actor.pid)] == ["", "", ""]
        assert served.job("a")["note"] == "a part of it was lost with its scheduler"
        (tmp_path / "hold-a").unlink()
        assert served.wait_state("a", "done")["iterations"] == [5, 5]


def test_the_scheduler_answers_while_the_ray_head_does_not(tmp_path: Path) -> None:
    head = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{head.getsockname()[1]}"
    with OnRay(tmp_path, address) as served, head:
        answer = served.submit("a")
        assert answer.error is None and answer.body["state"] == "queued"
        said = f"the scheduler waits for the Ray head at {address} to answer"
        wait_until(lambda: served.job("a")["why"] == said, served.server.log_tail())
        assert said in served.command("status").stdout
