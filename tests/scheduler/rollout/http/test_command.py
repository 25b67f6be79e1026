"""The router as its clients see it: fan-out, queues, affinity, versions, membership, keys, draining."""

import asyncio
import signal
import sys
from typing import Any

import aiohttp
import pytest

from rose.errors import WorkerError
from rose.scheduler.rollout.router_config import RouterConfig
from rose.trainers.router import router_announcer
from tests.scheduler.rollout.conftest import StartRouter
from tests.scheduler.rollout.scripted_worker import Fault, ScriptedWorker, expected_tokens
from tests.scheduler.rollout.waiting import until

PROMPT = [11, 12, 13]
BODY = {"prompt": PROMPT, "max_tokens": 5}


async def test_batch_and_n_are_fanned_out_and_come_back_prompt_major(start_router: StartRouter) -> None:
    prompts = [[1, 2], [3, 4, 5], [6]]
    async with ScriptedWorker() as a, ScriptedWorker() as b, start_router(a, b) as client:
        answer = await client.complete({"prompt": prompts, "n": 2, "max_tokens": 4, "seed": 7})
        assert [c["index"] for c in answer["choices"]] == list(range(6))
        assert [c["prompt_token_ids"] for c in answer["choices"]] == [p for p in prompts for _ in range(2)]
        assert [c["token_ids"] for c in answer["choices"]] == [
            expected_tokens(p, 4) for p in prompts for _ in range(2)
        ]
        assert answer["usage"]["prompt_tokens"] == 6
        assert answer["usage"]["completion_tokens"] == 24
        sent = [*a.requests, *b.requests]
        assert len(sent) == 6 and all("n" not in r and r["stream"] for r in sent)
        assert sorted(r["seed"] for r in sent) == [7, 7, 7, 8, 8, 8]
        assert len(a.requests) == len(b.requests) == 3


async def test_unseeded_siblings_stay_unseeded(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        await client.complete({**BODY, "n": 4})
        assert not any("seed" in r for r in worker.requests)


async def test_token_ids_are_only_shown_to_clients_that_asked(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        _, answer = await client.post("/v1/completions", {"prompt": "text", "max_tokens": 2})
        choice = answer["choices"][0]
        assert (choice["token_ids"], choice["prompt_token_ids"], choice["logprobs"]) == (None, None, None)
        assert answer["usage"]["prompt_tokens"] == 4


async def test_what_cannot_be_streamed_goes_to_one_worker_whole(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        status, answer = await client.post("/v1/completions", {**BODY, "prompt_logprobs": 1})
        assert (status, answer["whole"]) == (200, True)


async def test_turns_over_the_cap_spill_to_serving_and_the_rest_waits(start_router: StartRouter) -> None:
    async with (
        ScriptedWorker() as a,
        ScriptedWorker() as s,
        start_router(a, (s, "serving"), turns_per_gpu=2) as client,
    ):
        a.hold()
        s.hold()
        turns = [asyncio.create_task(client.complete(BODY)) for _ in range(7)]
        await until(lambda: client.router.plane.dispatcher.num_queued == 3)
        await until(lambda: (len(a.requests), len(s.requests)) == (2, 2))
        assert [w.in_flight for w in client.router.plane.registry.workers()] == [2, 2]
        a.go_on()
        s.go_on()
        await asyncio.gather(*turns)
        assert client.router.plane.dispatcher.num_queued == 0
        assert all(w.in_flight == 0 for w in client.router.plane.registry.workers())


async def test_serving_under_pressure_gets_no_turn(start_router: StartRouter) -> None:
    async with ScriptedWorker(pressure="pressure") as s, start_router((s, "serving")) as client:
        turn = asyncio.create_task(client.complete(BODY))
        await until(lambda: client.router.plane.dispatcher.num_queued == 1)
        assert not s.requests
        s.pressure = "frozen"
        await turn


async def test_turns_wait_while_the_only_worker_is_inactive(start_router: StartRouter) -> None:
    async with ScriptedWorker(is_active=False) as worker, start_router(worker) as client:
        turn = asyncio.create_task(client.complete(BODY))
        await until(lambda: client.router.plane.dispatcher.num_queued == 1)
        assert not worker.requests
        worker.is_active = True
        await turn


async def test_a_full_queue_is_429_and_a_passed_deadline_504(start_router: StartRouter) -> None:
    async with (
        ScriptedWorker(pressure="pressure") as s,
        start_router((s, "serving"), max_queued_per_job=1) as client,
    ):
        waiting = asyncio.create_task(client.post("/v1/completions", BODY))
        await until(lambda: client.router.plane.dispatcher.num_queued == 1)
        async with client.http.post(f"{client.router.url}/v1/completions", json=BODY) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
        late = {"X_Rose_Job": "b", "X_Rose_Timeout_S": "0.1"}
        assert (await client.post("/v1/completions", BODY, **late))[0] == 504
        s.pressure = "normal"
        assert (await waiting)[0] == 200


async def test_a_call_with_more_turns_than_can_run_and_wait_is_429_before_any_of_them_begins(
    start_router: StartRouter,
) -> None:
    async with (
        ScriptedWorker() as worker,
        start_router(worker, turns_per_gpu=2, max_queued_per_job=3) as client,
    ):
        status, answer = await client.post("/v1/completions", {**BODY, "n": 6})
        assert (status, "6 turns" in answer["error"]["message"]) == (429, True)
        assert not worker.requests
        assert len((await client.complete({**BODY, "n": 5}))["choices"]) == 5


@pytest.mark.parametrize("headers", [{"X_Session_ID": "s"}, {}])
async def test_the_next_turn_returns_to_the_worker_of_the_last(
    start_router: StartRouter, headers: dict[str, str]
) -> None:
    async with ScriptedWorker() as a, ScriptedWorker() as b, start_router(a, b) as client:
        client.router.plane.registry.workers()[0].suspect(float("inf"), RouterConfig())
        first = (await client.complete(BODY, **headers))["choices"][0]
        client.router.plane.registry.workers()[0].suspect(0.0, RouterConfig())
        await client.complete({"prompt": [*PROMPT, *first["token_ids"], 9, 9], "max_tokens": 3}, **headers)
        assert sorted((len(a.requests), len(b.requests))) == [0, 2]


async def test_stale_workers_are_skipped_and_the_version_salts_the_cache(start_router: StartRouter) -> None:
    async with (
        ScriptedWorker(version="run/2") as old,
        ScriptedWorker(version="run/3") as new,
        start_router(old, new) as client,
    ):
        answers = [await client.complete(BODY, X_Session_ID=str(i)) for i in range(3)]
        assert not old.requests
        assert {r["cache_salt"] for r in new.requests} == {"run:3"}
        assert answers[0]["choices"][0]["rose"]["spans"][0]["weight_version"] == "run/3"


async def test_a_pinned_session_whose_weights_are_gone_is_409_until_it_is_finished(
    start_router: StartRouter,
) -> None:
    async with (
        ScriptedWorker(version="run/2") as worker,
        start_router(worker, version_mode="pinned") as client,
    ):
        await client.complete(BODY, X_Session_ID="s")
        worker.version = "run/3"
        await until(lambda: str(client.known(worker).weight_version) == "run/3")
        status, answer = await client.post("/v1/completions", BODY, X_Session_ID="s")
        assert status == 409
        assert "run/2" in answer["error"]["message"]
        assert await client.post("/finish_session?session_id=s", {}) == (200, {})
        assert await client.post("/finish_session?session_id=unknown", {}) == (200, {})
        await client.complete(BODY, X_Session_ID="s")


async def test_workers_come_and_go_at_run_time(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router() as client:
        assert (await client.get("/health"))[0] == 503
        assert (await client.post("/v1/completions", BODY))[0] == 503
        assert await client.post("/workers", {"url": worker.url, "kind": "serving"}) == (
            201,
            {"id": worker.id, "alive": True},
        )
        assert (await client.post("/workers", {"url": worker.url}))[0] == 409
        assert (await client.post("/workers", {"url": "nonsense"}))[0] == 400
        await client.complete(BODY)
        _, listed = await client.get("/workers")
        assert [(w["id"], w["kind"], w["tokens"]) for w in listed["workers"]] == [(worker.id, "serving", 5)]
        async with client.http.delete(f"{client.router.url}/workers/{worker.id}") as response:
            assert response.status == 200
        assert (await client.post("/v1/completions", BODY))[0] == 503


async def test_a_returning_worker_is_on_probation_until_it_makes_a_token(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        entry = client.router.plane.registry.workers()[0]
        entry.lost("scripted")
        await until(lambda: entry.is_alive)
        assert entry.view().cap == 1
        worker.hold()
        turns = [asyncio.create_task(client.complete(BODY)) for _ in range(3)]
        await until(lambda: client.router.plane.dispatcher.num_queued == 2)
        await until(lambda: len(worker.requests) == 1)
        worker.go_on()
        await asyncio.gather(*turns)
        assert entry.view().cap == 16


async def test_a_stock_vllm_is_kept_alive_by_health(start_router: StartRouter) -> None:
    async with ScriptedWorker(has_rose_routes=False) as worker, start_router(worker) as client:
        await client.complete(BODY)
        assert not client.router.plane.registry.workers()[0].has_rose_routes
        _, answer = await client.post("/admin/rl_step", {"step": 1})
        assert answer["workers"][worker.id] == "no /rose/v1 on this worker"


async def test_rl_step_reaches_every_worker_and_the_counts_are_shown(start_router: StartRouter) -> None:
    async with ScriptedWorker() as a, ScriptedWorker() as b, start_router(a, (b, "serving")) as client:
        _, answer = await client.post("/admin/rl_step", {"step": 4})
        assert answer == {"step": 4, "workers": {a.id: "ok", b.id: "ok"}}
        assert (a.steps, b.steps) == ([4], [4])
        assert (await client.post("/admin/rl_step", {"step": -1}))[0] == 400
        await client.complete(BODY)
        _, status = await client.get("/admin/status")
        assert status["counters"]["turns"] == {"finished": 1}
        async with client.http.get(f"{client.router.url}/metrics") as response:
            text = await response.text()
        assert 'rose_router_turns_total{result="finished"} 1.0' in text
        assert 'rose_router_job_tokens_total{job="default"} 5.0' in text
        assert f'rose_router_worker_tokens_total{{kind="dedicated",worker="{a.id}"}} 5.0' in text


async def test_each_key_guards_its_own_routes_and_worker_routes_stay_hidden(
    start_router: StartRouter,
) -> None:
    async with ScriptedWorker() as worker, start_router(worker, admin_key="adm", api_key="cli") as client:
        assert (await client.post("/v1/completions", BODY, Authorization="Bearer no"))[0] == 401
        assert not worker.requests
        for path in ("/v1/completions", "/generate"):
            assert (await client.post(path, BODY))[0] == 401
        for path in ("/admin/status", "/workers"):
            status, answer = await client.get(path)
            assert (status, "key" in answer["error"]["message"]) == (401, True)
        for scheme in ("Bearer ", "bearer ", "BEARER  "):
            assert (await client.post("/v1/completions", BODY, Authorization=f"{scheme}cli"))[0] == 200
        assert (await client.post("/admin/rl_step", {"step": 1}, Authorization="Bearer cli"))[0] == 401
        assert (await client.post("/admin/rl_step", {"step": 1}, Authorization="Bearer adm"))[0] == 200
        assert (await client.get("/health"))[0] == 200
        for path in ("/rose/v1/status", "/pause", "/collective_rpc"):
            async with client.http.get(
                client.router.url + path, headers={"Authorization": "Bearer cli"}
            ) as response:
                assert response.status == 404


@pytest.mark.parametrize("key", ["api_key", "worker_api_key", "rose_key"])
async def test_nobody_without_the_admin_key_adds_a_worker_to_a_router_that_has_keys(
    start_router: StartRouter, key: str
) -> None:
    async with ScriptedWorker() as worker, ScriptedWorker() as stranger:
        async with start_router(worker, **{key: "secret"}) as client:
            for header in ({}, {"Authorization": "Bearer secret"}):
                status, answer = await client.post("/workers", {"url": stranger.url}, **header)
                assert (status, "ROSE_ROUTER_ADMIN_KEY" in answer["error"]["message"]) == (403, True)
            for path in (f"/workers/{worker.id}/drain", "/admin/rl_step", "/admin/drain", "/admin/abort"):
                assert (await client.post(path, {}))[0] == 403
            with pytest.raises(
                WorkerError, match=r"RL step 1 could not be announced: 403 .*ROUTER_ADMIN_KEY"
            ):
                await asyncio.to_thread(router_announcer(client.router.url, None), 1)
            assert worker.steps == []
            assert [w.id for w in client.router.plane.registry.workers()] == [worker.id]
        async with start_router(worker, admin_key="adm", **{key: "secret"}) as client:
            assert (await client.post("/workers", {"url": stranger.url}))[0] == 401
            added = await client.post("/workers", {"url": stranger.url}, Authorization="Bearer adm")
            assert added[0] == 201
            await asyncio.to_thread(router_announcer(client.router.url, "adm"), 1)
            assert worker.steps == [1]


@pytest.mark.parametrize("admin", [{}, {"admin_key": "adm"}])
async def test_the_members_key_changes_workers_and_nothing_else(
    start_router: StartRouter, admin: dict[str, str]
) -> None:
    async with (
        ScriptedWorker() as worker,
        ScriptedWorker() as other,
        start_router(worker, member_key="mem", api_key="cli", **admin) as client,
    ):
        body = {"url": other.url}
        for key, expected in (("cli", 401), ("no", 401), ("mem", 201)):
            assert (await client.post("/workers", body, Authorization=f"Bearer {key}"))[0] == expected
        step = await client.post("/admin/rl_step", {"step": 1}, Authorization="Bearer mem")
        assert step[0] == (401 if admin else 403)
        assert (await client.post("/v1/completions", BODY, Authorization="Bearer mem"))[0] == 401
        if admin:
            drained = await client.post(f"/workers/{other.id}/drain", {}, Authorization="Bearer adm")
            assert drained[0] == 200


async def test_a_router_on_an_ipv6_address_answers_at_its_own_url(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker, host="::1") as client:
        assert client.router.url.startswith("http://[::1]:")
        await client.complete(BODY)


async def test_a_client_that_leaves_frees_the_worker(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker:
        worker.faults.append(Fault(kind="hang", after_tokens=1))
        async with start_router(worker) as client:
            turn = asyncio.create_task(client.complete(BODY))
            await until(lambda: client.router.plane.registry.workers()[0].num_tokens == 1)
            turn.cancel()
            await until(lambda: worker.num_cancelled == 1)
            await until(lambda: client.router.plane.registry.workers()[0].in_flight == 0)
            assert client.counters()["turns"] == {"cancelled": 1}


async def test_a_client_that_leaves_its_stream_is_no_fault_of_the_worker(start_router: StartRouter) -> None:
    body = {"prompt": PROMPT, "n": 8, "max_tokens": 400, "stream": True}
    async with ScriptedWorker() as worker, start_router(worker) as client:
        for _ in range(5):
            response = await client.http.post(f"{client.router.url}/v1/completions", json=body)
            await response.content.readany()
            response.close()
            await until(lambda: client.known(worker).in_flight == 0)
        assert client.counters()["reroutes"] == {}
        assert not client.known(worker).is_on_probation


async def test_sigterm_lets_turns_in_flight_finish() -> None:
    async with ScriptedWorker() as worker:
        worker.hold()
        command = [sys.executable, "-m", "rose.scheduler.rollout.http.command", "--port", "0"]
        process = await asyncio.create_subprocess_exec(
            *(*command, "--worker", worker.url),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            assert process.stdout is not None
            url = (await process.stdout.readline()).decode().split()[-1]
            async with aiohttp.ClientSession() as http:
                turn = asyncio.create_task(
                    post_json(http, f"{url}/v1/completions", {**BODY, "return_token_ids": True})
                )
                await until(lambda: bool(worker.requests))
                process.send_signal(signal.SIGTERM)
                worker.go_on()
                assert (await turn)["choices"][0]["token_ids"] == expected_tokens(PROMPT, 5)
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def post_json(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    async with http.post(url, json=body) as response:
        return await response.json()
