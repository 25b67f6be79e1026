"""The router against a scripted worker: every fault ends in the undisturbed answer or a clear error."""

import asyncio
import json
import time
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.scheduler.rollout.conftest import StartRouter
from tests.scheduler.rollout.scripted_worker import Fault, ScriptedWorker, expected_tokens
from tests.scheduler.rollout.waiting import until

PROMPT = [11, 12, 13]
BODY = {"prompt": PROMPT, "max_tokens": 9, "logprobs": 0, "return_tokens_as_token_ids": True}


def assert_whole(choice: dict[str, Any], num_tokens: int = 9, prompt: list[int] = PROMPT) -> None:
    """The choice is that of an undisturbed run, whatever happened."""
    tokens = expected_tokens(prompt, num_tokens)
    assert choice["token_ids"] == tokens
    assert choice["prompt_token_ids"] == prompt
    assert choice["text"] == "".join(f"<{t}>" for t in tokens)
    assert choice["logprobs"]["tokens"] == [f"token_id:{t}" for t in tokens]
    assert choice["logprobs"]["token_logprobs"] == [-t / 1000 for t in tokens]
    lengths = [len(token) for token in choice["logprobs"]["tokens"]]
    assert choice["logprobs"]["text_offset"] == [sum(lengths[:i]) for i in range(num_tokens)]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("after", [0, 4])
@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        ("abort_reclaimed", "reclaimed"),
        ("abort_stall", "engine_stall"),
        ("abort_deactivated", "deactivated"),
        ("swallowed", "aborted"),
        ("hang", "stalled"),
        ("disconnect", "lost"),
        ("error", "failed"),
        ("status", "failed"),
    ],
)
@pytest.mark.slow
async def test_a_cut_turn_is_finished_on_the_other_worker(
    start_router: StartRouter, kind: str, cause: str, after: int
) -> None:
    async with ScriptedWorker() as bad, ScriptedWorker() as good:
        bad.faults.append(Fault(kind=kind, after_tokens=after))
        # Where a stall is meant, long enough that the other worker never seems to stall on a busy machine.
        stall = {"stall_s": 1, "first_token_s": 1} if cause == "stalled" else {}
        async with start_router(bad, (good, "serving"), avoid_s=60, **stall) as client:
            answer = await client.complete(BODY)
            choice = answer["choices"][0]
            assert_whole(choice)
            kept = after if kind != "status" else 0
            assert good.requests[0]["prompt"] == PROMPT + expected_tokens(PROMPT, kept)
            assert good.requests[0]["max_tokens"] == 9 - kept
            assert client.counters()["reroutes"] == {cause: 1}
            assert choice["rose"]["resumes"] == (1 if kept else 0)
            workers = [(span["worker"], span["tokens"]) for span in choice["rose"]["spans"]]
            assert workers == ([(bad.id, kept)] if kept else []) + [(good.id, 9 - kept)]
            assert answer["usage"]["completion_tokens"] == 9
            if kind == "hang":
                await until(lambda: bad.num_cancelled == 1)


async def test_a_resumed_turn_whose_prefill_outlasts_the_stall_limit_finishes_on_the_one_worker_left(
    start_router: StartRouter,
) -> None:
    async with ScriptedWorker(prefill_s=1.0) as left, ScriptedWorker() as dying:
        dying.faults.append(Fault(kind="disconnect", after_tokens=4))
        limits = {"first_token_s": 0.2, "deadline_s": 60, "policy": "paper"}
        async with start_router((left, "serving"), dying, max_failures=1000, avoid_s=0.1, **limits) as client:
            dying_one = client.known(dying)
            asked = asyncio.create_task(client.complete(BODY))
            await until(lambda: bool(left.requests))
            assert left.requests[0]["prompt"] == PROMPT + expected_tokens(PROMPT, 4)
            dying_one.drain()
            assert_whole((await asked)["choices"][0])
            counts = client.counters()["reroutes"]
            assert counts["lost"] == 1
            assert counts["stalled"] >= 1


async def test_several_cuts_in_a_row_are_all_resumed(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker:
        worker.faults.extend(Fault(kind="abort_reclaimed", after_tokens=n) for n in (2, 1, 0, 3))
        async with start_router(worker) as client:
            choice = (await client.complete(BODY))["choices"][0]
            assert_whole(choice)
            assert choice["rose"]["resumes"] == 4


async def test_stop_strings_restart_instead_of_resuming(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker:
        worker.faults.append(Fault(kind="abort_reclaimed", after_tokens=3))
        async with start_router(worker) as client:
            choice = (await client.complete({**BODY, "stop": ["never"]}))["choices"][0]
            assert_whole(choice)
            assert worker.requests[1]["prompt"] == PROMPT
            assert (choice["rose"]["restarts"], client.counters()["tokens_dropped"]) == (1, 3)


async def test_an_answer_that_ended_before_its_stream_broke_off_is_whole(start_router: StartRouter) -> None:
    """To resume it would be to go on behind its end."""
    async with ScriptedWorker(stops_after=4) as worker:
        worker.faults.append(Fault(kind="disconnect", after_tokens=4))
        async with start_router(worker) as client:
            choice = (await client.complete(BODY))["choices"][0]
            assert choice["token_ids"] == expected_tokens(PROMPT, 4)
            assert (choice["finish_reason"], len(worker.requests)) == ("stop", 1)


GRAMMAR = {**BODY, "structured_outputs": {"regex": "x*"}}


@pytest.mark.parametrize("state", [{"structured_outputs": {"regex": "x*"}}, {"presence_penalty": 0.5}])
async def test_a_state_goes_on_where_engines_take_it_over(
    start_router: StartRouter, state: dict[str, Any]
) -> None:
    async with ScriptedWorker(continues_state=True) as worker:
        worker.faults.append(Fault(kind="abort_reclaimed", after_tokens=3))
        async with start_router(worker) as client:
            known = client.known(worker)
            await until(lambda: known.continues_state)
            assert_whole((await client.complete({**BODY, **state}))["choices"][0])
            assert worker.requests[1]["vllm_xargs"] == {"rose_generated": 3}
            assert (client.counters()["resumed"], client.counters()["restarted"]) == (1, 0)


async def test_a_grammar_starts_again_on_a_worker_that_cant_take_it_over(start_router: StartRouter) -> None:
    async with ScriptedWorker(continues_state=True) as bad, ScriptedWorker(has_rose_routes=False) as good:
        bad.faults.append(Fault(kind="disconnect", after_tokens=3))
        async with start_router(bad, (good, "serving"), avoid_s=60) as client:
            choice = (await client.complete(GRAMMAR))["choices"][0]
            assert_whole(choice)
            assert (choice["rose"]["resumes"], choice["rose"]["restarts"]) == (0, 1)
            assert good.requests[0]["prompt"] == PROMPT and "vllm_xargs" not in good.requests[0]
            assert (client.counters()["resumed"], client.counters()["tokens_dropped"]) == (0, 3)


async def test_a_streamed_grammar_goes_on_at_the_worker_that_takes_it_over(start_router: StartRouter) -> None:
    async with ScriptedWorker(continues_state=True) as bad, ScriptedWorker() as a, ScriptedWorker() as b:
        other, able = sorted([a, b], key=lambda worker: worker.id)  # the first by name would be preferred
        able.continues_state = True
        bad.faults.append(Fault(kind="disconnect", after_tokens=3))
        async with start_router(bad, (other, "serving"), (able, "serving"), avoid_s=60) as client:
            await until(lambda: client.known(bad).continues_state and client.known(able).continues_state)
            events = await read_stream(client.http, client.router.url, {**GRAMMAR, "stream": True})
    assert "error" not in events[-1]
    assert (len(able.requests), len(other.requests)) == (1, 0)


@pytest.mark.parametrize("facts", [{"reasoning_ended": False}, {"reasoning_parser_kwargs": {}}])
async def test_a_grammar_whose_beginning_is_told_goes_to_an_engine_that_understands(
    start_router: StartRouter, facts: dict[str, Any]
) -> None:
    turn = {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 3, "structured_outputs": {"regex": "x*"}},
        **facts,
    }
    async with ScriptedWorker() as stock, ScriptedWorker(continues_state=True) as able:
        async with start_router(stock, (able, "serving")) as client:
            await until(lambda: client.known(able).continues_state)
            assert (await client.post("/inference/v1/generate", turn))[0] == 200
            assert (len(able.requests), len(stock.requests)) == (1, 0)
        async with start_router(stock) as client:
            assert (await client.post("/inference/v1/generate", turn))[0] == 200


async def test_a_streamed_grammar_that_no_worker_takes_over_ends_in_an_error_event(
    start_router: StartRouter,
) -> None:
    async with ScriptedWorker() as worker:
        worker.faults.append(Fault(kind="abort_reclaimed", after_tokens=3))
        async with start_router(worker) as client:
            events = await read_stream(client.http, client.router.url, {**GRAMMAR, "stream": True})
    assert events[-1]["error"]["code"] == 502


async def test_an_abort_without_a_stop_reason_of_rose_goes_to_the_client(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker:
        worker.faults.append(Fault(kind="abort_plain", after_tokens=3))
        async with start_router(worker) as client:
            choice = (await client.complete(BODY))["choices"][0]
            assert (choice["finish_reason"], len(choice["token_ids"])) == ("abort", 3)


async def test_a_busy_worker_is_avoided_and_its_429_not_passed_on(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker:
        worker.faults.extend(Fault(kind="status", status=429) for _ in range(8))
        async with start_router(worker) as client:
            assert_whole((await client.complete(BODY))["choices"][0])
            assert client.counters()["reroutes"] == {"busy": 8}


async def test_the_clients_own_mistake_comes_back_at_once(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker, ScriptedWorker() as other:
        worker.faults.append(Fault(kind="status", status=400))
        async with start_router(worker, (other, "serving")) as client:
            status, answer = await client.post("/v1/completions", BODY)
            assert (status, answer["error"]["message"]) == (400, "scripted")
            assert not other.requests


async def test_a_worker_that_wants_another_key_takes_no_turn_from_the_others(
    start_router: StartRouter,
) -> None:
    async with ScriptedWorker() as locked, ScriptedWorker() as good:
        locked.faults.extend(Fault(kind="status", status=401) for _ in range(50))
        async with start_router(locked, good) as client:
            for _ in range(5):
                assert_whole((await client.complete(BODY))["choices"][0])
    async with ScriptedWorker() as locked:
        locked.faults.extend(Fault(kind="status", status=401) for _ in range(50))
        chat = {"messages": [{"role": "user", "content": "a"}]}  # without a limit it goes to one worker whole
        async with start_router(locked, max_failures=2) as client:
            for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", chat)):
                status, answer = await client.post(path, body)
                assert status == 502
                assert f"{locked.id} answered 401" in answer["error"]["message"]
                assert "ROSE_WORKER_API_KEY" in answer["error"]["message"]


class LockedWorker(ScriptedWorker):
    """Wants a key that nobody has."""

    async def _tokenize(self, _request: web.Request) -> web.Response:
        return web.json_response({"error": "Unauthorized"}, status=401)


async def test_a_question_is_not_answered_by_a_worker_that_wants_another_key(
    start_router: StartRouter,
) -> None:
    async with LockedWorker() as locked, ScriptedWorker() as good:
        async with start_router(locked, good) as client:
            assert (await client.post("/tokenize", {"prompt": "a"}))[0] == 200
        async with start_router(locked) as client:
            assert (await client.post("/tokenize", {"prompt": "a"}))[0] == 503


async def test_a_turn_that_fails_everywhere_ends_in_502(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker:
        worker.faults.extend(Fault(kind="disconnect") for _ in range(3))
        async with start_router(worker, max_failures=3) as client:
            status, answer = await client.post("/v1/completions", BODY)
            assert status == 502
            assert "3 attempts failed" in answer["error"]["message"]


async def test_workers_that_an_admin_removes_have_not_failed_the_turns_on_them(
    start_router: StartRouter,
) -> None:
    async with ScriptedWorker() as a, ScriptedWorker() as b, ScriptedWorker() as c:
        for worker in (a, b):
            worker.faults.append(Fault(kind="hang", after_tokens=2))
        async with start_router(a, b, (c, "serving"), max_failures=1) as client:
            asked = asyncio.create_task(client.complete(BODY))
            workers = client.router.plane.registry.workers
            for _ in range(2):
                await until(lambda: any(each.in_flight and each.num_tokens == 2 for each in workers()))
                (last,) = (each for each in workers() if each.in_flight)
                await client.http.delete(f"{client.router.url}/workers/{last.id}")
            assert_whole((await asked)["choices"][0])
            assert client.counters()["reroutes"] == {"removed": 2}


async def test_a_request_that_workers_fail_keeps_no_other_turn_away_from_them(
    start_router: StartRouter,
) -> None:
    async with ScriptedWorker() as worker, start_router(worker) as client:
        worker.faults.append(Fault(kind="status"))
        assert_whole((await client.complete(BODY))["choices"][0])
        suspected_until = client.known(worker).cooldown_until
        assert suspected_until > 0  # nothing had shown yet that it makes tokens
        worker.faults.append(Fault(kind="status"))
        assert_whole((await client.complete(BODY))["choices"][0])
        assert client.counters()["reroutes"] == {"failed": 2}
        assert client.known(worker).cooldown_until == suspected_until
        worker.faults.append(Fault(kind="error", after_tokens=1))
        assert_whole((await client.complete(BODY))["choices"][0])
        assert client.known(worker).cooldown_until > suspected_until


async def test_a_worker_that_answers_all_new_turns_with_an_error_gets_few_although_old_ones_go_on(
    start_router: StartRouter,
) -> None:
    async with ScriptedWorker() as worker, start_router(worker, max_failures=2, avoid_s=0) as client:
        known = client.known(worker)
        suspected = []
        for _ in range(2):
            worker.faults.extend(Fault(kind="status") for _ in range(2))
            known.last_token_at = time.monotonic()  # as by a long turn
            assert (await client.post("/v1/completions", BODY))[0] == 502
            suspected.append(known.cooldown_until > 0)
        assert suspected == [False, True]
        assert_whole((await client.complete(BODY))["choices"][0])
        before = known.cooldown_until
        worker.faults.append(Fault(kind="status"))
        assert_whole((await client.complete(BODY))["choices"][0])
        assert known.cooldown_until == before


async def test_a_killed_worker_is_lost_and_its_turns_finish_elsewhere(start_router: StartRouter) -> None:
    async with (
        ScriptedWorker() as bad,
        ScriptedWorker() as good,
        start_router(bad, (good, "serving")) as client,
    ):
        bad.hold()
        turns = [asyncio.create_task(client.complete(BODY)) for _ in range(4)]
        await until(lambda: len(bad.requests) == 4)
        await bad.stop()
        for turn in turns:
            assert_whole((await turn)["choices"][0])
        await until(lambda: not client.router.plane.registry.workers()[0].is_alive)
        assert_whole((await client.complete(BODY))["choices"][0])


async def test_a_lost_heartbeat_cuts_a_silent_attempt(start_router: StartRouter) -> None:
    async with ScriptedWorker() as bad, ScriptedWorker() as good:
        bad.faults.append(Fault(kind="hang", after_tokens=2))
        async with start_router(bad, (good, "serving")) as client:
            turn = asyncio.create_task(client.complete(BODY))
            await until(lambda: client.router.plane.registry.workers()[0].num_tokens == 2)
            client.router.plane.registry.workers()[0].lost("scripted")
            assert_whole((await turn)["choices"][0])
            assert client.counters()["reroutes"] == {"lost": 1}


async def test_streams_are_seamless_across_a_cut(start_router: StartRouter) -> None:
    async with ScriptedWorker() as worker:
        worker.faults.append(Fault(kind="abort_reclaimed", after_tokens=4))
        async with start_router(worker) as client:
            body = {
                **BODY,
                "stream": True,
                "n": 2,
                "return_token_ids": True,
                "stream_options": {"include_usage": True},
            }
            events = await read_stream(client.http, client.router.url, body)
    for index in (0, 1):
        choices = [e["choices"][0] for e in events if e["choices"] and e["choices"][0]["index"] == index]
        assert [token for c in choices for token in c["token_ids"]] == expected_tokens(PROMPT, 9)
        assert [c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c] == [PROMPT]
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
        offsets = [o for c in choices if c["logprobs"] for o in c["logprobs"]["text_offset"]]
        assert offsets == sorted(set(offsets)) and len(offsets) == 9
    assert len({event["id"] for event in events}) == 1
    assert events[-1]["usage"]["completion_tokens"] == 18


async def test_a_streamed_turn_that_would_have_to_restart_ends_in_an_error_event(
    start_router: StartRouter,
) -> None:
    async with ScriptedWorker() as worker:
        worker.faults.append(Fault(kind="abort_reclaimed", after_tokens=4))
        async with start_router(worker) as client:
            events = await read_stream(
                client.http, client.router.url, {**BODY, "stream": True, "stop": ["x"]}
            )
    assert events[-1]["error"]["code"] == 502


async def read_stream(http: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with http.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200
        raw = await response.read()
    lines = [line.removeprefix("data: ") for line in raw.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
