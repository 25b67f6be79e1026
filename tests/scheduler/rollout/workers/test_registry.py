"""How a status, a token and a loss change a worker's view, and how heartbeats go on."""

import asyncio
import contextlib
import math
import ssl

import aiohttp
import pytest
import uvloop

from rose.engine.http.leases import Leases
from rose.errors import WorkerError
from rose.messages import Lease, RoutingGate, RoutingStatus, parse_version
from rose.scheduler.rollout.placing.views import NOBODY, TurnView, WorkerKind
from rose.scheduler.rollout.router_config import RouterConfig, RouterJob, WorkerSpec
from rose.scheduler.rollout.turn.accounts import JobAccount
from rose.scheduler.rollout.turn.attempt.endings import Ending, EndKind
from rose.scheduler.rollout.turn.counters import Counters
from rose.scheduler.rollout.turn.journey import Journey, Route
from rose.scheduler.rollout.turn.place import take_place
from rose.scheduler.rollout.turn.rerouting import Rerouting
from rose.scheduler.rollout.workers import registry as registry_module
from rose.scheduler.rollout.workers.models import Catalogue
from rose.scheduler.rollout.workers.registry import Registry
from rose.scheduler.rollout.workers.wire import Wire
from rose.scheduler.rollout.workers.worker import Worker
from rose.types import WeightVersion
from tests.scheduler.rollout.scripted_worker import ScriptedWorker
from tests.scheduler.rollout.waiting import until

CONFIG = RouterConfig()
JOURNEY = Journey(session="s", route=Route(job="j", explicit_session=None, run_id=None, deadline=math.inf))


def worker() -> Worker:
    made = Worker(WorkerSpec(url="http://gpu:1", kind=WorkerKind.SERVING), CONFIG)
    made.seen(0.0)
    return made


def status(admitted: int = 0, declined: int = 0, **fields: object) -> RoutingStatus:
    gate = RoutingGate(admitted_steps=admitted, declined_steps=declined)
    return RoutingStatus.model_validate({"gate": gate, **fields})


@pytest.mark.parametrize(
    ("statuses", "is_eligible"),
    [
        ([status()], True),
        ([status(pressure="PRESSURE")], False),
        ([status(pressure="frozen")], True),
        ([status(num_waiting=1)], False),
        ([status(5, 5), status(5, 9)], False),
        ([status(5, 5), status(6, 9)], True),
        ([status(5, 5), status(5, 5)], True),
        ([status(5, 5), status(5, 9), status(6, 9)], True),
    ],
)
def test_eligibility_follows_pressure_gate_and_waiting(
    statuses: list[RoutingStatus], is_eligible: bool
) -> None:
    one = worker()
    for each in statuses:
        one.take_status(each, 0.0)
    assert one.view().eligible is is_eligible


def test_a_worker_that_yielded_gets_no_turn_before_its_next_status() -> None:
    one = worker()
    one.has_yielded = True
    assert not one.view().eligible
    one.take_status(status(), 0.0)
    assert one.view().eligible


def test_a_deactivated_worker_gets_no_turn_until_it_is_active_again() -> None:
    one = worker()
    one.take_status(status(is_active=False), 0.0)
    assert not one.view().has_room
    one.seen(1.0)
    assert not one.view().has_room
    one.take_status(status(is_active=True), 0.0)
    assert one.view().has_room


@pytest.mark.parametrize(
    ("seconds_per_token", "interval"), [(None, 1), (0.001, 14), (0.1, 5), (3.0, 1), (0.0, 14)]
)
def test_chunks_come_often_enough_not_to_look_like_a_stall(
    seconds_per_token: float | None, interval: int
) -> None:
    one = worker()
    one.seconds_per_token = seconds_per_token
    assert one.stream_interval(CONFIG) == interval


def test_a_worker_remembers_no_job_whose_turns_have_ended() -> None:
    one = worker()
    one.lend("a")
    for job in ("a", "a", "b"):
        one.begin_turn(job, 0.0)
    assert one.view().owner == NOBODY
    one.end_turn("b")
    assert (one.view().owner, list(one.tenants)) == ("a", ["a"])
    for _ in range(2):
        one.end_turn("a")
    assert list(one.tenants) == []


def test_a_suspect_is_on_probation_until_it_makes_a_token() -> None:
    one = worker()
    one.suspect(10.0, CONFIG)
    assert (one.view().cap, one.view().not_before) == (1, 10.0 + CONFIG.avoid_s)
    one.made_tokens(1, 12.0, None)
    assert one.view().cap == CONFIG.turns_per_gpu


@pytest.mark.parametrize(
    ("later", "is_held"), [(status(5, 9), True), (status(6, 9), True), (status(6, 5), False)]
)
def test_silence_while_serving_holds_a_workers_steps_back_is_no_fault(
    later: RoutingStatus, is_held: bool
) -> None:
    one, rerouting = worker(), Rerouting(CONFIG, Counters(), Catalogue())
    for each in (status(5, 5), later):
        one.take_status(each, 0.0)
    rerouting.after(Ending(kind=EndKind.STALLED), one, JOURNEY)
    assert (one.view().cap > 1, one.view().not_before == 0, one.has_yielded) == (is_held,) * 3
    one.take_status(later, 1.0)  # no step was declined since, so the next silence has another reason
    rerouting.after(Ending(kind=EndKind.STALLED), one, JOURNEY)
    assert one.view().cap == 1


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (None, None),
        ("run/7", WeightVersion(run_id="run", number=7)),
        ("a/b/0", WeightVersion(run_id="a/b", number=0)),
    ],
)
def test_versions_are_parsed(text: str | None, version: WeightVersion | None) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize("text", ["7", "run/", "/7", "run/x", ""])
def test_malformed_versions_are_refused(text: str) -> None:
    with pytest.raises(WorkerError, match="RUN/NUMBER"):
        parse_version(text)


def test_the_share_is_what_servings_steps_left_and_goes_stale() -> None:
    one = worker()
    assert one.view().share is None
    for now, busy_s in ((0.0, 5.0), (1.0, 5.4)):
        one.take_status(status(serving_busy_s=busy_s), now)
    view = one.view()
    assert view.share == pytest.approx(0.6)
    assert view.share_until == 1.0 + CONFIG.telemetry_max_age_s
    for second in range(2, 100):
        one.take_status(status(serving_busy_s=5.4 + 0.1 * (second - 1)), float(second))
    assert one.view().share == pytest.approx(0.9, abs=0.01)


def test_an_engine_that_began_anew_or_tells_no_busy_time_has_no_new_share() -> None:
    one = worker()
    for now, busy_s in ((0.0, 5.0), (1.0, 5.5), (2.0, 0.1)):
        one.take_status(status(serving_busy_s=busy_s), now)
    assert one.view().share == pytest.approx(0.5)
    one.take_status(status(), 3.0)
    assert one.view().share is None


def test_a_dedicated_gpu_is_always_whole() -> None:
    one = Worker(WorkerSpec(url="http://gpu:1"), CONFIG)
    view = one.view()
    assert (view.share, view.share_until) == (1.0, float("inf"))


def test_prefix_hits_teach_how_much_of_the_expected_cache_is_there() -> None:
    one = worker()
    for _ in range(60):
        one.found_cached(1000, 250)
    one.found_cached(0, 50)  # nothing was expected: says nothing
    assert one.cache_trust == pytest.approx(0.25, abs=0.01)


def test_a_turn_comes_under_the_lease_by_which_it_was_placed_and_no_later_one() -> None:
    one, job = worker(), JobAccount("math", RouterJob(), 0.0)
    one.take_status(RoutingStatus(lease=Lease(router="r", turns=4, fence=2)), 0.0)
    place = take_place(TurnView(session="t"), job, 0.0, one, 0.0)
    one.lost("silent")
    assert place.headers == b"X-Rose-Lease: r 2\r\n"
    one.take_status(RoutingStatus(lease=Lease(router="r", turns=4, lent_to="code", fence=3)), 1.0)
    assert place.headers == b"X-Rose-Lease: r 2\r\n", "the GPU is another job's now"


def test_a_worker_that_refused_a_turn_for_its_lease_gets_none_until_it_has_told_the_next_lease() -> None:
    one = worker()
    one.take_status(RoutingStatus(lease=Lease(router="r", turns=4)), 0.0)
    one.unleased()
    assert (one.view().cap, one.is_due.is_set()) == (0, True)
    one.take_status(RoutingStatus(lease=Lease(router="r", turns=3)), 0.1)
    assert one.view().cap == 3


def test_a_borrowed_worker_is_nobodys_while_its_former_jobs_turns_run() -> None:
    one = worker()
    one.begin_turn("old", 0)
    one.lend("new")
    assert one.view().owner == NOBODY
    one.end_turn("old")
    one.begin_turn("new", 0)
    assert one.view().owner == "new"


def test_a_worker_that_became_a_stock_engine_has_no_lease() -> None:
    one = worker()
    one.take_status(status(lease=Lease(router="r", turns=0)), 0.0)
    assert not one.view().has_room
    one.without_lease()
    assert one.view().has_room


async def test_a_worker_whose_answers_fail_the_router_counts_as_lost() -> None:
    class Puzzling(Worker):
        def take_status(self, status: RoutingStatus, now: float, every_s: float = 0.0) -> None:
            raise TypeError("scripted")

    config = RouterConfig(heartbeat_s=0.02, lost_after_s=0.2)
    async with ScriptedWorker() as scripted, aiohttp.ClientSession() as http:
        registry = Registry(config, http, Wire(ssl.create_default_context()), lambda: None)
        one = registry.add(WorkerSpec(url=scripted.url, kind=WorkerKind.SERVING))
        await until(lambda: one.is_alive)
        one.__class__ = Puzzling
        await until(lambda: not one.is_alive)
        assert one.problem == "TypeError: scripted"
        one.__class__ = Worker
        await until(lambda: one.is_alive)
        await registry.close()


async def test_heartbeats_go_on_when_what_they_bring_about_fails(caplog: pytest.LogCaptureFixture) -> None:
    num_beats = 0

    def place_turns() -> None:
        nonlocal num_beats
        num_beats += 1
        if num_beats in (1, 2, 4):
            raise RuntimeError("scripted")

    config = RouterConfig(heartbeat_s=0.02, lost_after_s=3600)
    async with ScriptedWorker(pressure="pressure") as scripted, aiohttp.ClientSession() as http:
        registry = Registry(config, http, Wire(ssl.create_default_context()), place_turns)
        one = registry.add(WorkerSpec(url=scripted.url, kind=WorkerKind.SERVING))
        await until(lambda: num_beats >= 5)
        scripted.pressure = "normal"
        await until(lambda: one.view().eligible)
        await registry.close()
    failures = [record for record in caplog.records if record.exc_info is not None]
    assert len(failures) == 2, "each failure is logged once, however long it lasts"


async def test_a_worker_that_hangs_holds_up_no_others_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_MOST_AT_ONCE", 1)
    monkeypatch.setattr(registry_module, "_MAKES_ROOM_S", 0.02)

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    config = RouterConfig(heartbeat_s=0.02, lost_after_s=3600)
    async with ScriptedWorker(pressure="pressure") as scripted, aiohttp.ClientSession() as http:
        server = await asyncio.start_server(hang, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        registry = Registry(config, http, Wire(ssl.create_default_context()), lambda: None)
        hung = registry.add(WorkerSpec(url=f"http://127.0.0.1:{port}"))
        one = registry.add(WorkerSpec(url=scripted.url, kind=WorkerKind.SERVING))
        await until(lambda: one.is_alive)
        scripted.pressure = "normal"
        await until(lambda: one.view().eligible)
        assert not hung.is_alive
        await registry.close()
        server.close()


def test_a_heartbeat_that_ends_as_it_makes_room_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_MAKES_ROOM_S", 0.05)

    async def heartbeat(registry: Registry, after_s: float) -> None:
        await asyncio.sleep(after_s)
        with contextlib.suppress(TimeoutError):
            async with registry._begun(), asyncio.timeout(0.05):
                await asyncio.Event().wait()

    async def room_after_heartbeats() -> int:
        async with aiohttp.ClientSession() as http:
            registry = Registry(CONFIG, http, Wire(ssl.create_default_context()), lambda: None)
            await asyncio.gather(*(heartbeat(registry, 0.0007 * number) for number in range(100)))
            await asyncio.sleep(0.1)
            return registry._room._value

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the router's command runs
        assert runner.run(room_after_heartbeats()) == registry_module._MOST_AT_ONCE


def test_the_share_of_a_gpu_in_a_large_fleet_is_known_until_its_second_next_heartbeat() -> None:
    one = worker()
    one.take_status(status(serving_busy_s=0.0), 0.0, 4.0)
    one.take_status(status(serving_busy_s=0.0), 1.0, 4.0)
    assert one.view().share_until == 9.0
    one.take_status(status(serving_busy_s=0.0), 1.0, 0.5)
    assert one.view().share_until == 1.0 + CONFIG.telemetry_max_age_s


async def test_a_worker_too_many_is_refused_and_one_that_is_removed_has_no_connection_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry_module, "MAX_WORKERS", 1)
    async with ScriptedWorker() as scripted, aiohttp.ClientSession() as http:
        wire = Wire(ssl.create_default_context())
        registry = Registry(RouterConfig(), http, wire, lambda: None)
        one = registry.add(WorkerSpec(url=scripted.url))
        with pytest.raises(ValueError, match=r"1 workers are registered, which is a router's limit"):
            registry.add(WorkerSpec(url="http://127.0.0.1:1"))
        await until(lambda: one.is_alive)
        await registry.beat(one)
        assert wire._idle
        registry.remove(one.id)
        assert not wire._idle
        await registry.close()


async def test_a_large_fleet_is_told_how_seldom_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "_MOST_PER_S", 10.0)
    leases = Leases()
    async with ScriptedWorker(leases=leases) as scripted, aiohttp.ClientSession() as http:
        registry = Registry(RouterConfig(), http, Wire(ssl.create_default_context()), lambda: None)
        for port in range(1, 10):  # nothing listens there
            registry.add(WorkerSpec(url=f"http://127.0.0.1:{port}"))
        one = registry.add(WorkerSpec(url=scripted.url))
        await until(lambda: one.is_alive)
        [holder] = leases._holders.values()
        assert holder.ask is not None
        assert holder.ask.every_s == 1.0, "ten workers, ten heartbeats a second"
        await registry.close()
