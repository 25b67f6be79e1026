"""Turns for LoRA adapters: a turn names the run as its model, and one version makes the whole answer."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rose.messages import RoutingStatus
from rose.scheduler.rollout.placing.sessions import Held, SessionTable
from rose.scheduler.rollout.router_config import RouterConfig, RouterJob, WorkerSpec
from rose.scheduler.rollout.turn.trajectories import kv_weights, probably_cached
from rose.scheduler.rollout.workers.worker import Worker
from tests.scheduler.rollout.conftest import Client, StartRouter
from tests.scheduler.rollout.scripted_worker import ScriptedWorker, expected_tokens
from tests.scheduler.rollout.waiting import until

PROMPT = [1, 2, 3]
MATH = {"prompt": PROMPT, "max_tokens": 5, "model": "math"}
BASE = {**MATH, "model": "scripted"}


def engine(*adapters: str, version: str | None = None, held: tuple[str, ...] = ()) -> ScriptedWorker:
    """A worker with the newest of these adapters, and with older versions beside them."""
    names = [each.replace("/", "@") for each in (*adapters, *held)]
    return ScriptedWorker(version=version, adapters=list(adapters), models=["scripted", *names])


def versions(answer: Any) -> list[str | None]:
    return [span["weight_version"] for span in answer["choices"][0]["rose"]["spans"]]


async def knows(client: Client, worker: ScriptedWorker, *adapters: str) -> None:
    """Returns when the router knows these versions of the worker's adapters."""
    await until(lambda: {str(each) for each in client.known(worker).adapters.values()} == set(adapters))


async def test_turns_name_the_run_and_get_its_newest_version(
    start_router: StartRouter,
) -> None:
    async with engine("math/3", "code/1", version="base/9") as worker, start_router(worker) as client:
        for model, version in (("math", "math/3"), ("code", "code/1"), ("scripted", "base/9")):
            answer = await client.complete({**MATH, "model": model})
            assert answer["choices"][0]["token_ids"] == expected_tokens(PROMPT, 5)
            assert (answer["model"], versions(answer)) == (model, [version])
            assert worker.requests[-1]["cache_salt"] == "base:9"
        _, listed = await client.get("/v1/models")
        assert [card["id"] for card in listed["data"]] == ["scripted", "math", "code"]
        status, answer = await client.post("/v1/completions", {**MATH, "model": "math@3"})
        assert (status, "math@3 is served by no worker; known: code, math, scripted" in str(answer)) == (
            404,
            True,
        )


async def test_a_chat_that_goes_whole_names_the_version_too(start_router: StartRouter) -> None:
    async with engine("math/3") as worker, start_router(worker) as client:
        body = {"model": "math", "messages": [{"role": "user", "content": "?"}], "tools": [], "n": 2}
        status, answer = await client.post("/v1/chat/completions", body)
        assert (status, worker.requests[-1]["model"]) == (200, "math@3")
        assert answer["model"] == "math", "as the client named it"


async def test_each_event_of_a_chat_that_goes_whole_has_the_model_as_the_client_named_it(
    start_router: StartRouter,
) -> None:
    async with engine("math/3") as worker, start_router(worker) as client:
        question = {"role": "user", "content": '"model": "math@3"'}
        body = {"model": "math", "messages": [question], "tools": [], "n": 2, "stream": True}
        async with client.http.post(f"{client.router.url}/v1/chat/completions", json=body) as response:
            lines = (await response.text()).split("\n\n")
        assert worker.requests[-1]["model"] == "math@3"
        assert lines[2:] == ["data: [DONE]", ""]
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:2]]
        assert [event["model"] for event in events] == ["math", "math"]
        assert events[1]["usage"] == {"completion_tokens": 1}


async def test_turns_run_on_workers_whose_version_of_that_adapter_is_new_enough(
    start_router: StartRouter,
) -> None:
    settings = {"version_mode": "max-lag", "max_lag": 1, "policy": "turnwise"}
    async with (
        engine("math/6", "code/0") as new,
        engine("math/5", "code/9") as middle,
        engine("math/4") as old,
        start_router(new, middle, old, **settings) as client,
    ):
        for each in (new, middle, old):
            each.hold_after = 0
        turns = [asyncio.create_task(client.complete(MATH)) for _ in range(6)]
        await until(lambda: new.num_held + middle.num_held == 6)
        for each in (new, middle, old):
            each.let_pass()
        found = sorted(str(versions(each)[0]) for each in await asyncio.gather(*turns))
        assert found == ["math/5"] * 3 + ["math/6"] * 3
        answer = await client.complete({**MATH, "model": "code"})
        assert (versions(answer), old.requests) == (["code/9"], [])


async def test_a_turn_keeps_its_version_to_its_end_and_the_next_one_gets_the_new_one(
    start_router: StartRouter,
) -> None:
    async with engine("math/3") as worker, start_router(worker, version_mode="latest") as client:
        worker.hold_after = 2
        turn = asyncio.create_task(client.complete(MATH, X_Session_ID="s"))
        await until(lambda: worker.num_held == 1)
        worker.models.append("math@4")
        worker.adapters = ["math/4"]
        await knows(client, worker, "math/4")
        worker.let_pass()
        assert versions(await turn) == ["math/3"]
        assert versions(await client.complete(MATH, X_Session_ID="s")) == ["math/4"]


async def test_a_version_answers_before_the_router_has_heard_of_it_unless_the_session_is_pinned(
    start_router: StartRouter,
) -> None:
    for mode, wanted in (("latest", "math/4"), ("max-lag", "math/4"), ("pinned", "math/3")):
        async with (
            engine("math/3") as worker,
            start_router(worker, version_mode=mode, heartbeat_s=3600) as client,
        ):
            assert versions(await client.complete(MATH, X_Session_ID="s")) == ["math/3"]
            worker.adapters, worker.models = ["math/4"], ["scripted", "math@3", "math@4"]
            assert versions(await client.complete(MATH, X_Session_ID="s")) == [wanted]


async def test_a_turn_whose_version_was_just_unloaded_is_placed_again(start_router: StartRouter) -> None:
    async with engine("math/3") as worker, start_router(worker) as client:
        await knows(client, worker, "math/3")
        worker.models = ["scripted", "math@4"]
        turn = asyncio.create_task(client.complete(MATH))
        await until(lambda: client.counters()["reroutes"].get("unloaded", 0) > 0)
        worker.adapters = ["math/4"]
        assert versions(await turn) == ["math/4"]


async def test_a_turn_whose_version_stays_unloaded_ends_with_an_error_that_names_it(
    start_router: StartRouter,
) -> None:
    async with engine("math/3") as worker, start_router(worker, weights_s=0.3) as client:
        await knows(client, worker, "math/3")
        worker.models = ["scripted"]
        chat = {"model": "math", "messages": [{"role": "user", "content": "?"}], "tools": [], "n": 2}
        for path, body in (("/v1/completions", MATH), ("/v1/chat/completions", chat)):
            status, answer = await client.post(path, body)
            assert (status, f"{worker.id} does not hold math/3" in str(answer)) == (503, True), answer
        worker.models.append("math@3")
        assert versions(await client.complete(MATH)) == ["math/3"]


@pytest.mark.slow
async def test_a_turn_for_an_adapter_that_all_workers_have_lost_ends_with_an_error_that_names_the_flag(
    start_router: StartRouter,
) -> None:
    async with engine("math/3") as worker, start_router(worker, weights_s=0.3) as client:
        await knows(client, worker, "math/3")
        worker.models, worker.adapters = ["scripted"], []
        await knows(client, worker)
        status, answer = await client.post("/v1/completions", MATH)
        assert (status, "rose serve --adapter" in str(answer)) == (503, True), answer


async def test_a_router_that_was_restarted_with_its_state_knows_which_runs_are_adapters(
    start_router: StartRouter, tmp_path: Path
) -> None:
    state = tmp_path / "router.json"
    async with engine("math/3", version="base/9") as worker:
        async with start_router(worker, state=state) as client:
            await knows(client, worker, "math/3")
            await until(lambda: "math/3" in state.read_text())
        worker.models, worker.adapters = ["scripted"], []
        async with start_router(worker, state=state) as client:
            newest = client.router.plane.registry.newest
            assert newest.is_adapter("math") and dict(newest.of(None)) == {"base": 9}
            turn = asyncio.create_task(client.complete(MATH))
            await until(lambda: client.router.plane.dispatcher.num_queued == 1)
            worker.models, worker.adapters = ["scripted", "math@2"], ["math/2"]
            await knows(client, worker, "math/2")
            assert client.router.plane.dispatcher.num_queued == 1, "math/2 is older than what turns have had"
            worker.models, worker.adapters = ["scripted", "math@4"], ["math/4"]
            assert versions(await turn) == ["math/4"]


async def test_a_turn_right_after_the_first_version_and_one_after_a_restart_find_the_adapter(
    start_router: StartRouter,
) -> None:
    async with engine() as worker, start_router(worker, heartbeat_s=3600) as client:
        status, _ = await client.post("/v1/completions", MATH)
        assert status == 404
        worker.models, worker.adapters = ["scripted", "math@0"], ["math/0"]
        assert versions(await client.complete(MATH)) == ["math/0"]
    async with engine("math/0") as worker, start_router(worker) as client:
        assert versions(await client.complete(MATH)) == ["math/0"]
        worker.models, worker.adapters = ["scripted"], []
        await knows(client, worker)
        turn = asyncio.create_task(client.complete(MATH))
        await until(lambda: client.router.plane.dispatcher.num_queued == 1)
        worker.models, worker.adapters = ["scripted", "math@0"], ["math/0"]
        assert versions(await turn) == ["math/0"]


async def test_an_adapter_belongs_to_the_job_that_has_its_run(start_router: StartRouter) -> None:
    jobs = {"a": RouterJob(run_id="math", key="key-a"), "b": RouterJob(run_id="code", key="key-b")}
    jobs["c"] = RouterJob(key="key-c")
    async with engine("math/3", "code/1") as worker, start_router(worker, jobs=jobs) as client:
        a, b, c = ({"Authorization": f"Bearer key-{name}"} for name in "abc")
        assert versions(await client.complete(MATH, **a)) == ["math/3"]
        for headers, message in (
            (b, "model math is the LoRA adapter of run math, and job b has run code"),
            (c, "model math is the LoRA adapter of run math, and that is job a's"),
            ({**a, "X_Rose_Run": "code"}, "leave"),
        ):
            status, answer = await client.post("/v1/completions", MATH, **headers)
            assert (status, message in answer["error"]["message"]) == (403, True), answer


def test_a_turn_counts_on_kv_of_its_own_base_adapter_and_version_alone() -> None:
    worker, sessions = Worker(WorkerSpec(url="http://gpu:1"), RouterConfig()), SessionTable(9)

    def cached(model: str | None, *adapters: str, base: str = "base/0") -> float:
        worker.take_status(RoutingStatus(weight_version=base, adapters=list(adapters)), 0.0)
        return probably_cached(sessions.get("s"), {worker.id: worker}, 0.0, model).get(worker.id, 0.0)

    assert cached("math", "math/3", "code/3") == 0
    held = Held(num_tokens=100, version=kv_weights(worker, "math"), until=1.0)
    sessions.record("s", worker.id, None, held)
    assert cached("math", "math/3", "code/3") == 100
    assert [cached("math", "math/4"), cached("math", "math/3", base="base/1")] == [0, 0]
    assert [cached(model, "math/3", "code/3") for model in ("code", "other", None)] == [0, 0, 0]


@pytest.mark.parametrize("text", ["math", "math/x", "/3"])
def test_a_version_that_is_none_is_refused(text: str) -> None:
    worker = Worker(WorkerSpec(url="http://gpu:1"), RouterConfig())
    with pytest.raises(Exception, match="expected RUN/NUMBER"):
        worker.take_status(RoutingStatus(adapters=[text]), 0.0)


async def test_an_engine_that_expects_one_version_is_told_that_of_the_weights(
    start_router: StartRouter,
) -> None:
    async with engine("math/3", version="base/9") as worker, start_router(worker) as client:
        await knows(client, worker, "math/3")
        assert client.router.plane.registry._question(client.known(worker))["knows"] == ["math/3", "base/9"]
