"""Jobs whose rollouts borrow serving GPUs: `rose sched serve`, a router and jobs, each in its own process."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lending.lending_router import ADMIN_KEY, Router, lent_worker
from served_cluster import ServedCluster, kill, wait_until

from rose.scheduler.runtime.channel.messages import Cancel
from tests.commands import rose
from tests.scheduler.rollout.scripted_worker import expected_tokens

JOB = Path(__file__).parents[1] / "borrowing_job.py"
BORROW = {"run_id": "run-math", "model": "scripted", "max_serving_gpus": 1}


@pytest.fixture(params=[True], ids=["keeps-state"])
def router(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Router]:
    monkeypatch.setenv("ROSE_ROUTER_ADMIN_KEY", ADMIN_KEY)
    with lent_worker() as worker:
        router = Router(tmp_path, worker.url, keeps_state=request.param)
        try:
            yield router
        finally:
            router.process.stop(0.0)


def lending_cluster(folder: Path, router: Router) -> ServedCluster:
    return ServedCluster(folder, pools={"serving_gpus": 2}, router={"url": router.url})


@pytest.mark.slow
def test_the_turns_of_a_job_reach_a_lent_gpu_with_the_jobs_own_weights(
    tmp_path: Path, router: Router
) -> None:
    with lending_cluster(tmp_path, router) as cluster:
        command, hold = [sys.executable, str(JOB), str(tmp_path)], tmp_path / "hold-turns"
        hold.touch()
        assert cluster.submit("math", command=command, borrow=BORROW, iterations=2).error is None
        wait_until(lambda: router.knows("math"), "the job's declaration")
        assert cluster.job("math")["serving_gpus"] == 1
        known = router.jobs()["math"]
        assert {name: known[name] for name in BORROW} == BORROW
        hold.unlink()
        done = cluster.wait_state("math", "done")
        turns = [json.loads(line) for line in (tmp_path / "turns.jsonl").read_text().splitlines()]
        assert [turn["iteration"] for turn in turns] == [0, 0, 1, 1]
        assert all(turn["tokens"] == expected_tokens([1, 2, 3], 5) for turn in turns)
        spans = [span for turn in turns for span in turn.get("spans", ())]
        assert {span["weight_version"] for span in spans} == {"run-math/1"}
        assert done["restarts"] == 0
        wait_until(lambda: "math" not in router.jobs(), "the router to forget the job")
        assert cluster.job("math")["serving_gpus"] is None
        assert cluster.job("math")["serving_gpu_s"] > 0
        assert "GPU hours of serving GPUs" in cluster.command("status").stdout
        assert cluster.status()["router"] == {"url": router.url, "problem": None}


@pytest.mark.slow
@pytest.mark.parametrize("router", [False], indirect=True, ids=["forgets"])
def test_a_router_that_is_away_stops_no_job_and_is_told_everything_when_it_is_back(
    tmp_path: Path, router: Router
) -> None:
    with lending_cluster(tmp_path, router) as cluster, cluster.held(0, "long"):
        cluster.submit("long", borrow={"run_id": "run-long"})
        wait_until(lambda: router.knows("long"), "the job's declaration")
        router.kill()
        wait_until(lambda: cluster.status()["router"]["problem"], "the router's absence")
        cluster.submit("short", borrow={"run_id": "run-short"}, group=None)
        cluster.wait_state("short", "done")
        said = cluster.command("status").stdout
        assert f"borrowed GPUs: router {router.url} does not answer" in said
        assert "may borrow" in said
        router.start_again()
        wait_until(lambda: router.knows("long"), "the declaration at the new router")
        wait_until(lambda: cluster.status()["router"]["problem"] is None, "the router's return")
        assert "short" not in router.jobs()
        assert "borrowed GPUs" not in cluster.command("status").stdout


@pytest.mark.slow
def test_no_job_is_left_at_the_router_if_it_ends_while_router_and_scheduler_are_away(
    tmp_path: Path, router: Router
) -> None:
    with lending_cluster(tmp_path, router) as cluster, cluster.held(0, "gone", "stays"):
        for name in ("gone", "stays"):
            cluster.submit(name, borrow={"run_id": f"run-{name}"}, group=None)
        wait_until(lambda: router.knows("gone") and router.knows("stays"), "both jobs' declarations")
        router.kill()
        cluster.ask(Cancel, job="gone")
        cluster.wait_state("gone", "cancelled")
        kill(cluster.status()["scheduler_pid"])
        router.start_again()
        wait_until(lambda: router.knows("stays") and "gone" not in router.jobs(), "the router to know")


def test_a_cluster_whose_router_has_no_admin_key_is_refused_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROSE_ROUTER_ADMIN_KEY", raising=False)
    file = tmp_path / "cluster.yaml"
    file.write_text("{pools: {serving_gpus: 1}, router: {url: 'http://127.0.0.1:1'}}")
    channel = ["--channel", f"unix:{tmp_path / 'ch'}", "--folder", str(tmp_path / "jobs")]
    ended = rose("sched", "serve", str(file), *channel)
    assert ended.returncode == 2
    assert "set ROSE_ROUTER_ADMIN_KEY here and at the router" in ended.stderr
