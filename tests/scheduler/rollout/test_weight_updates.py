"""New weights on a worker: the time that they take is no stall, and turns stay on the worker."""

import asyncio
import time
from math import inf

import pytest

from rose.messages import RoutingStatus
from rose.scheduler.rollout.router_config import RouterConfig, WorkerSpec
from rose.scheduler.rollout.workers import watch as watch_module
from rose.scheduler.rollout.workers.watch import Watch
from rose.scheduler.rollout.workers.worker import Worker
from tests.scheduler.rollout.conftest import StartRouter
from tests.scheduler.rollout.scripted_worker import Fault, ScriptedWorker, expected_tokens
from tests.scheduler.rollout.waiting import until

PROMPT = [11, 12, 13]
BODY = {"prompt": PROMPT, "max_tokens": 9}
UPDATING = RoutingStatus(weight_version="run/1", is_updating=True)
MOMENT_S = 0.01


def worker(**settings: float) -> Worker:
    made = Worker(WorkerSpec(url="http://gpu:1"), RouterConfig(**settings))  # type: ignore[arg-type]
    made.take_status(RoutingStatus(weight_version="run/1"), 0.0)
    made.seen(0.0)
    return made


async def test_the_stall_clock_stands_still_while_weights_change() -> None:
    one = worker()
    async with Watch(one) as watch:
        watch.allow(MOMENT_S)
        one.take_status(UPDATING, 1.0)
        await asyncio.sleep(5 * MOMENT_S)
        watch.allow(MOMENT_S)  # a token of the old weights came late
        await asyncio.sleep(5 * MOMENT_S)
        watch.pause()
        watch.allow(MOMENT_S)
        await asyncio.sleep(5 * MOMENT_S)


@pytest.mark.slow
async def test_a_delay_of_the_router_itself_extends_the_stall_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = worker()
    with pytest.raises(TimeoutError):
        async with Watch(one) as watch:
            watch.allow(MOMENT_S)
            time.sleep(2 * watch_module.HELD_UP_S)  # nothing of this loop runs meanwhile
            await asyncio.sleep(3600)
    monkeypatch.setattr(watch_module, "HELD_UP_S", 0.0)  # whatever the machine adds to it
    async with Watch(one) as watch:
        watch.allow(MOMENT_S)
        time.sleep(5 * MOMENT_S)
        for _ in range(5):  # in which it rings, and would end this
            await asyncio.sleep(0)


@pytest.mark.parametrize("is_seen", [True, False])
async def test_after_an_update_the_next_token_may_take_as_long_as_a_first_one(is_seen: bool) -> None:
    patient, hasty = worker(first_token_s=60), worker(first_token_s=MOMENT_S)
    async with Watch(patient) as watch:
        watch.allow(MOMENT_S)
        with pytest.raises(TimeoutError):
            async with Watch(hasty) as hasty_watch:
                hasty_watch.allow(60)
                for one in (patient, hasty):
                    if is_seen:
                        one.take_status(UPDATING, 1.0)
                    one.take_status(RoutingStatus(weight_version="run/2"), 2.0)
                await asyncio.sleep(60)
        await asyncio.sleep(5 * MOMENT_S)


async def test_an_update_takes_no_time_from_a_first_token_that_was_given_more_than_usual() -> None:
    hasty = worker(first_token_s=MOMENT_S)
    async with Watch(hasty, first_token_s=60) as watch:
        watch.allow(60)
        hasty.take_status(UPDATING, 1.0)
        hasty.take_status(RoutingStatus(weight_version="run/2"), 2.0)
        await asyncio.sleep(5 * MOMENT_S)


async def test_a_worker_may_be_lost_in_the_moment_in_which_a_watch_runs_out() -> None:
    """Its other watches and its heartbeat would otherwise end with an error."""
    one = worker()

    async def lose(watch: Watch) -> None:
        while not watch._timeout.expired():
            await asyncio.sleep(0)
        one.lost("killed")
        watch.allow(0.0)

    watch = Watch(one)
    losing = asyncio.create_task(lose(watch))
    with pytest.raises(TimeoutError):
        async with watch:
            watch.allow(MOMENT_S)
            await asyncio.sleep(3600)
    await losing
    assert watch.is_lost


async def test_the_turns_deadline_and_a_lost_worker_count_in_an_update_too() -> None:
    for deadline, is_over in ((time.monotonic() + MOMENT_S, True), (inf, False)):
        one = worker()
        with pytest.raises(TimeoutError):
            async with Watch(one, deadline) as watch:
                watch.allow(60)
                one.take_status(UPDATING, 1.0)
                if not is_over:
                    one.lost("scripted")
                await asyncio.sleep(60)
        assert (watch.is_over, watch.is_lost) == (is_over, not is_over)


async def test_tokens_before_and_after_an_update_say_nothing_about_speed() -> None:
    one = worker()
    assert one.updated_at == -inf
    one.take_status(UPDATING, 1.0)
    one.take_status(RoutingStatus(weight_version="run/2"), 2.0)
    one.take_status(RoutingStatus(weight_version="run/2"), 3.0)
    assert one.updated_at == 2.0


async def test_turns_stay_on_a_worker_that_changes_its_weights_and_new_ones_go_elsewhere(
    start_router: StartRouter,
) -> None:
    async with (
        ScriptedWorker(version="run/1") as changing,
        ScriptedWorker(version="run/1") as other,
        start_router(changing, (other, "serving"), version_mode="max-lag") as client,
    ):
        changing.hold()
        turn = asyncio.create_task(client.complete(BODY))
        await until(lambda: len(changing.requests) == 1)
        changing.is_updating = True
        known = client.known(changing)
        await until(lambda: known.is_updating)
        await client.complete(BODY)
        assert (len(changing.requests), len(other.requests)) == (1, 1)
        changing.is_updating, changing.version = False, "run/2"
        await until(lambda: not known.is_updating)
        changing.go_on()
        (choice,) = (await turn)["choices"]
        assert choice["token_ids"] == expected_tokens(PROMPT, 9)
        assert [span["worker"] for span in choice["rose"]["spans"]] == [changing.id]
        assert client.counters()["reroutes"] == {}


async def test_turns_wait_while_all_workers_change_their_weights(start_router: StartRouter) -> None:
    async with ScriptedWorker(version="run/1", is_updating=True) as worker, start_router(worker) as client:
        turn = asyncio.create_task(client.complete(BODY))
        await until(lambda: client.router.plane.dispatcher.num_queued == 1)
        worker.is_updating, worker.version = False, "run/2"
        (choice,) = (await turn)["choices"]
        assert [span["weight_version"] for span in choice["rose"]["spans"]] == ["run/2"]


async def test_a_pinned_turn_leaves_a_worker_that_gets_other_weights(start_router: StartRouter) -> None:
    async with (
        ScriptedWorker(version="run/1") as changing,
        ScriptedWorker(version="run/1") as other,
        start_router(changing, (other, "serving"), version_mode="pinned") as client,
    ):
        changing.faults.append(Fault(kind="hold", after_tokens=4))
        turn = asyncio.create_task(client.complete(BODY))
        known = client.known(changing)
        await until(lambda: known.num_tokens == 4)
        changing.version = "run/2"
        (choice,) = (await turn)["choices"]
        assert choice["token_ids"] == expected_tokens(PROMPT, 9)
        assert {span["weight_version"] for span in choice["rose"]["spans"]} == {"run/1"}
        assert client.counters()["reroutes"] == {"outdated": 1}


async def test_a_pinned_turn_whose_version_is_gone_everywhere_is_an_error(start_router: StartRouter) -> None:
    async with (
        ScriptedWorker(version="run/1") as worker,
        start_router(worker, version_mode="pinned") as client,
    ):
        worker.faults.append(Fault(kind="hold", after_tokens=4))
        turn = asyncio.create_task(client.post("/v1/completions", BODY))
        known = client.known(worker)
        await until(lambda: known.num_tokens == 4)
        worker.version = "run/2"
        status, answer = await turn
        assert (status, "run/1" in answer["error"]["message"]) == (409, True)


async def test_a_worker_that_starts_anew_gets_no_turn_until_it_has_caught_up(
    start_router: StartRouter,
) -> None:
    async with ScriptedWorker(version="run/2") as before, start_router(before) as client:
        registry, dispatcher = client.router.plane.registry, client.router.plane.dispatcher
        await client.complete(BODY)
        await before.stop()
        await until(lambda: not any(w.is_alive for w in registry.workers()))
        async with ScriptedWorker() as anew:
            assert (await client.post("/workers", {"url": anew.url}))[1]["alive"]
            turn = asyncio.create_task(client.complete(BODY))
            await until(lambda: dispatcher.num_queued == 1)
            anew.version = "run/1"
            known = client.known(anew)
            await until(lambda: str(known.weight_version) == "run/1")
            assert (dispatcher.num_queued, anew.requests) == (1, [])
            anew.version = "run/2"
            (choice,) = (await turn)["choices"]
            assert [span["weight_version"] for span in choice["rose"]["spans"]] == ["run/2"]


async def test_one_workers_absurd_version_keeps_no_turn_from_the_others(start_router: StartRouter) -> None:
    async with (
        ScriptedWorker(version="run/7") as good,
        ScriptedWorker(version="run/999999") as absurd,
        start_router(good, absurd) as client,
    ):
        status, answer = await client.post("/admin/rl_step", {"step": 7, "version": "run/7"})
        assert (status, answer["step"], good.steps) == (200, 7, [7])
        assert (await client.post("/admin/rl_step", {"step": 7, "version": "7"}))[0] == 400
        for worker in (good, absurd):
            worker.hold()
        turns = [asyncio.create_task(client.complete(BODY, X_Rose_Run="run")) for _ in range(2)]
        await until(lambda: (len(good.requests), len(absurd.requests)) == (1, 1))
        for worker in (good, absurd):
            worker.go_on()
        await asyncio.gather(*turns)


async def test_a_new_run_or_one_that_is_forgotten_asks_for_no_old_version(start_router: StartRouter) -> None:
    async with ScriptedWorker(version="run/9") as worker, start_router(worker) as client:
        (known,) = client.router.plane.registry.workers()
        worker.version = "next/0"
        await until(lambda: str(known.weight_version) == "next/0")
        await client.complete(BODY)
        worker.version = None
        await until(lambda: known.weight_version is None)
        turn = asyncio.create_task(client.complete(BODY))
        await until(lambda: client.router.plane.dispatcher.num_queued == 1)
        for run_id, status in (("run", 200), ("next", 200), ("next", 404)):
            async with client.http.delete(f"{client.router.url}/admin/runs/{run_id}") as response:
                assert response.status == status
        await turn
        assert len(worker.requests) == 2
