"""Jobs on a running router: fair shares, limits, borrowed GPUs, pause, abort, versions, idempotency."""

import asyncio

import pytest

from rose.engine.http.leases import Leases
from rose.scheduler.rollout.placing.fairness import jain
from rose.scheduler.rollout.router_config import RouterJob
from tests.scheduler.rollout.conftest import Client, StartRouter
from tests.scheduler.rollout.scripted_worker import Fault, ScriptedWorker
from tests.scheduler.rollout.waiting import until

BODY = {"prompt": [1, 2, 3], "max_tokens": 5}


async def put(client: Client, path: str, body: object) -> int:
    async with client.http.put(f"{client.router.url}{path}", json=body) as response:
        return response.status


async def delete(client: Client, path: str) -> int:
    async with client.http.delete(f"{client.router.url}{path}") as response:
        return response.status


def tokens(client: Client, job: str) -> int:
    found = client.router.plane.jobs.find(job)
    return found.num_tokens if found is not None else 0


async def keep_asking(client: Client, job: str, max_tokens: int) -> None:
    while True:
        await client.complete({**BODY, "max_tokens": max_tokens}, X_Rose_Job=job)


@pytest.mark.parametrize(("weight", "lengths"), [(1.0, (5, 5)), (3.0, (5, 5)), (1.0, (40, 5))])
@pytest.mark.slow
async def test_two_jobs_offering_ten_to_one_get_their_entitled_shares(
    start_router: StartRouter, weight: float, lengths: tuple[int, int]
) -> None:
    async with (
        ScriptedWorker() as worker,
        start_router(worker, turns_per_gpu=4, jobs={"small": RouterJob(weight=weight)}) as client,
    ):
        worker.hold()
        asking = [asyncio.create_task(keep_asking(client, "big", lengths[0])) for _ in range(100)]
        await until(lambda: client.router.plane.dispatcher.num_queued == 100 - 4)
        asking += [asyncio.create_task(keep_asking(client, "small", lengths[1])) for _ in range(10)]
        await until(lambda: client.router.plane.dispatcher.num_queued == 110 - 4)
        worker.go_on()
        await until(lambda: tokens(client, "small") > 0)
        before = {job: tokens(client, job) for job in ("big", "small")}
        await until(lambda: tokens(client, "small") - before["small"] >= 1000)
        got = {job: tokens(client, job) - before[job] for job in before}
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        assert jain([got["big"], got["small"] / weight]) >= 0.95


async def test_a_jobs_limits_hold_and_can_be_changed(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker:
        worker.faults.extend(Fault(kind="hang", after_tokens=1) for _ in range(3))
        async with start_router(worker) as client:
            assert await put(client, "/admin/jobs/a", {"max_in_flight": 2, "max_queued": 1}) == 200
            turns = [asyncio.create_task(client.complete(BODY, X_Rose_Job="a")) for _ in range(3)]
            await until(lambda: len(worker.requests) == 2)
            await until(lambda: client.router.plane.dispatcher.num_queued == 1)
            status, answer = await client.post("/v1/completions", BODY, X_Rose_Job="a")
            assert (status, answer["error"]["type"]) == (429, "RateLimitError")
            assert await put(client, "/admin/jobs/a", {"max_in_flight": 3}) == 200
            await until(lambda: len(worker.requests) == 3)
            _, listed = await client.get("/admin/jobs")
            assert listed["jobs"]["a"]["in_flight"] == 3
            assert await delete(client, "/admin/jobs/a") == 409
            for turn in turns:
                turn.cancel()
            await asyncio.gather(*turns, return_exceptions=True)
            await until(lambda: worker.num_cancelled == 3)
            assert await delete(client, "/admin/jobs/a") == 200
            assert await delete(client, "/admin/jobs/a") == 404
            assert await put(client, "/admin/jobs/a", {"weight": 0}) == 400
            assert await put(client, "/admin/jobs/a", {"priority": 2**31}) == 400


async def test_a_change_of_one_setting_keeps_the_others_and_delete_restores_the_file(
    start_router: StartRouter,
) -> None:
    declared = RouterJob(key="k", run_id="r", model="scripted", max_queued=9)
    async with (
        ScriptedWorker() as worker,
        start_router(worker, jobs={"a": declared}, admin_key="adm") as client,
    ):
        url, admin = f"{client.router.url}/admin/jobs/a", {"Authorization": "Bearer adm"}

        async def change(method: str, **fields: object) -> int:
            async with client.http.request(method, url, json=fields, headers=admin) as response:
                return response.status

        async def answers() -> list[int]:
            # To a client with the job's key, and to one without.
            return [
                (await client.post("/v1/completions", BODY, **key))[0]
                for key in ({"Authorization": "Bearer k"}, {"X_Rose_Job": "a"})
            ]

        jobs = client.router.plane.jobs
        assert await change("PUT", weight=2) == 200
        assert jobs.spec("a") == declared.model_copy(update={"weight": 2.0})
        assert await answers() == [200, 401]
        assert await change("PUT", weight=None) == 400
        assert await change("PUT", key=None, model=None) == 200
        assert jobs.spec("a") == RouterJob(run_id="r", weight=2.0, max_queued=9)
        assert await answers() == [401, 401], "the router's file has a key"
        assert await change("DELETE") == 200
        assert jobs.spec("a") == declared
        assert await answers() == [200, 401]


async def test_delete_gives_no_two_jobs_one_key(start_router: StartRouter) -> None:
    async with start_router(jobs={"a": RouterJob(key="k")}) as client:
        jobs = client.router.plane.jobs
        jobs.change("a", RouterJob(key="new"), 0.0)
        jobs.change("b", RouterJob(key="k"), 0.0)
        with pytest.raises(ValueError, match="has the same key"):
            jobs.forget("a")
        assert [jobs.holder(key) for key in ("new", "k")] == ["a", "b"]


async def test_each_serving_gpu_works_for_one_job_and_the_idlest_go_first(start_router: StartRouter) -> None:
    async with (
        ScriptedWorker(serving_kv_usage=0.7) as busy,
        ScriptedWorker(serving_kv_usage=0.1) as idle,
        start_router(
            (busy, "serving"), (idle, "serving"), jobs={"a": RouterJob(max_serving_gpus=1)}
        ) as client,
    ):
        await client.complete(BODY, X_Rose_Job="a")
        assert (len(busy.requests), len(idle.requests)) == (0, 1)
        await client.complete(BODY, X_Rose_Job="b")
        assert (len(busy.requests), len(idle.requests)) == (1, 1)
        _, listed = await client.get("/workers")
        assert {w["id"]: w["owner"] for w in listed["workers"]} == {idle.id: "a", busy.id: "b"}


async def test_a_job_of_higher_priority_gets_the_serving_gpu_and_cuts_no_turn(
    start_router: StartRouter,
) -> None:
    jobs = {"high": RouterJob(priority=1), "low": RouterJob(weight=100.0)}
    async with (
        ScriptedWorker(leases=Leases()) as worker,
        start_router((worker, "serving"), turns_per_gpu=1, jobs=jobs) as client,
    ):
        order: list[str] = []

        async def ask(job: str) -> None:
            await client.complete(BODY, X_Rose_Job=job)
            order.append(job)

        worker.hold()
        low = [asyncio.create_task(ask("low")) for _ in range(4)]
        await until(lambda: len(worker.requests) == 1)
        high = [asyncio.create_task(ask("high")) for _ in range(3)]
        await until(lambda: client.router.plane.dispatcher.num_queued == 6)
        _, listed = await client.get("/admin/jobs")
        assert {name: job["priority"] for name, job in listed["jobs"].items()} == {"high": 1, "low": 0}
        assert len(worker.requests) == 1, "the turn of low runs on"
        worker.go_on()
        await asyncio.gather(*low, *high)
        assert order == ["low", "high", "high", "high", "low", "low", "low"]
        assert len(worker.requests) == 7, "no turn was cut"
        assert worker.most_in_flight == 1


async def test_a_job_without_a_turn_running_keeps_no_serving_gpu_from_one_that_waits(
    start_router: StartRouter,
) -> None:
    async with (
        ScriptedWorker() as worker,
        start_router((worker, "serving"), job_idle_s=3600) as client,
    ):
        for job in ("a", "b", "a", "c", "b"):
            await client.complete(BODY, X_Rose_Job=job)
        worker.hold()
        running = asyncio.create_task(client.complete(BODY, X_Rose_Job="b"))
        await until(lambda: len(worker.requests) == 6)
        waiting = asyncio.create_task(client.complete(BODY, X_Rose_Job="c"))
        await until(lambda: client.router.plane.dispatcher.num_queued == 1)
        assert len(worker.requests) == 6
        worker.go_on()
        await running
        await waiting


async def test_pause_holds_new_turns_back_and_resume_lets_them_go(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        for body in ({}, {"job": "default"}):
            sent = len(worker.requests)
            assert (await client.post("/admin/pause", body))[0] == 200
            turn = asyncio.create_task(client.complete(BODY))
            await until(lambda: client.router.plane.dispatcher.num_queued == 1)
            assert len(worker.requests) == sent
            await client.post("/admin/resume", body)
            await turn
        assert (await client.post("/admin/pause", {"jobs": 1}))[0] == 400


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_abort_ends_the_jobs_requests_and_no_others(start_router: StartRouter, path: str) -> None:
    async with ScriptedWorker() as worker:
        worker.faults.extend([Fault(kind="hang"), Fault(kind="hang")])
        async with start_router(worker) as client:
            body = {**BODY, "messages": []}
            doomed = asyncio.create_task(client.post(path, body, X_Rose_Job="a"))
            await until(lambda: len(worker.requests) == 1)
            spared = asyncio.create_task(client.post(path, body, X_Rose_Job="b"))
            await until(lambda: len(worker.requests) == 2)
            assert (await client.post("/admin/abort", {"job": "a"}))[1]["aborted"] == 1
            status, answer = await doomed
            assert (status, answer["error"]["message"]) == (409, "job a was aborted")
            await until(lambda: worker.num_cancelled == 1)
            assert not spared.done()
            assert (await client.post("/admin/abort", {}))[1]["aborted"] == 1
            assert (await spared)[0] == 409
            await until(lambda: client.router.plane.registry.workers()[0].in_flight == 0)


async def test_the_version_rule_can_be_changed(start_router: StartRouter) -> None:
    async with (
        ScriptedWorker(version="r/1") as old,
        ScriptedWorker(version="r/2") as new,
        start_router(old, new) as client,
    ):
        assert await put(client, "/admin/version", {"mode": "max-lag", "max_lag": 1}) == 200
        _, shown = await client.get("/admin/version")
        held = {old.id: "r/1", new.id: "r/2"}
        assert shown == {"mode": "max-lag", "max_lag": 1, "newest": {"r": 2}, "workers": held}
        for worker in (old, new):
            worker.hold()  # else one could have ended before the next one came, and all go to the same worker
        turns = [asyncio.create_task(client.complete(BODY)) for _ in range(4)]
        await until(lambda: (len(old.requests), len(new.requests)) == (2, 2))
        for worker in (old, new):
            worker.go_on()
        await asyncio.gather(*turns)
        assert await put(client, "/admin/version", {"mode": "newest"}) == 400


async def test_a_draining_worker_gets_nothing_new(start_router: StartRouter) -> None:
    async with ScriptedWorker() as a, ScriptedWorker() as b, start_router(a, b) as client:
        assert (await client.post(f"/workers/{a.id}/drain", {}))[0] == 200
        assert (await client.post("/workers/nobody/drain", {}))[0] == 404
        for _ in range(3):
            await client.complete(BODY)
        assert (len(a.requests), len(b.requests)) == (0, 3)
        await client.post("/admin/drain", {})
        status, answer = await client.post("/v1/completions", BODY)
        assert (status, answer["error"]["type"]) == (503, "ServiceUnavailableError")


async def test_a_retry_with_the_same_key_shares_the_answer_while_it_is_in_flight(
    start_router: StartRouter,
) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        worker.hold()
        first = asyncio.create_task(client.post("/v1/completions", BODY, Idempotency_Key="k"))
        await until(lambda: len(worker.requests) == 1)
        second = asyncio.create_task(client.post("/v1/completions", BODY, Idempotency_Key="k"))
        (shared,) = client.router._service._in_flight._running.values()
        await until(lambda: shared.num_waiting == 2)
        status, answer = await client.post("/v1/completions", {**BODY, "n": 2}, Idempotency_Key="k")
        assert (status, "another body" in answer["error"]["message"]) == (409, True)
        streamed = {**BODY, "stream": True}
        assert (await client.post("/v1/completions", streamed, Idempotency_Key="k"))[0] == 409
        first.cancel()
        worker.go_on()
        assert (await second)[0] == 200
        assert (len(worker.requests), worker.num_cancelled) == (1, 0)
        await client.post("/v1/completions", BODY, Idempotency_Key="k")
        assert len(worker.requests) == 2


async def test_a_request_with_a_key_ends_when_its_last_client_leaves(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker:
        worker.faults.append(Fault(kind="hang"))
        async with start_router(worker) as client:
            turn = asyncio.create_task(client.post("/v1/completions", BODY, Idempotency_Key="k"))
            await until(lambda: len(worker.requests) == 1)
            turn.cancel()
            await until(lambda: worker.num_cancelled == 1)
            await until(lambda: client.router.plane.registry.workers()[0].in_flight == 0)
