"""Bad input gets an error in OpenAI's shape with the right status, and disturbs no worker."""

import asyncio
import json
import time
from typing import Any

import pytest
from aiohttp import web

from rose.scheduler.rollout.http import handshakes
from tests.scheduler.rollout.conftest import Client, StartRouter, deaf_client
from tests.scheduler.rollout.scripted_worker import Fault, ScriptedWorker, expected_tokens
from tests.scheduler.rollout.waiting import until

BODY = {"prompt": [1, 2, 3], "max_tokens": 4}


def assert_error(status: int, answer: Any, code: int, *words: str) -> None:
    assert (status, answer["error"]["code"]) == (code, code), answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    for word in words:
        assert word in answer["error"]["message"]


async def send_raw(client: Client, data: bytes, **headers: str) -> tuple[int, Any]:
    url = f"{client.router.url}/v1/completions"
    async with client.http.post(url, data=data, headers=headers) as response:
        return response.status, await response.json()


@pytest.mark.parametrize("data", [b"", b"{", b'{"prompt": [1,2}', b"\xff\xfe", b"[]"])
async def test_malformed_json_is_400(start_router: StartRouter, data: bytes) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        assert_error(*await send_raw(client, data), 400, "body")
        assert not worker.requests


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/inference/v1/generate", "/generate"]
)
async def test_an_unknown_model_is_404_and_names_the_known(start_router: StartRouter, path: str) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        body = {"model": "gpt-7", "prompt": [1], "token_ids": [1], "input_ids": [1], "messages": []}
        assert_error(*await client.post(path, body), 404, "gpt-7", "scripted")
        assert_error(*await client.post(path, {**body, "model": 7}), 400, "model")
        assert not worker.requests


async def test_a_model_that_was_loaded_meanwhile_is_found(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        worker.models.append("adapter")
        await client.complete({**BODY, "model": "adapter"})


class CountingWorker(ScriptedWorker):
    num_asked = 0

    async def _models(self, request: web.Request) -> web.Response:
        self.num_asked += 1
        return await super()._models(request)


async def test_clients_that_name_unknown_models_cause_few_questions_to_workers(
    start_router: StartRouter,
) -> None:
    worker = CountingWorker()
    async with worker, start_router(worker, heartbeat_s=1) as client:
        before, began = worker.num_asked, time.monotonic()
        for _ in range(2):
            answers = [client.post("/v1/completions", {**BODY, "model": f"m{i}"}) for i in range(20)]
            assert {status for status, _ in await asyncio.gather(*answers)} == {404}
        most = 3 + 3 * (time.monotonic() - began)  # two rounds a second, and the router's own questions
        assert worker.num_asked - before <= most


async def test_a_prompt_over_the_context_is_400_with_both_numbers(start_router: StartRouter) -> None:
    async with ScriptedWorker(max_model_len=100) as worker, start_router(worker) as client:
        await client.complete({**BODY, "prompt": [7] * 99})
        full = "(length 100) plus the number of requested output tokens (at least 1) is longer than"
        assert_error(*await client.post("/v1/completions", {**BODY, "prompt": [7] * 100}), 400, full)
        over = {**BODY, "prompt": [[1], list(range(1000, 2000))]}
        found = await client.post("/v1/completions", over)
        # LangChain and litellm know the error by vLLM's words.
        assert_error(*found, 400, "This model's maximum context length is 100 tokens", "1000 input tokens")
        assert found[1]["error"]["param"] == "input_tokens"
        too_many = {**BODY, "max_tokens": 101}
        words = "max_tokens=101 cannot be greater than max_model_len=100"
        assert_error(*await client.post("/v1/completions", too_many), 400, words)
        assert len(worker.requests) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        *[({"prompt": prompt}, "prompt:") for prompt in ([], "", [1, "a"])],
        *[({"n": n}, "n:") for n in (-1, 0, 1.5, "2", True)],
        *[({"n": n}, f"n must be at most 16384, got {n}") for n in (16385, 65536, 10**9)],
        ({"prompt": [[1]] * 40_000, "n": 2}, "65536"),
        ({"stream_options": "usage"}, "stream_options:"),
        ({"stream_options": []}, "stream_options:"),
        ({"stream_interval": "often"}, "stream_interval:"),
        *[({"max_tokens": most}, "max_tokens:") for most in (2**63, "9")],
        ({"seed": 1.5}, "seed:"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_field_that_the_router_reads_itself_is_400_where_it_is_malformed(
    start_router: StartRouter, fields: dict[str, object], words: str, is_stream: bool
) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        body = {**BODY, "stream": is_stream, **fields}
        assert_error(*await client.post("/v1/completions", body), 400, words)
        assert not worker.requests


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1, 2], "max_tokens": 3.0, "n": 1.0, "seed": 7.0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3.0}),
        ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3.0}}),
        ("/generate", {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3.0}}),
    ],
)
async def test_a_whole_number_may_have_a_decimal_point(
    start_router: StartRouter, path: str, body: dict[str, object]
) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        assert (await client.post(path, body))[0] == 200
        assert repr(worker.requests[0]["max_tokens"]) == "3"


async def test_a_chat_with_malformed_stream_options_is_refused_by_the_worker(
    start_router: StartRouter,
) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        worker.faults.append(Fault(kind="status", status=400))
        body = {"messages": [], "max_tokens": 4, "stream_options": "usage"}
        assert (await client.post("/v1/chat/completions", body))[0] == 400
        assert client.counters()["turns"] == {"Refused": 1}


@pytest.mark.parametrize("name", [b"Authorization", b"X-Rose-Job", b"X-Session-ID", b"Idempotency-Key"])
async def test_a_header_that_is_not_utf8_is_400(start_router: StartRouter, name: bytes) -> None:
    async with ScriptedWorker() as worker, start_router(worker, api_key="k") as client:
        host, port = client.router.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = b'{"prompt":[1],"max_tokens":1}'
        for value, wanted in ((b"\xff", b" 400 "), ("k\u00e9".encode(), b" 401 ")):
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n%b: %b\r\nContent-Length: %d\r\n\r\n"
            writer.write(head % (name, value, len(body)) + body)
            answer = await reader.readuntil(b"}}")
            assert wanted in answer and b'"error"' in answer
        writer.close()
        assert not worker.requests


async def test_a_duplicate_worker_and_one_of_another_run_are_409(start_router: StartRouter) -> None:
    async with (
        ScriptedWorker(version="mine/1") as a,
        ScriptedWorker(version="other/9") as b,
        start_router(a, run_id="mine") as client,
    ):
        assert_error(*await client.post("/workers", {"url": a.url}), 409, a.id)
        assert_error(*await client.post("/workers", {"url": b.url}), 409, "other/9", "mine")
        assert_error(*await client.post("/workers", {"url": b.url, "gpu": 1}), 400, "gpu")
        await client.complete(BODY)
        assert not b.requests


async def test_names_over_the_limit_are_400_with_their_length(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        for body, headers in (
            ({"session_id": "s" * 2000}, {}),
            ({}, {"X_Session_ID": "s" * 2000}),
            ({}, {"X_Rose_Job": "j" * 2000}),
        ):
            status, answer = await client.post("/v1/completions", {**BODY, **body}, **headers)
            assert_error(status, answer, 400, "2000 characters")
        assert not worker.requests


async def test_a_body_over_the_limit_is_413(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker, max_body_bytes=2048) as client:
        assert_error(*await client.post("/v1/completions", {**BODY, "prompt": [1] * 2000}), 413)
        await client.complete(BODY)
        assert len(worker.requests) == 1


async def test_a_body_that_is_not_encoded_as_it_says_is_400(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        assert_error(*await client.post("/v1/completions", BODY, Content_Encoding="gzip"), 400)
        assert not worker.requests


async def test_a_body_that_arrives_too_slowly_is_408_and_other_requests_go_on(
    start_router: StartRouter,
) -> None:
    async with ScriptedWorker() as worker, start_router(worker, body_s=0.3) as client:
        host, port = client.router.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
        await writer.drain()
        await client.complete(BODY)
        assert b" 408 " in await reader.readline()
        writer.close()
        assert len(worker.requests) == 1


@pytest.mark.slow
async def test_a_client_that_reads_nothing_is_cut_off_and_leaves_its_place_to_others(
    start_router: StartRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "UNREAD_S", 0.5)
    body = {"stream": True, "max_tokens": 50_000, "logprobs": 1, "return_token_ids": True}
    async with ScriptedWorker() as worker, start_router(worker, turns_per_gpu=1) as client:
        asked = {"model": "scripted", "prompt": [1, 2], **body}
        deaf = deaf_client(client.router.url, "/v1/completions", asked)
        await until(lambda: client.known(worker).in_flight == 1)
        assert (await client.complete({"model": "scripted", "prompt": [3], "max_tokens": 2}))["choices"]
        deaf.close()


async def test_a_connection_over_the_limit_is_answered_503_and_one_that_ends_makes_room(
    start_router: StartRouter,
) -> None:
    async with ScriptedWorker() as worker, start_router(worker, max_connections=2) as client:
        host, port = client.router.url.removeprefix("http://").split(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        status, answer = await client.post("/v1/completions", BODY)
        assert_error(status, answer, 503, "2 connections", "max_connections")
        held[0][1].close()
        while status == 503:
            status, answer = await client.post("/v1/completions", BODY)
        assert (status, len(worker.requests)) == (200, 1)
        held[1][1].close()


async def test_an_admin_is_heard_while_clients_hold_every_connection(start_router: StartRouter) -> None:
    keys = {"api_key": "cli", "admin_key": "adm"}
    async with ScriptedWorker() as worker, start_router(worker, max_connections=2, **keys) as client:
        host, port = client.router.url.removeprefix("http://").split(":")
        held = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        for key in ("cli", "adm"):
            status, answer = await client.post("/v1/completions", BODY, Authorization=f"Bearer {key}")
            assert_error(status, answer, 503, "2 connections", "max_connections")
        for key, expected in (("cli", 503), ("adm", 200)):
            headers = {"Authorization": f"Bearer {key}"}
            async with client.http.get(f"{client.router.url}/admin/status", headers=headers) as response:
                assert response.status == expected
        for _, writer in held:
            writer.close()


async def test_a_client_takes_no_connection_from_an_admin_who_has_no_key_of_his_own(
    start_router: StartRouter,
) -> None:
    async with ScriptedWorker() as worker, start_router(worker, max_connections=1, api_key="cli") as client:
        host, port = client.router.url.removeprefix("http://").split(":")
        _, held = await asyncio.open_connection(host, int(port))
        for headers in ({}, {"Authorization": "Bearer cli"}):
            async with client.http.get(f"{client.router.url}/admin/status", headers=headers) as response:
                assert response.status == 503
        held.close()


async def test_many_new_jobs_at_once_get_no_account_over_the_limit(start_router: StartRouter) -> None:
    """The router asks its workers for a model that is new to it, and meanwhile further requests come."""
    async with ScriptedWorker() as worker, start_router(worker, max_jobs=1) as client:
        worker.models = ["scripted", "new"]
        body = {**BODY, "model": "new"}
        asked = (client.post("/v1/completions", body, X_Rose_Job=f"job-{number}") for number in range(10))
        statuses = [status for status, _ in await asyncio.gather(*asked)]
        assert sorted(statuses) == [200, *[429] * 9]


async def test_jobs_over_the_limit_get_no_account_and_no_metrics(start_router: StartRouter) -> None:
    jobs = {"declared": {"weight": 2.0}}
    async with ScriptedWorker() as worker, start_router(worker, max_jobs=2, jobs=jobs) as client:
        for job in ("a", "b"):
            await client.complete(BODY, X_Rose_Job=job)
        for number in range(10):
            body = {**BODY, "n": 1 + number % 2}
            status, answer = await client.post("/v1/completions", body, X_Rose_Job=f"stranger-{number}")
            assert_error(status, answer, 429, f"stranger-{number}", "max_jobs")
        for job in ("declared", "a"):
            await client.complete(BODY, X_Rose_Job=job)
        await client.complete(BODY)
        async with client.http.get(f"{client.router.url}/metrics") as response:
            assert "stranger" not in await response.text()


@pytest.mark.slow
async def test_a_head_that_never_ends_holds_no_connection(start_router: StartRouter) -> None:
    # Long enough for an honest client of this very process, should the machine stall for a moment.
    async with ScriptedWorker() as worker, start_router(worker, idle_s=4) as client:
        host, port = client.router.url.removeprefix("http://").split(":")
        fresh, kept_alive = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        kept_alive[1].write(b"GET /v1/nothing HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 404 " in await kept_alive[0].readuntil(b"}}")
        for _, writer in (fresh, kept_alive):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        await client.complete(BODY)
        readings = [asyncio.create_task(reader.read()) for reader, _ in (fresh, kept_alive)]
        # Each line is progress of a kind, and yet the head never ends.
        while not all(reading.done() for reading in readings):
            for _, writer in (fresh, kept_alive):
                writer.write(b"X-Slow: 1\r\n")
            await asyncio.wait(readings, timeout=0.05)
        for read in await asyncio.gather(*readings, return_exceptions=True):
            assert read == b"" or isinstance(read, ConnectionError)  # a reset where a line was on its way
        for _, writer in (fresh, kept_alive):
            writer.close()


@pytest.mark.parametrize(
    ("path", "code"), [("/v1/nothing", 404), ("/rose/v1/weights", 404), ("/health", 405)]
)
async def test_errors_of_unknown_paths_and_methods_have_openais_shape(
    start_router: StartRouter, path: str, code: int
) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        assert_error(*await client.post(path, {}), code, path)


@pytest.mark.parametrize("given", ["soon", "0", "-1", "nan"])
async def test_a_malformed_timeout_header_is_400(start_router: StartRouter, given: str) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        assert_error(*await client.post("/v1/completions", BODY, X_Rose_Timeout_S=given), 400, given)
        assert not worker.requests


async def test_an_unknown_run_is_404_and_names_the_known_runs(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        await client.complete(BODY, X_Rose_Run="first")  # nothing is published yet: any run may begin
        worker.version = "first/1"
        await until(lambda: bool(client.router.plane.registry.newest.numbers))
        for path in ("/v1/completions", "/v1/chat/completions"):
            body = {**BODY, "messages": []}
            assert_error(*await client.post(path, body, X_Rose_Run="frist"), 404, "frist", "known: first")
        await client.complete(BODY, X_Rose_Run="first")
        assert len(worker.requests) == 2


async def test_the_only_run_of_a_router_is_known_before_its_first_weights(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker, run_id="mine") as client:
        await client.complete(BODY, X_Rose_Run="mine")
        assert_error(*await client.post("/v1/completions", BODY, X_Rose_Run="other"), 404, "known: mine")


async def test_an_empty_job_name_is_400(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        assert_error(*await client.post("/v1/completions", BODY, X_Rose_Job=" "), 400, "X-Rose-Job")
        assert not worker.requests


@pytest.mark.parametrize(
    ("head", "code"),
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: %b\r\n\r\n" % (b"a" * 200_000), 431),
        (b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 200_000), 431),
        (b"nonsense\r\n\r\n", 400),
        (b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n", 400),
        (b"GET /v1/nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 404),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200),
    ],
)
async def test_no_answer_names_a_library_and_every_error_is_json(
    start_router: StartRouter, head: bytes, code: int
) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        host, port = client.router.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head)
        answer = await reader.read()
        writer.close()
        top, _, body = answer.partition(b"\r\n\r\n")
        assert b" %d " % code in top.splitlines()[0]
        assert b"server: rose-router" in top.lower()
        assert b"aiohttp" not in answer.lower() and b"python" not in answer.lower()
        if code != 200:
            assert_error(code, json.loads(body), code)


async def test_ids_come_back_whatever_the_client_writes_between_them(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        for text in (b"[1,2,3]", b"[1, 2, 3]", b"[ 1,\n2 ,3 ]"):
            status, answer = await send_raw(
                client, b'{"max_tokens": 4, "return_token_ids": true, "prompt": %b}' % text
            )
            assert status == 200
            (choice,) = answer["choices"]
            assert choice["prompt_token_ids"] == [1, 2, 3]
            assert choice["token_ids"] == expected_tokens([1, 2, 3], 4)
