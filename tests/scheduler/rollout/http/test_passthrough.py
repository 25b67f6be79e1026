"""Requests that are forwarded whole: rerouted, watched and charged like any other turn."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from rose.engine.http.leases import Leases
from rose.scheduler.rollout.formats.completions import Completions
from rose.scheduler.rollout.http import handshakes
from tests.scheduler.rollout.conftest import StartRouter, deaf_client
from tests.scheduler.rollout.scripted_worker import Fault, ScriptedWorker
from tests.scheduler.rollout.waiting import until

TOOL_CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "max_tokens": 64,
}
TURN: dict[str, Any] = {"prompt": [1, 2, 3], "max_tokens": 4}


@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("status", "failed"),
        ("abort_reclaimed", "reclaimed"),
        ("abort_stall", "engine_stall"),
        ("abort_deactivated", "deactivated"),
    ],
)
async def test_a_chat_is_tried_again_whole_and_the_cause_is_the_engines_own(
    start_router: StartRouter, kind: str, cause: str
) -> None:
    async with (
        ScriptedWorker() as a,
        ScriptedWorker() as b,
        start_router(a, (b, "serving"), avoid_s=60) as client,
    ):
        a.faults.append(Fault(kind=kind))
        body = {"messages": [{"role": "user", "content": "hi"}]}
        status, answer = await client.post("/v1/chat/completions", body)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "hello")
        assert client.counters()["reroutes"] == {cause: 1}
        assert (len(a.requests), len(b.requests)) == (1, 1)
        async with client.http.post(
            f"{client.router.url}/v1/chat/completions", json={**body, "stream": True}
        ) as response:
            assert response.content_type == "text/event-stream"
            assert (await response.read()).endswith(b"data: [DONE]\n\n")


class Talkative(ScriptedWorker):
    """Its chats never end."""

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        while True:
            await answer.write(b'data: {"choices": []}\n\n' * 4096)


@pytest.mark.slow
async def test_a_client_that_reads_nothing_of_a_tool_chat_is_cut_off_and_leaves_its_worker(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "UNREAD_S", 0.5)
    async with Talkative() as worker, start_router(worker, turns_per_gpu=1) as client:
        deaf = deaf_client(client.router.url, "/v1/chat/completions", {**TOOL_CHAT, "stream": True})
        await until(lambda: client.known(worker).in_flight == 1)
        await client.complete({"prompt": [3], "max_tokens": 2})
        deaf.close()


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", TOOL_CHAT), ("/v1/completions", TURN)])
async def test_a_worker_refuses_what_comes_under_a_lease_that_has_ended_and_the_router_asks_for_another(
    start_router: StartRouter, path: str, body: dict[str, Any]
) -> None:
    async with (
        ScriptedWorker(leases=Leases()) as worker,
        start_router(worker, heartbeat_s=600, lost_after_s=600) as client,
    ):
        await until(lambda: (lease := client.known(worker).lease) is not None and lease.turns > 0)
        worker.leases = Leases(first_fence=7)  # it has started anew, of which no heartbeat tells
        status, answer = await client.post(path, body)
        assert status == 200, answer
        assert client.counters()["reroutes"] == {"unleased": 1}
        assert (lease := client.known(worker).lease) is not None
        assert (lease.fence, len(worker.requests)) == (7, 1)


async def test_a_tool_chat_on_a_hung_engine_is_rerouted(start_router: StartRouter) -> None:
    async with (
        ScriptedWorker() as hung,
        ScriptedWorker() as healthy,
        start_router(hung, (healthy, "serving"), first_token_s=0.3, avoid_s=60) as client,
    ):
        hung.faults.append(Fault(kind="hang"))
        hung.hold()  # and so the probe gets no token either
        status, _ = await client.post("/v1/chat/completions", TOOL_CHAT)
        assert status == 200
        assert client.counters()["reroutes"] == {"stalled": 1}
        await until(lambda: hung.num_cancelled >= 1)


@pytest.mark.slow
async def test_a_slow_answer_of_an_engine_that_makes_tokens_is_waited_for(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker, first_token_s=0.3) as client:
        worker.faults.append(Fault(kind="slow"))
        chat = asyncio.create_task(client.post("/v1/chat/completions", TOOL_CHAT))
        await until(lambda: sum(body.get("max_tokens") == 1 for body in worker.requests) >= 4)
        worker.finish_slow()
        assert (await chat)[0] == 200
        assert client.counters()["reroutes"] == {}


async def test_a_stream_whose_worker_is_lost_ends_with_an_error(start_router: StartRouter) -> None:
    async with (
        ScriptedWorker() as a,
        ScriptedWorker() as b,
        start_router(a, (b, "serving"), avoid_s=60) as client,
    ):
        a.faults.append(Fault(kind="slow"))
        url = f"{client.router.url}/v1/chat/completions"
        async with client.http.post(url, json={**TOOL_CHAT, "stream": True}) as response:
            assert b'"choices": []' in await response.content.readline()
            client.router.plane.registry.workers()[0].lost("scripted")
            rest = await response.read()
        assert b"was lost" in rest and rest.endswith(b"data: [DONE]\n\n")
        assert not b.requests


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_tokens_of_a_whole_answer_are_charged_to_its_job(
    start_router: StartRouter, is_stream: bool
) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        url, body = f"{client.router.url}/v1/chat/completions", {**TOOL_CHAT, "stream": is_stream}
        async with client.http.post(url, json=body, headers={"X-Rose-Job": "a"}) as response:
            await response.read()
        _, listed = await client.get("/admin/jobs")
        assert (listed["jobs"]["a"]["turns"], listed["jobs"]["a"]["tokens"]) == (1, 64)


async def test_tool_chats_leave_another_job_its_part_of_the_tokens(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker, turns_per_gpu=1) as client:
        order: list[str] = []

        async def ask(job: str, path: str, body: dict[str, Any]) -> None:
            assert (await client.post(path, body, X_Rose_Job=job))[0] == 200
            order.append(job)

        await ask("tools", "/v1/chat/completions", TOOL_CHAT)
        await ask("plain", "/v1/completions", {"prompt": [1], "max_tokens": 64})
        worker.hold()
        blocker = asyncio.create_task(ask("plain", "/v1/completions", {"prompt": [1], "max_tokens": 64}))
        await until(lambda: len(worker.requests) == 3)
        waiting = [
            asyncio.create_task(ask(job, path, body))
            for job, path, body in (
                *[("tools", "/v1/chat/completions", TOOL_CHAT)] * 20,
                *[("plain", "/v1/completions", {"prompt": [1], "max_tokens": 64})] * 20,
            )
        ]
        await until(lambda: client.router.plane.dispatcher.num_queued == 40)
        worker.go_on()
        await asyncio.gather(blocker, *waiting)
        assert 5 <= order[3:23].count("plain") <= 15


async def test_an_aborted_job_ends_a_stream_that_goes_whole_with_an_error_event(
    start_router: StartRouter,
) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        worker.faults.append(Fault(kind="slow"))
        url = f"{client.router.url}/v1/chat/completions"
        async with client.http.post(url, json={**TOOL_CHAT, "stream": True}) as response:
            assert (await client.post("/admin/abort", {}))[1]["aborted"] == 1
            *_, error, done, end = (await response.read()).split(b"\n\n")
        assert (done, end) == (b"data: [DONE]", b"")
        assert json.loads(error[6:])["error"] == {
            "message": "job default was aborted",
            "type": "ConflictError",
            "param": None,
            "code": 409,
        }
        assert (await client.post("/v1/completions", TURN))[0] == 200


async def test_a_worker_that_an_admin_removes_has_not_failed_the_chats_on_it(
    start_router: StartRouter,
) -> None:
    async with (
        ScriptedWorker() as a,
        ScriptedWorker() as b,
        start_router(a, (b, "serving"), max_failures=1) as client,
    ):
        a.faults.append(Fault(kind="slow"))
        asked = asyncio.create_task(client.post("/v1/chat/completions", TOOL_CHAT))
        await until(lambda: len(a.requests) == 1)
        await client.http.delete(f"{client.router.url}/workers/{a.id}")
        assert (await asked)[0] == 200
        assert client.counters()["reroutes"] == {"removed": 1}


async def test_a_bug_of_the_router_ends_a_stream_that_has_begun_with_an_error_event(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise LookupError

    monkeypatch.setattr(Completions, "stream_usage", fail)
    async with ScriptedWorker() as worker, start_router(worker) as client:
        url = f"{client.router.url}/v1/completions"
        async with client.http.post(url, json={**TURN, "stream": True}) as response:
            *_, error, done, end = (await response.read()).split(b"\n\n")
        assert (done, end) == (b"data: [DONE]", b"")
        assert json.loads(error[6:])["error"]["code"] == 500
