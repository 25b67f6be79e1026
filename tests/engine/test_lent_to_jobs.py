"""The whole way of a loan: `rose sched serve`, jobs, `rose router`, and an engine that shares its GPU."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from references import ModelDirs
from relay_process import RelayProcess
from served_cluster import ServedCluster, wait_until
from shared_gpu import SharedGpu

from rose.node.processes import ServerProcess
from rose.ports import free_port
from rose.scheduler.runtime.channel.messages import Answer
from rose.types import Role

pytestmark = pytest.mark.vllm
ADMIN_KEY = "the-admin"
JOB = Path(__file__).with_name("lent_job.py")
SERVING_PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
NUM_TURNS, MAX_TOKENS = 6, 24
PAUSE_S = 0.5


class LentFleet:
    """The shared pair of engines, a relay, the subscriber of the rollout engine, and a router before it."""

    def __init__(self, gpu: SharedGpu, models: ModelDirs, folder: Path) -> None:
        self.folder, self.models = folder, models
        self.serving, self.engine = gpu.engine(Role.SERVING), gpu.engine(Role.ROLLOUT)
        self.relay = RelayProcess("embedded")
        program = [sys.executable, "-m", "rose.transfer.follow.subscriber", "--relay", self.relay.url]
        where = ["--staging", str(folder / "staging"), "--base", str(models.untied[0])]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        self._subscriber = subprocess.Popen([*program, "--worker", self.engine.url, *where], env=environment)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        settings = folder / "router.yaml"
        settings.write_text("state: null\n")
        command = [sys.executable, "-m", "rose.scheduler.rollout.http.command", str(settings)]
        argv = [*command, "--port", str(port), "--worker", f"{self.engine.url},serving"]
        self._router = ServerProcess(argv, "router", folder / "router.log").start()

    def jobs(self) -> dict[str, dict[str, Any]]:
        """The jobs that the router knows; nothing while it starts."""
        try:
            found: dict[str, Any] = httpx.get(f"{self.url}/admin/jobs", headers=self._headers).json()["jobs"]
        except httpx.HTTPError:
            return {}
        return found

    def worker(self) -> dict[str, Any]:
        """The engine as the router shows it."""
        [worker] = httpx.get(f"{self.url}/workers", headers=self._headers).json()["workers"]
        return dict(worker)

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {ADMIN_KEY}"}

    def command(self, run: str) -> list[str]:
        """A job that publishes weights other than those with which the engine started."""
        model = str(self.models.untied[-1])
        return [sys.executable, str(JOB), str(self.folder), self.relay.url, run, model]

    def turns(self, run: str) -> list[dict[str, Any]]:
        """The turns of a run that have been answered."""
        path = self.folder / f"{run}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def close(self) -> None:
        self._router.stop(0.0)
        self._subscriber.terminate()
        self._subscriber.wait()
        self.relay.stop()


@pytest.fixture
def fleet(
    gpu: SharedGpu, models: ModelDirs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[LentFleet]:
    monkeypatch.setenv("ROSE_ROUTER_ADMIN_KEY", ADMIN_KEY)
    fleet = LentFleet(gpu, models, tmp_path)
    yield fleet
    fleet.close()


def lend(fleet: LentFleet, cluster: ServedCluster, job: str) -> Answer:
    """Submits a job of two iterations whose turns may run on the lent engine."""
    run = f"run-{job}"
    borrow = {"run_id": run, "model": "tiny", "max_serving_gpus": 1}
    return cluster.submit(job, command=fleet.command(run), borrow=borrow, iterations=2)


def made_by(turns: list[dict[str, Any]]) -> set[str | None]:
    """The versions of the weights that made the tokens of these turns."""
    return {span["weight_version"] for turn in turns for span in turn["spans"]}


def serve_until(fleet: LentFleet, served: list[list[int]], is_done: Callable[[], object]) -> None:
    """Serving's traffic, with pauses in which rollouts compute."""
    until_s = time.monotonic() + 600
    while not is_done():
        assert time.monotonic() < until_s, fleet.jobs()
        served.append(fleet.serving.complete(SERVING_PROMPT, MAX_TOKENS).tokens)
        time.sleep(PAUSE_S)


def test_the_turns_of_a_scheduled_job_run_beside_serving_on_a_lent_engine_until_the_loan_ends(
    fleet: LentFleet,
) -> None:
    alone = fleet.serving.complete(SERVING_PROMPT, MAX_TOKENS).tokens
    hold = fleet.folder / "hold-run-math"
    hold.touch()
    pools = {"serving_gpus": 1, "serving_dollars_per_gpu_hour": 3.6}
    with ServedCluster(fleet.folder, pools=pools, router={"url": fleet.url}) as cluster:
        assert lend(fleet, cluster, "math").error is None
        served: list[list[int]] = []
        serve_until(fleet, served, lambda: fleet.turns("run-math") or cluster.job("math")["is_over"])
        worker = fleet.worker()
        assert (worker["owner"], worker["lent_run"]) == ("math", "run-math")
        hold.unlink()
        serve_until(fleet, served, lambda: cluster.job("math")["is_over"])
        assert served == [alone] * len(served)
        turns = fleet.turns("run-math")
        assert len(turns) == 2 * NUM_TURNS
        assert all(len(turn["tokens"]) == MAX_TOKENS for turn in turns)
        for number in (0, 1):  # before an iteration the job publishes, and says so to the router
            of_iteration = [turn for turn in turns if turn["iteration"] == number]
            assert made_by(of_iteration) == {f"run-math/{number}"}
        wait_until(lambda: "math" not in fleet.jobs(), "the router to forget the job")
        wait_until(lambda: not fleet.worker()["owner"], "the end of the loan")
        wait_until(lambda: fleet.engine.loaned_run() is None, "the engine to hear of it")
        done = cluster.job("math")
        assert done["state"] == "done" and done["serving_gpus"] is None and done["restarts"] == 0
        assert done["serving_gpu_s"] > 0
        assert done["serving_dollars"] == pytest.approx(done["serving_gpu_s"] * 1e-3)
