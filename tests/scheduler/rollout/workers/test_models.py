"""Several models behind one router: each model's turns, weights and sessions stay on its own workers."""

import asyncio
from typing import Any

import pytest

from rose.scheduler.rollout.formats.bodies import BadRequest
from rose.scheduler.rollout.router_config import RouterConfig, RouterJob
from rose.scheduler.rollout.workers.models import Catalogue
from tests.scheduler.rollout.conftest import Client, StartRouter
from tests.scheduler.rollout.scripted_worker import Fault, ScriptedWorker, expected_tokens
from tests.scheduler.rollout.stock_worker import SERVED_MODEL
from tests.scheduler.rollout.waiting import until

PROMPT = [11, 12, 13]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 5}
EVERY_PATH = {
    "/v1/completions": BODY,
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5},
    "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {"max_tokens": 5}},
    "/generate": {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 5}},
}


def worker_of(*models: str, **fields: Any) -> ScriptedWorker:
    return ScriptedWorker(models=list(models), **fields)


def placed(worker: ScriptedWorker) -> list[str]:
    return [str(request.get("model")) for request in worker.requests]


def queued(client: Client) -> int:
    return client.router.plane.dispatcher.num_queued


@pytest.mark.parametrize("policy", ["paper", "cost", "turnwise", "pinned"])
async def test_turns_go_to_workers_of_their_model_alone(start_router: StartRouter, policy: str) -> None:
    async with (
        worker_of("a") as a,
        worker_of("b", "b-alias") as b,
        start_router(a, (b, "serving"), policy=policy) as client,
    ):
        for path, body in EVERY_PATH.items():
            for model in ("a", "b", "b", "b-alias"):
                status, answer = await client.post(path, {**body, "model": model}, X_Session_ID="one")
                assert status == 200, answer
        # What goes whole, too.
        whole = {**EVERY_PATH["/v1/chat/completions"], "stop": ["x"], "model": "b"}
        assert (await client.post("/v1/chat/completions", whole))[0] == 200
        assert set(placed(a)) == {"a"} and len(a.requests) == 4
        assert set(placed(b)) == {"b", "b-alias"} and len(b.requests) == 13
        assert client.counters()["turns"] == {"finished": 17}


@pytest.mark.parametrize("path", ["/tokenize", *EVERY_PATH])
async def test_a_request_without_a_model_is_400_where_several_are_served(
    start_router: StartRouter, path: str
) -> None:
    async with worker_of("a") as a, worker_of("b") as b, start_router(a, b) as client:
        body = EVERY_PATH.get(path, {"prompt": "hi"})
        status, answer = await client.post(path, body)
        assert status == 400
        assert answer["error"]["message"] == "model: several are served here; name one of a, b"
        assert not a.requests and not b.requests


async def test_a_request_without_a_model_is_for_the_one_that_all_workers_take(
    start_router: StartRouter,
) -> None:
    async with (
        worker_of("a", "adapter") as both,
        worker_of("a") as other,
        start_router(both, other) as client,
    ):
        await client.complete({**BODY, "n": 4})
        assert (len(both.requests), len(other.requests)) == (2, 2)
        await client.complete({**BODY, "model": "adapter"})
        assert len(both.requests) == 3


async def test_questions_are_answered_by_a_worker_of_the_model(start_router: StartRouter) -> None:
    async with worker_of("a") as a, worker_of("b") as b, start_router(a, b) as client:
        for model in ("a", "b", "b"):
            status, answer = await client.post("/tokenize", {"prompt": "hi", "model": model})
            assert (status, answer) == (200, {"tokens": list(b"hi"), "model": model})
            status, answer = await client.post("/detokenize", {"tokens": [1, 2], "model": model})
            assert (status, answer["prompt"]) == (200, "<1><2>")
        assert (await client.post("/tokenize", {"prompt": "hi", "model": "c"}))[0] == 404
        await b.stop()
        await until(lambda: not client.router.plane.registry.workers()[1].is_alive)
        assert (await client.post("/tokenize", {"prompt": "hi", "model": "b"}))[0] == 503


async def test_the_list_of_models_holds_each_model_once_as_workers_show_it(start_router: StartRouter) -> None:
    async with (
        worker_of("a", max_model_len=100) as a,
        worker_of("b", "adapter") as b,
        worker_of("a") as again,
        start_router(a, b, again) as client,
    ):
        b.models.append("loaded")
        status, answer = await client.get("/v1/models")
        shown = [(card["id"], card["max_model_len"]) for card in answer["data"]]
        assert status == 200 and answer["object"] == "list"
        assert shown == [("a", 100), ("b", None), ("adapter", None), ("loaded", None)]
        _, listed = await client.get("/workers")
        assert [w["models"] for w in listed["workers"]] == [["a"], ["b", "adapter", "loaded"], ["a"]]


async def test_turns_of_a_model_whose_workers_are_lost_wait_for_one(start_router: StartRouter) -> None:
    async with worker_of("a") as a, worker_of("b") as b, start_router(a, b) as client:
        await b.stop()
        await until(lambda: not client.router.plane.registry.workers()[1].is_alive)
        body = {**BODY, "model": "b"}
        assert (await client.post("/v1/completions", body, X_Rose_Timeout_S="0.1"))[0] == 504
        turn = asyncio.create_task(client.complete(body))
        await until(lambda: queued(client) == 1)
        await client.complete({**BODY, "model": "a"})
        assert (queued(client), len(a.requests)) == (1, 1)
        async with worker_of("b") as anew:
            assert (await client.post("/workers", {"url": anew.url}))[0] == 201
            await turn
            assert placed(anew) == ["b"]


async def test_a_model_whose_workers_were_removed_is_503_and_one_nobody_knew_404(
    start_router: StartRouter,
) -> None:
    async with worker_of("a") as a, worker_of("b") as b, start_router(a, b) as client:
        async with client.http.delete(f"{client.router.url}/workers/{b.id}") as response:
            assert response.status == 200
        status, answer = await client.post("/v1/completions", {**BODY, "model": "b"})
        assert (status, "removed" in answer["error"]["message"]) == (503, True)
        status, answer = await client.post("/v1/completions", {**BODY, "model": "c"})
        assert (status, answer["error"]["message"]) == (404, "model c is served by no worker; known: a")
        await client.complete(BODY)  # one model is left
        assert (await client.post("/workers", {"url": b.url}))[0] == 201
        await client.complete({**BODY, "model": "b"})


async def test_an_engine_that_returns_with_another_model_gets_only_turns_for_it(
    start_router: StartRouter,
) -> None:
    async with worker_of("a") as a, worker_of("b") as b, start_router(a, b) as client:
        (_, entry) = client.router.plane.registry.workers()
        b.models = ["c"]
        entry.lost("scripted")
        await until(lambda: entry.is_alive)
        await client.complete({**BODY, "model": "c"})
        assert (await client.post("/v1/completions", {**BODY, "model": "b"}))[0] == 404
        assert placed(b) == ["c"]


async def test_a_cut_turn_goes_on_at_a_worker_of_its_model(start_router: StartRouter) -> None:
    async with (
        worker_of("a") as a,
        worker_of("b") as bad,
        worker_of("b") as good,
        start_router(a, bad, (good, "serving"), avoid_s=60) as client,
    ):
        bad.faults.append(Fault(kind="abort_reclaimed", after_tokens=2))
        (choice,) = (await client.complete({**BODY, "model": "b"}))["choices"]
        assert choice["token_ids"] == expected_tokens(PROMPT, 5)
        spans = [(span["worker"], span["tokens"]) for span in choice["rose"]["spans"]]
        assert spans == [(bad.id, 2), (good.id, 3)]
        assert not a.requests


async def test_a_prompt_is_held_against_its_own_models_context(start_router: StartRouter) -> None:
    async with (
        worker_of("short", max_model_len=100) as short,
        worker_of("long", max_model_len=1000) as long,
        start_router(short, long) as client,
    ):
        body = {"prompt": [7] * 500, "max_tokens": 1}
        await client.complete({**body, "model": "long"})
        status, answer = await client.post("/v1/completions", {**body, "model": "short"})
        assert (status, "maximum context length is 100 tokens" in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize("mode", ["latest", "pinned"])
async def test_weight_versions_of_different_models_are_independent(
    start_router: StartRouter, mode: str
) -> None:
    async with (
        worker_of("a", version="run/7") as a,
        worker_of("b", version="run/3") as b,
        worker_of("base") as base,
        start_router(a, b, base, version_mode=mode) as client,
    ):
        for model in ("a", "b", "base") * 2:  # by one name, as two trainers may call their trajectories alike
            await client.complete({**BODY, "model": model}, X_Session_ID="s")
        assert [placed(worker) for worker in (a, b, base)] == [["a"] * 2, ["b"] * 2, ["base"] * 2]
        assert client.router.plane.status()["sessions"] == 3


async def test_equal_prompts_for_different_models_are_different_trajectories(
    start_router: StartRouter,
) -> None:
    async with worker_of("a", "b") as one, worker_of("a", "b") as two, start_router(one, two) as client:
        registry = client.router.plane.registry
        registry.workers()[0].suspect(float("inf"), RouterConfig())
        (choice,) = (await client.complete({**BODY, "model": "a"}))["choices"]
        registry.workers()[0].suspect(0.0, RouterConfig())
        following = {**BODY, "prompt": [*PROMPT, *choice["token_ids"], 9]}
        await client.complete({**following, "model": "a"})
        assert (placed(one), placed(two)) == ([], ["a", "a"])
        await client.complete({**following, "model": "b"})
        assert client.router.plane.status()["sessions"] == 2


async def test_a_model_without_room_holds_up_no_other(start_router: StartRouter) -> None:
    async with (
        worker_of("a") as a,
        worker_of("b") as b,
        start_router(a, b, turns_per_gpu=1) as client,
    ):
        a.hold()
        turns = [asyncio.create_task(client.complete({**BODY, "model": "a"})) for _ in range(5)]
        await until(lambda: queued(client) == 4)
        await client.complete({**BODY, "model": "b"})
        b.hold()
        turns += [asyncio.create_task(client.complete({**BODY, "model": "b"})) for _ in range(3)]
        await until(lambda: queued(client) == 6)
        b.go_on()
        await until(lambda: queued(client) == 4)
        await asyncio.gather(*turns[5:])
        assert (len(a.requests), len(b.requests)) == (1, 4)
        a.go_on()
        await asyncio.gather(*turns)


async def test_serving_gpus_are_lent_to_jobs_that_have_turns_for_their_model(
    start_router: StartRouter,
) -> None:
    async with (
        worker_of("a", serving_kv_usage=0.9) as a,
        worker_of("b", serving_kv_usage=0.1) as b,
        start_router((a, "serving"), (b, "serving"), jobs={"x": RouterJob(max_serving_gpus=1)}) as client,
    ):
        await client.complete({**BODY, "model": "a"}, X_Rose_Job="x")  # not the idlest, which is of no use
        await client.complete({**BODY, "model": "b"}, X_Rose_Job="y")
        await client.complete({**BODY, "model": "a"}, X_Rose_Job="x")
        _, listed = await client.get("/workers")
        assert {w["id"]: w["owner"] for w in listed["workers"]} == {a.id: "x", b.id: "y"}


async def test_a_job_with_two_models_borrows_what_its_waiting_turns_can_use(
    start_router: StartRouter,
) -> None:
    async with (
        worker_of("a") as a,
        worker_of("b") as b,
        start_router((a, "serving"), (b, "serving"), jobs={"x": RouterJob(max_serving_gpus=1)}) as client,
    ):
        for model in ("a", "b", "a", "b"):
            await client.complete({**BODY, "model": model}, X_Rose_Job="x")
            owners = [worker.owner for worker in client.router.plane.registry.workers()]
            assert owners.count("x") == 1


@pytest.mark.vllm
async def test_a_real_engine_beside_one_of_another_model(start_router: StartRouter, engine: Any) -> None:
    async with worker_of("scripted") as other, start_router(other, engine) as client:
        body = {**BODY, "temperature": 0.0, "ignore_eos": True}
        for _ in range(3):
            answer = await client.complete({**body, "model": SERVED_MODEL})
            (choice,) = answer["choices"]
            assert (answer["model"], len(choice["token_ids"])) == (SERVED_MODEL, 5)
        assert (await client.complete({**body, "model": "scripted"}))["model"] == "scripted"
        assert placed(other) == ["scripted"]
        _, listed = await client.get("/v1/models")
        scripted, real = listed["data"]
        assert (scripted["id"], real["id"], real["max_model_len"]) == ("scripted", SERVED_MODEL, 512)
        status, found = await client.post("/tokenize", {"model": SERVED_MODEL, "prompt": "w5 w6"})
        assert (status, found["tokens"][-2:]) == (200, [5, 6])
        assert (await client.post("/v1/completions", BODY))[0] == 400


def test_the_catalogue_follows_what_workers_say() -> None:
    catalogue = Catalogue()
    catalogue.take("w1", None)
    assert (catalogue.default(), catalogue.context("a"), "a" in catalogue) == (None, None, False)
    catalogue.take("w1", {"a": 100, "adapter": None})
    assert (catalogue.default(), catalogue.context("a"), catalogue.context("adapter")) == ("a", 100, None)
    catalogue.take("w2", {"a": 200})
    assert (catalogue.default(), catalogue.context("a")) == ("a", 200)
    catalogue.take("w3", None)
    assert (catalogue.default(), catalogue.context("a")) == ("a", None)  # it may have a longer one
    catalogue.forget("w3")
    catalogue.take("w2", {"b": 10, "a": 200})
    with pytest.raises(BadRequest, match="name one of a, adapter, b"):
        catalogue.default()
    catalogue.take("w1", {"a": 100})
    assert not catalogue.is_removed("adapter")  # its worker has unloaded it
    catalogue.forget("w2")
    assert (catalogue.default(), catalogue.is_removed("b"), catalogue.is_removed("a")) == ("a", True, False)
    catalogue.take("w4", {"b": 10})
    assert not catalogue.is_removed("b")
