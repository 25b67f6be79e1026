"""A serving GPU is lent together with its job's weights: no turn of the job comes before they are there."""

import asyncio
from typing import Any

import pytest

from rose.engine.http.leases import Leases
from rose.messages import NOTHING_PUBLISHED
from rose.scheduler.rollout.placing.views import NOBODY
from tests.scheduler.rollout.conftest import Client, StartRouter
from tests.scheduler.rollout.scripted_worker import ScriptedWorker
from tests.scheduler.rollout.waiting import until

BODY: dict[str, Any] = {"model": "scripted", "prompt": [1, 2, 3], "max_tokens": 5}
JOBS = {job: {"key": f"key-{job}", "run_id": f"run-{job}", "model": "scripted"} for job in "ab"}


def lent_worker(version: str | None) -> ScriptedWorker:
    return ScriptedWorker(leases=Leases(), version=version, follows_loans=True)


async def ask(client: Client, job: str) -> tuple[int, Any]:
    return await client.post("/v1/completions", BODY, Authorization=f"Bearer key-{job}")


async def lend_to_b(client: Client, worker: ScriptedWorker) -> asyncio.Task[tuple[int, Any]]:
    """Returns a turn of job b for which the worker has been lent, with b's run."""
    turn = asyncio.create_task(ask(client, "b"))
    await until(lambda: worker.leases is not None and worker.leases.run == "run-b")
    return turn


def versions(answer: tuple[int, Any]) -> list[str | None]:
    status, body = answer
    assert status == 200, body
    return [span["weight_version"] for span in body["choices"][0]["rose"]["spans"]]


@pytest.mark.parametrize("before", ["run-a/1", None])
async def test_a_lent_gpu_gets_no_turn_of_its_job_before_it_has_the_jobs_weights(
    start_router: StartRouter, before: str | None
) -> None:
    async with lent_worker(before) as worker, start_router((worker, "serving"), jobs=JOBS) as client:
        assert worker.leases is not None
        if before is not None:
            assert versions(await ask(client, "a")) == [before]
        num_requests = len(worker.requests)
        turn = await lend_to_b(client, worker)
        await asyncio.sleep(0.2)
        assert len(worker.requests) == num_requests
        worker.version = "run-b/3"
        assert versions(await turn) == ["run-b/3"]
        assert client.known(worker).switch_s > 0


@pytest.mark.slow
async def test_a_gpu_that_can_not_get_its_jobs_weights_goes_back_with_one_line_of_log(
    start_router: StartRouter, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        lent_worker("run-a/1") as worker,
        start_router((worker, "serving"), jobs=JOBS, weights_s=3.0) as client,
    ):
        assert versions(await ask(client, "a")) == ["run-a/1"]
        turn = await lend_to_b(client, worker)
        worker.run_problems = {"run-b": "the relay has burnt down"}
        assert versions(await ask(client, "a")) == ["run-a/1"]
        status, answer = await turn
        assert (status, "the relay has burnt down" in answer["error"]["message"]) == (503, True)
        lines = [each.getMessage() for each in caplog.records if "GPU goes back" in each.getMessage()]
        assert lines == [
            f"GPU goes back: worker={worker.id} can't get weights of run=run-b: the relay has burnt down"
        ]


@pytest.mark.slow
async def test_a_job_whose_run_has_published_nothing_gets_no_weights_of_the_run_before(
    start_router: StartRouter,
) -> None:
    async with (
        lent_worker("run-a/1") as worker,
        start_router((worker, "serving"), jobs=JOBS, weights_s=1.0) as client,
    ):
        assert versions(await ask(client, "a")) == ["run-a/1"]
        turn = await lend_to_b(client, worker)
        worker.run_problems = {"run-b": NOTHING_PUBLISHED}
        status, answer = await turn
        assert (status, NOTHING_PUBLISHED in answer["error"]["message"]) == (503, True)
        assert len(worker.requests) == 1
        turn = asyncio.create_task(ask(client, "b"))
        worker.run_problems = {}  # the engine has forgotten it, and the run has published since
        await until(lambda: worker.leases is not None and worker.leases.run == "run-b")
        worker.version = "run-b/0"
        assert versions(await turn) == ["run-b/0"]


async def test_a_job_whose_run_has_published_nothing_gets_base_weights(
    start_router: StartRouter, caplog: pytest.LogCaptureFixture
) -> None:
    async with lent_worker(None) as worker, start_router((worker, "serving"), jobs=JOBS) as client:
        turn = await lend_to_b(client, worker)
        worker.run_problems = {"run-b": NOTHING_PUBLISHED}
        assert versions(await turn) == [None]
        assert "GPU goes back" not in caplog.text


async def published(client: Client, version: str, **headers: str) -> tuple[int, Any]:
    return await client.post("/published", {"version": version}, **headers)


async def test_a_lent_gpu_gets_no_turn_on_base_weights_once_its_jobs_run_has_published(
    start_router: StartRouter,
) -> None:
    async with lent_worker(None) as worker, start_router((worker, "serving"), jobs=JOBS) as client:
        turn = await lend_to_b(client, worker)
        worker.run_problems = {"run-b": NOTHING_PUBLISHED}  # for as long as the engine has not heard
        assert versions(await turn) == [None]
        assert (await published(client, "run-b/0", Authorization="Bearer key-b"))[0] == 200
        turn = asyncio.create_task(ask(client, "b"))
        await until(lambda: turn.done() or client.router.plane.dispatcher.num_queued == 1)
        seen = client.known(worker).last_seen
        await until(lambda: client.known(worker).last_seen != seen)  # heartbeats that say nothing new
        assert not turn.done() and len(worker.requests) == 1
        worker.version, worker.run_problems = "run-b/0", {}
        assert versions(await turn) == ["run-b/0"]


async def test_a_gpu_that_keeps_its_base_weights_gives_way_to_one_that_gets_those_just_published(
    start_router: StartRouter,
) -> None:
    jobs = {"b": {**JOBS["b"], "max_serving_gpus": 1}}
    async with (
        ScriptedWorker(leases=Leases()) as fixed,
        lent_worker(None) as follower,
        start_router((fixed, "serving"), jobs=jobs, admin_key="adm") as client,
    ):
        assert versions(await ask(client, "b")) == [None]
        added = {"url": follower.url, "kind": "serving"}
        assert (await client.post("/workers", added, Authorization="Bearer adm"))[0] == 201
        assert (await published(client, "run-b/0", Authorization="Bearer key-b"))[0] == 200
        turn = await lend_to_b(client, follower)
        follower.version = "run-b/0"
        assert versions(await turn) == ["run-b/0"]


@pytest.mark.slow
async def test_a_turn_whose_runs_published_weights_no_gpu_gets_ends_with_the_reason(
    start_router: StartRouter,
) -> None:
    async with (
        lent_worker(None) as worker,
        start_router((worker, "serving"), jobs=JOBS, weights_s=1.0) as client,
    ):
        worker.run_problems = {"run-b": NOTHING_PUBLISHED}
        assert (await published(client, "run-b/0", Authorization="Bearer key-b"))[0] == 200
        status, answer = await ask(client, "b")
        message = answer["error"]["message"]
        assert status == 503
        assert "weights of run run-b" in message and NOTHING_PUBLISHED in message
        assert not worker.requests


@pytest.mark.slow
async def test_base_weights_answer_no_turn_of_a_job_whose_run_the_gpu_can_not_get(
    start_router: StartRouter,
) -> None:
    async with (
        lent_worker(None) as worker,
        start_router((worker, "serving"), jobs=JOBS, weights_s=1.0) as client,
    ):
        turn = await lend_to_b(client, worker)
        worker.run_problems = {"run-b": "the relay has burnt down"}
        status, answer = await turn
        assert (status, "the relay has burnt down" in answer["error"]["message"]) == (503, True)
        assert not worker.requests


@pytest.mark.slow
async def test_base_weights_answer_no_turn_of_a_job_with_a_run_once_the_subscriber_has_gone(
    start_router: StartRouter,
) -> None:
    async with (
        lent_worker(None) as worker,
        start_router((worker, "serving"), jobs=JOBS, weights_s=1.0) as client,
    ):
        turn = await lend_to_b(client, worker)
        worker.follows_loans = False
        assert (await turn)[0] == 503
        assert not worker.requests


async def test_base_weights_answer_no_turn_of_a_job_with_a_run_before_the_subscriber_has_asked(
    start_router: StartRouter,
) -> None:
    worker = ScriptedWorker(leases=Leases(), has_subscriber=True)
    async with worker, start_router((worker, "serving"), jobs=JOBS) as client:
        turn = asyncio.create_task(ask(client, "b"))
        await asyncio.sleep(0.3)
        assert not worker.requests
        worker.follows_loans = True
        await until(lambda: worker.leases is not None and worker.leases.run == "run-b")
        worker.version = "run-b/0"
        assert versions(await turn) == ["run-b/0"]


async def test_an_engine_without_a_subscriber_answers_a_job_with_a_run(start_router: StartRouter) -> None:
    worker = ScriptedWorker(leases=Leases())
    async with worker, start_router((worker, "serving"), jobs=JOBS) as client:
        assert versions(await ask(client, "b")) == [None]


async def test_a_gpu_whose_subscriber_has_gone_serves_the_jobs_of_its_own_weights(
    start_router: StartRouter,
) -> None:
    async with lent_worker("run-a/1") as worker, start_router((worker, "serving"), jobs=JOBS) as client:
        turn = await lend_to_b(client, worker)
        worker.follows_loans = False
        assert versions(await ask(client, "a")) == ["run-a/1"]
        worker.version, worker.follows_loans = "run-b/0", True
        assert versions(await turn) == ["run-b/0"]


async def test_the_gpu_of_a_job_that_is_forgotten_is_lent_to_nobody_though_no_turn_waits(
    start_router: StartRouter,
) -> None:
    admin = {"Authorization": "Bearer the-admin"}
    async with (
        lent_worker("run-a/1") as worker,
        start_router((worker, "serving"), jobs=JOBS, admin_key="the-admin") as client,
    ):
        assert versions(await ask(client, "a")) == ["run-a/1"]
        async with client.http.delete(f"{client.router.url}/admin/jobs/a", headers=admin) as response:
            assert response.status == 200
        assert client.known(worker).owner == NOBODY
        await until(lambda: worker.leases is not None and worker.leases.run is None)
