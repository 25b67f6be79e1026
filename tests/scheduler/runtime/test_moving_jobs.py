"""Jobs under `rose sched serve` that change their group while they run, whoever is killed meanwhile."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from served_cluster import JOB, ServedCluster, kill, overlap, wait_until

from rose.scheduler.runtime.channel.messages import Cancel

WORST_S = 3600.0
"""What the jobs say of their phases, so that a move pays; they take a hundredth of a second."""


def long_job(folder: Path, name: str) -> dict[str, Any]:
    """Two of these fill a group."""
    command = [sys.executable, str(JOB), str(folder), "0.01", "0.01"]
    phases = {"command": command, "rollout_s": WORST_S, "train_s": WORST_S, "slo": 1.2}
    return {"name": name, "group": None, "iterations": 10_000, **phases}


def hold(cluster: ServedCluster, *jobs: str) -> None:
    for name in jobs:
        (cluster.folder / f"hold-{name}").touch()


def let_go(cluster: ServedCluster, *jobs: str) -> None:
    for name in jobs:
        (cluster.folder / f"hold-{name}").unlink()


def to_be_moved(cluster: ServedCluster) -> str:
    """a beside x, b in a group of its own, all in an iteration; x ends. Who shall move."""
    hold(cluster, "a", "b")
    for name in ("a", "x", "b"):
        assert cluster.submit(**long_job(cluster.folder, name)).error is None
    assert [cluster.job(name)["group"] for name in ("a", "x", "b")] == ["group-1", "group-1", "group-2"]
    wait_until(lambda: [cluster.job(name)["holds"] for name in "ab"] == ["train"] * 2, "both to train")
    assert cluster.ask(Cancel, job="x").error is None
    wait_until(lambda: any(cluster.job(name)["moving_to"] for name in "ab"), "a move")
    [mover] = [name for name in "ab" if cluster.job(name)["moving_to"] is not None]
    return mover


def check(cluster: ServedCluster, mover: str, num_done: int) -> list[dict[str, Any]]:
    """Until all have gone on in the new group; what the mover has run."""
    wait_until(
        lambda: min(cluster.job(name)["iterations"][0] for name in "ab") >= num_done, "iterations of both"
    )
    phases = cluster.phases(mover)
    for name in "ab":
        trained = [each["iteration"] for each in cluster.phases(name) if each["phase"] == "train"]
        assert trained == list(range(len(trained))), "each once, in order"
    together = [each for each in cluster.phases() if each["group"] == phases[-1]["group"]]
    assert overlap([each for each in together if each["job"] in "ab"]) == []
    return phases


@pytest.mark.parametrize("killed", ["nobody", "scheduler", "job"])
@pytest.mark.slow
def test_a_running_job_is_moved_between_two_iterations(tmp_path: Path, killed: str) -> None:
    with ServedCluster(tmp_path, groups={}, policy="lifetime", move_pause_s=1.0) as cluster:
        mover = to_be_moved(cluster)
        old, new = cluster.job(mover)["group"], cluster.job(mover)["moving_to"]
        assert cluster.job(mover)["holds"] == "train", "where it is"
        if killed == "scheduler":
            scheduler = cluster.status()["scheduler_pid"]
            kill(scheduler)
            wait_until(lambda: cluster.status()["scheduler_pid"] != scheduler, "another scheduler")
            assert (cluster.job(mover)["group"], cluster.job(mover)["moving_to"]) == (old, new)
        if killed == "job":
            kill(cluster.phases(mover)[-1]["pid"])
            wait_until(lambda: cluster.job(mover)["group"] == new, "it to start again in the new group")
        let_go(cluster, "a", "b")
        phases = check(cluster, mover, 4)
        assert {each["group"] for each in phases if each["iteration"] >= 1} == {new}
        job = cluster.job(mover)
        [move] = job["moves"]
        assert (move["from"]["group"], move["to"]["group"]) == (old, new)
        assert move["pause_s"] > 0.0 and "moved by lifetime" in move["why"]
        is_warm = killed != "job"
        assert (move["is_warm"], move["iteration"]) == (is_warm, int(is_warm))
        assert job["restarts"] == int(not is_warm)
        assert len({each["pid"] for each in phases}) == (1 if is_warm else 2), "suspended, not started anew"
        assert old not in cluster.status()["groups"], "its nodes are given back"
        assert f"from {old} to {new}" in cluster.command("explain", "--job", mover).stdout
        told = json.loads(cluster.command("explain", "--job", mover, "--json").stdout)
        assert (told["group"], told["moves"]) == (new, [move])
