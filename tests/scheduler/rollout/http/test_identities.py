"""Jobs as identities: a job's key, run and model, and turns that get the weights of their job's run alone."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rose.config import Settings
from rose.errors import ConfigError
from rose.scheduler.rollout.router_config import RouterJob, build_config
from tests.scheduler.rollout.conftest import Client, StartRouter
from tests.scheduler.rollout.scripted_worker import Fault, ScriptedWorker, expected_tokens
from tests.scheduler.rollout.waiting import until

BODY = {"prompt": [1, 2, 3], "max_tokens": 5}
A, B = {"X_Rose_Job": "a"}, {"X_Rose_Job": "b"}


def versions(answer: Any) -> list[str | None]:
    return [span["weight_version"] for span in answer["choices"][0]["rose"]["spans"]]


def refusal(answered: tuple[int, Any]) -> tuple[int, str]:
    status, answer = answered
    return status, answer["error"]["message"]


async def owners(client: Client) -> dict[str, str]:
    _, listed = await client.get("/workers")
    return {worker["id"]: worker["owner"] for worker in listed["workers"]}


async def test_each_of_two_jobs_of_one_model_gets_the_weights_of_its_own_run(
    start_router: StartRouter,
) -> None:
    async with (
        ScriptedWorker(version="run-a/3") as of_a,
        ScriptedWorker(version="run-b/7") as of_b,
        start_router((of_a, "serving"), (of_b, "serving"), jobs={"b": RouterJob(run_id="run-b")}) as client,
    ):
        for session in ("1", "2", "1"):  # the same names of sessions, and the same prompts
            both = await asyncio.gather(
                client.complete(BODY, **A, X_Rose_Run="run-a", X_Session_ID=session),
                client.complete(BODY, **B, X_Session_ID=session),
            )
            assert [versions(answer) for answer in both] == [["run-a/3"], ["run-b/7"]]
        assert await owners(client) == {of_a.id: "a", of_b.id: "b"}
        assert (len(of_a.requests), len(of_b.requests)) == (3, 3)


@pytest.mark.parametrize("kind", ["serving", "dedicated"])
async def test_a_job_that_names_no_run_gets_base_weights_or_an_error_but_no_other_jobs_weights(
    start_router: StartRouter, kind: str
) -> None:
    async with ScriptedWorker() as worker, start_router((worker, kind)) as client:
        assert versions(await client.complete(BODY, **B)) == [None]
        worker.version = "run-a/0"
        await until(lambda: bool(client.router.plane.registry.newest.numbers))
        status, message = refusal(await client.post("/v1/completions", BODY, **B))
        assert (status, message) == (
            400,
            "job b names no training run, and workers have weights of run-a; send X-Rose-Run, or set the"
            " job's run_id (jobs in the router's file, PUT /admin/jobs/JOB)",
        )
        assert versions(await client.complete(BODY, **B, X_Rose_Run="run-a")) == ["run-a/0"]
        assert versions(await client.complete(BODY)) == ["run-a/0"]  # nobody has a run of his own


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.slow
async def test_a_job_whose_run_no_worker_has_is_told_so_and_keeps_no_gpu_from_others(
    start_router: StartRouter, path: str
) -> None:
    jobs = {"a": RouterJob(run_id="run-a"), "b": RouterJob(run_id="run-b")}
    async with (
        ScriptedWorker(version="run-a/3") as one,
        ScriptedWorker(version="run-a/3") as two,
        start_router((one, "serving"), (two, "serving"), jobs=jobs, weights_s=0.5) as client,
    ):
        await client.complete(BODY, **A)
        waiting = asyncio.create_task(client.post(path, {**BODY, "messages": []}, **B))
        await until(lambda: client.router.plane.dispatcher.num_queued == 1)
        await client.complete(BODY, **A)
        assert set((await owners(client)).values()) == {"a"}
        status, message = refusal(await waiting)
        assert status == 503
        for words in (
            "for 0.5 s no worker",
            "of run run-b",
            f"{one.id} run-a/3",
            f"{two.id} run-a/3",
            "--run",
        ):
            assert words in message
        late = asyncio.create_task(client.complete(BODY, **B))
        await until(lambda: client.router.plane.dispatcher.num_queued == 1)
        two.version = "run-b/0"  # in time
        assert versions(await late) == ["run-b/0"]


async def test_a_turn_leaves_a_worker_that_gets_another_runs_weights(start_router: StartRouter) -> None:
    async with (
        ScriptedWorker(version="run-a/1") as changing,
        ScriptedWorker(version="run-a/1") as other,
        start_router(changing, (other, "serving")) as client,
    ):
        changing.faults.append(Fault(kind="hold", after_tokens=2))
        turn = asyncio.create_task(client.complete(BODY, X_Rose_Run="run-a"))
        known = client.known(changing)
        await until(lambda: known.num_tokens == 2)
        changing.version = "run-b/9"
        answer = await turn
        assert answer["choices"][0]["token_ids"] == expected_tokens(BODY["prompt"], 5)  # type: ignore[arg-type]
        assert versions(answer) == ["run-a/1", "run-a/1"]
        assert client.counters()["reroutes"] == {"outdated": 1}


async def test_a_jobs_key_stands_for_job_run_and_model_and_contradictions_are_refused(
    start_router: StartRouter,
) -> None:
    jobs = {"a": RouterJob(key="key-a", run_id="run-a", model="scripted"), "b": RouterJob(key="key-b")}
    async with (
        ScriptedWorker(version="run-a/3", models=["first", "scripted"]) as worker,
        start_router(worker, jobs=jobs, api_key="all", admin_key="adm") as client,
    ):

        async def ask(key: str, **more: str) -> tuple[int, Any]:
            return await client.post("/v1/completions", BODY, Authorization=f"Bearer {key}", **more)

        assert versions((await ask("key-a"))[1]) == ["run-a/3"]
        assert (worker.requests[-1]["model"], client.router.plane.jobs.find("a") is not None) == (
            "scripted",
            True,
        )
        assert (await ask("key-a", **A, X_Rose_Run="run-a"))[0] == 200
        for key, headers, words in (
            ("key-a", B, "the key is job a's"),
            ("key-a", {"X_Rose_Run": "run-b"}, "job a has run run-a"),
            ("all", A, "job a has a key of its own"),
            ("all", {"X_Rose_Run": "run-a"}, "run run-a is that of job a"),
            ("key-b", {"X_Rose_Run": "run-a"}, "run run-a is that of job a"),
        ):
            status, message = refusal(await ask(key, **headers))
            assert (status, words in message) == (403, True), message
        asked = {**BODY, "model": "first"}
        answered = await client.post("/v1/completions", asked, Authorization="Bearer key-a")
        assert refusal(answered) == (
            403,
            "model: 'first', but job a has model scripted; leave it out, or change the job",
        )
        for key in ("", "adm", "key-c"):
            assert (await ask(key))[0] == 401
        assert (await ask("all"))[0] == 400  # it names neither job nor run, and job a has a run of its own
        assert len(worker.requests) == 2
        async with client.http.get(
            f"{client.router.url}/admin/jobs", headers={"Authorization": "Bearer adm"}
        ) as response:
            assert "key-a" not in await response.text()


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/render", "/v1/responses"),
        *("/v1/messages", "/inference/v1/generate", "/generate"),
    ],
)
async def test_a_jobs_key_generates_nothing_with_another_model(start_router: StartRouter, path: str) -> None:
    jobs = {"a": RouterJob(key="key-a", model="scripted")}
    async with (
        ScriptedWorker(models=["first", "scripted"]) as worker,
        start_router(worker, jobs=jobs) as client,
    ):
        body = {
            "prompt": [1],
            "token_ids": [1],
            "input_ids": [1],
            "messages": [],
            "tools": [{}],
            "input": "x",
        }
        answer = await client.post(path, {**body, "model": "first"}, Authorization="Bearer key-a")
        status, message = refusal(answer)
        assert (status, "model: 'first', but job a has model scripted" in message) == (403, True)
        assert not worker.requests


async def test_nobody_changes_a_jobs_key_without_the_admin_key(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker, jobs={"a": RouterJob(key="k")}) as client:
        for method in ("put", "delete"):
            async with client.http.request(
                method, f"{client.router.url}/admin/jobs/a", json={}, headers={"Authorization": "Bearer k"}
            ) as response:
                assert response.status == 403
        assert (await client.post("/workers", {"url": worker.url}))[0] == 403


async def test_who_takes_the_last_key_away_lets_nobody_in(start_router: StartRouter, tmp_path: Path) -> None:
    settings = {"jobs": {"a": RouterJob(key="k")}, "admin_key": "adm", "state": tmp_path / "router.json"}
    async with ScriptedWorker() as worker:
        async with start_router(worker, **settings) as client:
            url, admin = f"{client.router.url}/admin/jobs/a", {"Authorization": "Bearer adm"}
            async with client.http.put(url, json={"key": None}, headers=admin) as response:
                assert response.status == 200
            assert (await client.get("/v1/models"))[0] == 401
        async with start_router(worker, **settings) as client:
            assert (await client.get("/v1/models"))[0] == 401


async def test_a_retry_by_another_job_gets_an_answer_of_its_own(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        worker.hold()
        asked = [
            asyncio.create_task(client.post("/v1/completions", BODY, Idempotency_Key="1", **job))
            for job in (A, B)
        ]
        await until(lambda: len(worker.requests) == 2)
        worker.go_on()
        await asyncio.gather(*asked)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"jobs": {"a": {"key": "k"}, "b": {"key": "k"}}}, "jobs.b.key: job a has the same key"),
        (
            {"run_id": "r", "jobs": {"a": {"run_id": "s"}}},
            "jobs.a.run_id: s, but the router's only run_id is r",
        ),
        ({"jobs": {"a": {"key": ""}}}, "jobs.a.key"),
        ({"weights_s": 0}, "weights_s"),
    ],
)
def test_jobs_that_contradict_each_other_or_the_router_are_refused(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match="router:") as refused:
        build_config(fields, "router", Settings.from_environment({}))
    assert words in str(refused.value)


async def test_jobs_are_listed_that_were_declared_and_have_had_no_turn(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker, jobs={"math": {"weight": 2}}) as client:
        await client.complete({"prompt": [1], "max_tokens": 1}, X_Rose_Job="code")
        _, listed = await client.get("/admin/jobs")
        assert {name: (job["weight"], job["turns"]) for name, job in listed["jobs"].items()} == {
            "math": (2.0, 0),
            "code": (1.0, 1),
        }
