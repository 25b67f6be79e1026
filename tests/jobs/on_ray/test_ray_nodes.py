"""Ray nodes that die, come and are drained while jobs run on them, and a head that goes away."""

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import ray
from lending.lending_router import ADMIN_KEY
from lending.sizing import NUM_ASKED, POOLS, lending, lines, submit, wait_nodes
from lib.cluster.ray_rig import RayRig
from served_cluster import PATIENCE_S, wait_until

from rose.jobs.on_ray.groups import GroupNodes
from rose.scheduler.group.model import Phase
from rose.scheduler.runtime.channel.messages import Cancel
from rose.scheduler.runtime.job.spec import PlacementStrategy, RayClusterSpec
from tests.jobs.on_ray.ray_rig import HEADLESS_S, JOB, OnRay, ray_nodes

pytestmark = pytest.mark.slow

FOREVER = 1_000_000


def test_jobs_outlive_nodes_that_die_and_leave_nodes_that_are_drained(rig: RayRig, tmp_path: Path) -> None:
    with OnRay(tmp_path, rig.address) as served:
        for name in "abc":  # each fills a worker
            served.submit(name, placement="strict-pack", iterations=FOREVER)
        wait_until(lambda: all(done(served, name) >= 2 for name in "abc"), served.server.log_tail())

        rig.kill(worker_of(rig, served, "a"))
        wait_until(lambda: served.job("a")["attempt"] == 2, "the death to be noticed")
        others = {name: done(served, name) for name in "bc"}
        wait_until(lambda: all(done(served, name) > others[name] for name in "bc"), "the others to go on")
        waits = "waits for Ray to place rollout-0, train-0 of "
        wait_until(lambda: any(waits in place for place in served.job("a")["places"]), "why a waits")
        kept = done(served, "a")
        rig.add_worker()
        wait_until(lambda: done(served, "a") > kept + 1, "a to go on")
        assert_continuous(served, "a", attempts=2)
        assert {served.job(name)["attempt"] for name in "bc"} == {1}
        assert "died" in served.job("a")["note"]

        rig.add_worker()
        drained = worker_of(rig, served, "b")
        drain(rig, drained)
        wait_until(lambda: served.job("b")["attempt"] == 2, "b to leave")
        kept = done(served, "b")
        wait_until(lambda: done(served, "b") > kept + 1, "b to go on")
        assert ray_nodes(served.job("b")) != {drained.node_id[:8]}
        assert_continuous(served, "b", attempts=2)
        assert served.job("b")["restarts"] == 0
        rig.kill(drained)
        kept = done(served, "c")
        wait_until(lambda: done(served, "c") > kept + 1, "c to go on")
        assert [served.job(name)["attempt"] for name in "abc"] == [2, 2, 1]


def test_a_command_that_runs_on_one_node_starts_again_when_another_node_of_the_job_dies(
    rig: RayRig, tmp_path: Path
) -> None:
    """None of its processes is there, so no actor tells of the node's death."""
    phases = {"rollout": {"seconds": 0.05, "nodes": 2}, "train": {"seconds": 0.05}}
    once = {"launch": "once", "num_ranks": 1, "placement": "strict-spread"}
    with OnRay(tmp_path, rig.address) as served:
        served.submit("wide", phases=phases, iterations=FOREVER, **once)
        wait_until(lambda: done(served, "wide") >= 2, served.server.log_tail())
        beside = served.job("wide")["places"][1]
        [worker] = [each for each in rig.workers if f"Ray node {each.node_id[:8]}" in beside]
        rig.kill(worker)
        rig.add_worker()
        wait_until(lambda: served.job("wide")["attempt"] == 2, "the death to be noticed")
        wait_until(lambda: served.job("wide")["host"] is not None, "its nodes")
        kept = done(served, "wide")
        wait_until(lambda: done(served, "wide") > kept + 1, "it to go on")
        job = served.job("wide")
        assert f"Ray node {worker.node_id[:8]}" in job["note"] and "died" in job["note"]
        assert worker.node_id[:8] not in ray_nodes(job)
        assert_continuous(served, "wide", attempts=2)


def test_a_node_that_a_job_hands_back_is_free_for_other_groups(rig: RayRig) -> None:
    ray.init(address=rig.address, namespace="hand-back", log_to_driver=False)
    try:
        num_gpus = ray.cluster_resources()["GPU"]
        bundle = {"GPU": 1.0, "CPU": 1.0}
        nodes = GroupNodes(RayClusterSpec(rollout=bundle, train=bundle), "hand-back", lifetime=None)

        def seat(job: str, group: str, *names: str, spare: Sequence[str] = ()) -> list[str]:
            until_s = time.monotonic() + PATIENCE_S
            found = nodes.seat(
                job,
                group,
                names,
                PlacementStrategy.PACK,
                lambda: time.monotonic() < until_s,
                lambda spots: None,
                spare,
            )
            assert found is not None
            return [f"{each.ray_node}: {each.node.devices}" for each in found]

        whole = seat(
            "a", "g", "rollout-0", "rollout-1", "rollout-2", "train-0", spare=["rollout-1", "rollout-2"]
        )
        assert len(set(whole)) == 4
        assert nodes.view(()).num_idle == {Phase.ROLLOUT: 0, Phase.TRAIN: 0}
        kept = seat("a", "g", "rollout-0", "rollout-1", "train-0", spare=["rollout-1"])
        assert kept == [whole[0], whole[1], whole[3]], "what it keeps stays where it is"
        wait_until(lambda: ray.available_resources().get("GPU", 0) == num_gpus - 3, "the node to be free")
        assert nodes.view(()).num_idle[Phase.ROLLOUT] == 0
        again = seat(
            "a", "g", "rollout-0", "rollout-1", "rollout-2", "train-0", spare=["rollout-1", "rollout-2"]
        )
        assert [again[0], again[1], again[3]] == kept
        nodes.leave("a")
        wait_until(lambda: ray.available_resources().get("GPU", 0) == num_gpus, "all nodes to be free")
    finally:
        ray.shutdown()


def test_ranks_and_bundles_of_a_job_follow_what_is_lent_to_it(
    rig: RayRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_ROUTER_ADMIN_KEY", ADMIN_KEY)
    with (
        lending(tmp_path) as (router, own),
        OnRay(
            tmp_path,
            rig.address,
            cluster={"pools": POOLS, "router": {"url": router.url}},
            train={"CPU": 1.0},
        ) as served,
    ):
        submit(served, launch="per-rank", num_ranks=NUM_ASKED + 1, placement="spread", max_restarts=0)
        assert wait_nodes(served, NUM_ASKED)["num_ranks"] == NUM_ASKED + 1
        phases = {"rollout": {"seconds": 0.05, "nodes": NUM_ASKED}, "train": {"seconds": 0.05}}
        (tmp_path / "hold-b").touch()
        command = [sys.executable, str(JOB), str(tmp_path)]
        beside = {"command": command, "phases": phases, "num_ranks": NUM_ASKED + 1, "placement": "spread"}
        assert served.submit("b", **beside).body["state"] == "queued", "four of six GPUs are a's"
        last = wait_nodes(served, 1)
        assert (last["num_ranks"], last["attempt"]) == (2, 2)
        # Ray itself places b on what a's bundles had.
        wait_until(lambda: len(served.notes("b", "phase")) == NUM_ASKED + 1, served.server.log_tail())
        assert len(ray_nodes(served.job("b"))) > 1
        served.ask(Cancel, job="b")
        served.wait_state("b", "cancelled")
        router.add(own)
        (tmp_path / "hold-c").touch()
        phases = {"rollout": {"seconds": 0.05}, "train": {"seconds": 1e-5}}
        lent = {"borrow": {"run_id": "run-c", "model": "scripted"}, "slo": 1.01}
        served.submit("c", phases=phases, command=command, placement="spread", **lent)
        wait_until(lambda: served.job("a")["serving_gpus"] == 0, "c to borrow what a had")
        again = wait_nodes(served, NUM_ASKED)
        assert (again["num_ranks"], again["attempt"]) == (NUM_ASKED + 1, 3)
        found = [each["iteration"] for each in lines(served) if each["rank"] == 0]
        assert found == list(range(len(found))), "no iteration is lost, and none runs twice"
        assert served.job("a")["restarts"] == 0
        (tmp_path / "hold-c").unlink()


def test_a_head_that_goes_away_ends_the_command_with_what_to_do(rig: RayRig, tmp_path: Path) -> None:
    with OnRay(tmp_path, rig.address) as served:
        served.submit("a", iterations=FOREVER)
        wait_until(lambda: done(served, "a") >= 1, served.server.log_tail())
        rig.cluster.remove_node(rig.cluster.head_node, allow_graceful=False)
        wait_until(lambda: not served.server.is_alive(), "its end")
        said = [line for line in served.server.log_tail(200).splitlines() if "has not answered for" in line]
        assert (
            len(said) == 1
            and "the Ray head at" in said[0]
            and f"Ray's nodes end after {HEADLESS_S:.0f} s" in said[0]
            and "start Ray and then this command again" in said[0]
        )


def test_a_head_that_comes_back_without_its_state_ends_the_command_with_what_to_do(tmp_path: Path) -> None:
    rig = RayRig(tmp_path, num_workers=2)
    try:
        with OnRay(tmp_path, rig.address) as served:
            served.submit("a", iterations=FOREVER)
            wait_until(lambda: done(served, "a") >= 1, served.server.log_tail())
            rig.stop_head()
            rig.start_head()
            wait_until(lambda: not served.server.is_alive(), "its end")
            assert served.server.exit_status == 1, "Ray has not aborted it"
            assert "was started again without its state" in served.server.log_tail(400)
    finally:
        rig.cluster.shutdown()


def done(served: OnRay, job: str) -> int:
    return int(served.job(job)["iterations"][0])


def worker_of(rig: RayRig, served: OnRay, job: str) -> Any:
    [name] = ray_nodes(served.job(job))
    [worker] = [each for each in rig.workers if each.node_id.startswith(name)]
    return worker


def assert_continuous(served: OnRay, job: str, attempts: int) -> None:
    """No iteration is lost, and only the one that was cut short runs twice."""
    trained = [each for each in served.notes(job, "phase") if each["phase"] == "train" and each["rank"] == 0]
    for attempt in range(2, attempts + 1):
        before = max(each["iteration"] for each in trained if each["attempt"] == attempt - 1)
        first = min(each["iteration"] for each in trained if each["attempt"] == attempt)
        assert before <= first <= before + 1


def drain(rig: RayRig, worker: Any) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", rig.address]
    command += ["--node-id", worker.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    command += ["--reason-message", "maintenance", "--deadline-remaining-seconds", "3600"]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
