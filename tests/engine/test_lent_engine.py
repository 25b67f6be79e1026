"""One engine behind a router is lent from job to job, and each job's turns get that job's weights."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from forked_server import ForkedServer
from probes import PROBE_TOKENS, probes
from real_engine import READY_S, Answer, RealEngine
from references import ModelDirs, StockAnswers
from relay_process import RelayProcess
from safetensors.torch import load_file

from rose.engine.http.loaned_run import LASTING_S
from rose.scheduler.rollout.http.command import RunningRouter
from rose.scheduler.rollout.placing.views import WorkerKind
from rose.scheduler.rollout.router_config import WorkerSpec
from rose.transfer.publish.publisher import WeightPublisher
from rose.types import Role
from tests.scheduler.rollout.conftest import running_router
from tests.scheduler.rollout.waiting import until

pytestmark = pytest.mark.vllm
RUNS = {"math": "math-1", "code": "code-1", "odd": "odd-1", "late": "late-1"}
WEIGHTS_S = 60.0


class Fleet:
    """An engine with its subscriber, a relay, and the trainers of four jobs, one of which publishes late."""

    def __init__(self, models: ModelDirs, folder: Path) -> None:
        self.relay = RelayProcess("embedded")
        self._model, self._folder = models.untied[0], folder
        self.engine = RealEngine(models.untied[0], Role.ROLLOUT, folder, "--dtype", "float32")
        weights = {"math": models.untied[0], "code": models.untied[-1], "odd": models.serving}
        weights["late"] = weights["code"]
        self.trainers = {
            job: WeightPublisher(load_file(path / "model.safetensors"), self.relay.url, RUNS[job], dtype=None)
            for job, path in weights.items()
        }
        self.engine.wait_ready()
        self.fresh = [self.engine.complete(probe, PROBE_TOKENS) for probe in probes()]
        for job, trainer in self.trainers.items():
            if job != "late":
                trainer.publish()
        self.subscribe()

    def subscribe(self) -> None:
        program = [sys.executable, "-m", "rose.transfer.follow.subscriber", "--relay", self.relay.url]
        where = ["--staging", str(self._folder / "staging"), "--base", str(self._model)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        self.subscriber = subprocess.Popen([*program, "--worker", self.engine.url, *where], env=environment)

    def kill_subscriber(self) -> None:
        self.subscriber.kill()
        self.subscriber.wait()

    def kill_engine(self) -> None:
        self.engine.process.send_signal(signal.SIGKILL)
        self.engine.process.wait(READY_S)
        again = ForkedServer(self.engine.process)
        again._process = None
        self.engine.process = again.start()

    def close(self) -> None:
        self.subscriber.terminate()
        for trainer in self.trainers.values():
            trainer.close()
        self.engine.stop()
        self.subscriber.wait()
        self.relay.stop()


@pytest.fixture(scope="module")
def fleet(models: ModelDirs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(models, tmp_path_factory.mktemp("lent"))
    yield fleet
    fleet.close()


class Jobs:
    """Clients of the jobs, each with its key."""

    def __init__(self, router: RunningRouter, http: aiohttp.ClientSession) -> None:
        self.router = router
        self._http = http

    async def ask(self, job: str, prompt: list[int]) -> dict[str, Any]:
        body = {
            "prompt": prompt,
            "max_tokens": PROBE_TOKENS,
            "temperature": 0.0,
            "logprobs": 1,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        headers = {"Authorization": f"Bearer key-of-{job}"}
        async with self._http.post(
            f"{self.router.url}/v1/completions", json=body, headers=headers
        ) as response:
            answer: dict[str, Any] = await response.json()
            return {**answer, "status": response.status}

    async def probe(self, job: str, index: int = 0) -> tuple[list[int], list[float]]:
        """Returns tokens and log-probabilities of a turn, all of whose weights must be of the job's run."""
        answer = await self.ask(job, probes()[index])
        assert answer["status"] == 200, answer
        (choice,) = answer["choices"]
        made_by = {span["weight_version"].rpartition("/")[0] for span in choice["rose"]["spans"]}
        assert made_by == {RUNS[job]}
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@asynccontextmanager
async def jobs_of(fleet: Fleet, weights_s: float = WEIGHTS_S) -> AsyncIterator[Jobs]:
    declared = {job: {"key": f"key-of-{job}", "run_id": run, "model": "tiny"} for job, run in RUNS.items()}
    spec = WorkerSpec(url=fleet.engine.url, kind=WorkerKind.SERVING)
    async with (
        running_router(spec, jobs=declared, weights_s=weights_s, lost_after_s=20) as router,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as http,
    ):
        (worker,) = router.plane.registry.workers()
        await until(lambda: worker.follows_loans)
        yield Jobs(router, http)


def of_math(fleet: Fleet, index: int = 0) -> tuple[list[int], list[float]]:
    fresh: Answer = fleet.fresh[index]
    return fresh.tokens, fresh.logprobs


def of_code(stock: StockAnswers, index: int = 0) -> tuple[list[int], list[float]]:
    fresh = stock.of("untied")[tuple(probes()[index])]
    return fresh["tokens"], fresh["logprobs"]


async def test_base_weights_answer_no_turn_of_a_run_of_another_architecture(fleet: Fleet) -> None:
    async with jobs_of(fleet, weights_s=8.0) as jobs:
        refused = await jobs.ask("odd", probes()[0])
        assert refused["status"] == 503
        assert "run odd-1 is of another architecture than this engine's model" in refused["error"]["message"]
        assert await jobs.probe("math") == of_math(fleet)


async def test_each_jobs_turns_are_answered_as_by_a_fresh_engine_with_its_weights(
    fleet: Fleet, stock: StockAnswers
) -> None:
    async with jobs_of(fleet) as jobs:
        assert await jobs.probe("math") == of_math(fleet)
        assert await jobs.probe("code") == of_code(stock)
        assert await jobs.probe("math") == of_math(fleet)
        order = [("math", "code")[number % 2] for number in range(12)]
        found = await asyncio.gather(*(jobs.probe(job, number % 3) for number, job in enumerate(order)))
        for number, (job, answer) in enumerate(zip(order, found, strict=True)):
            index = number % 3
            assert answer == (of_math(fleet, index) if job == "math" else of_code(stock, index))


async def test_weights_of_another_run_answer_no_turn_of_a_job_before_its_run_has_published(
    fleet: Fleet, stock: StockAnswers
) -> None:
    async with jobs_of(fleet) as jobs:
        assert await jobs.probe("math") == of_math(fleet)
    async with jobs_of(fleet, weights_s=8.0) as jobs:
        refused = await jobs.ask("late", probes()[0])
        assert refused["status"] == 503
        assert "the run has published nothing in this relay" in refused["error"]["message"]
    async with jobs_of(fleet) as jobs:
        assert await jobs.probe("math") == of_math(fleet)
        await asyncio.to_thread(fleet.trainers["late"].publish)
    async with jobs_of(fleet, weights_s=LASTING_S + WEIGHTS_S) as jobs:
        assert await jobs.probe("late") == of_code(stock)


async def test_a_switch_outlives_the_death_of_the_subscriber_and_of_the_engine(
    fleet: Fleet, stock: StockAnswers
) -> None:
    async with jobs_of(fleet) as jobs:
        (worker,) = jobs.router.plane.registry.workers()
        assert await jobs.probe("math") == of_math(fleet)
        turn = asyncio.create_task(jobs.probe("code"))
        await until(lambda: worker.lent_run == RUNS["code"])
        fleet.kill_subscriber()
        fleet.subscribe()
        assert await turn == of_code(stock)
        turn = asyncio.create_task(jobs.probe("math"))
        await until(lambda: worker.lent_run == RUNS["math"])
        await asyncio.to_thread(fleet.kill_engine)
        assert await turn == of_math(fleet)
        assert await jobs.probe("code") == of_code(stock)
