"""Two routers before the same workers: one cap, one loan, one set of limits, and turns that outlive one."""

import asyncio
import errno
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from rose.engine.http.leases import Ask, Leases
from rose.errors import ConfigError
from rose.messages import Lease
from rose.ports import free_port
from rose.scheduler.rollout.http.command import RunningRouter
from rose.scheduler.rollout.http.shared.peers import is_refused
from rose.scheduler.rollout.router_config import RouterConfig, RouterJob, WorkerSpec
from rose.trainers.turns import RouterTurns
from tests.scheduler.rollout.conftest import Client, router_process, running_router
from tests.scheduler.rollout.scripted_worker import ScriptedWorker, expected_tokens
from tests.scheduler.rollout.waiting import until

PROMPT = [1, 2, 3, 4]
BODY: dict[str, Any] = {"model": "scripted", "prompt": PROMPT, "max_tokens": 5, "return_token_ids": True}
SHORT: dict[str, Any] = {"heartbeat_s": 0.05, "avoid_s": 0.05}


@asynccontextmanager
async def two_routers(
    *workers: WorkerSpec | str, with_peers: bool = True, **settings: Any
) -> AsyncIterator[tuple[Client, Client]]:
    """Two routers of this process, the second with the first as its peer."""
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
        running_router(*workers, **{**SHORT, **settings}) as one,
    ):
        peers = (one.url,) if with_peers else ()
        async with running_router(*workers, **{**SHORT, **settings}, peers=peers) as other:
            if with_peers:
                await until(lambda: one.plane.jobs.num_routers == other.plane.jobs.num_routers == 2)
            yield Client(one, http), Client(other, http)


def granted(client: Client, worker: ScriptedWorker) -> int:
    lease = client.known(worker).lease
    return lease.turns if lease is not None else -1


def is_wanted(client: Client, worker: ScriptedWorker) -> bool:
    lease = client.known(worker).lease
    return lease is not None and lease.is_wanted


async def test_two_routers_share_the_cap_of_a_gpu_and_never_exceed_it() -> None:
    async with ScriptedWorker(leases=Leases()) as worker, two_routers(worker.url) as clients:
        await until(lambda: [granted(client, worker) for client in clients] == [8, 8])
        worker.hold()
        turns = [asyncio.create_task(client.complete(BODY)) for client in clients for _ in range(20)]
        await until(lambda: len(worker.requests) == 16)
        worker.go_on()
        assert await asyncio.gather(*turns) and worker.most_in_flight == 16


async def test_a_router_uses_what_the_other_does_not_want() -> None:
    async with ScriptedWorker(leases=Leases()) as worker, two_routers(worker.url) as (one, other):
        worker.hold()
        turns = [asyncio.create_task(one.complete(BODY)) for _ in range(20)]
        await until(lambda: len(worker.requests) == 16)
        turns.append(asyncio.create_task(other.complete(BODY)))
        await asyncio.sleep(0.2)
        assert len(worker.requests) == 16, "the cap is used up, and what runs is not taken away"
        worker.go_on()
        await asyncio.gather(*turns)
        assert worker.most_in_flight == 16


async def test_a_serving_gpu_is_lent_to_one_job_at_a_time_by_both_routers() -> None:
    async with ScriptedWorker(leases=Leases()) as worker:
        spec = WorkerSpec.model_validate({"url": worker.url, "kind": "serving"})
        async with two_routers(spec) as (one, other):
            worker.hold()
            math = asyncio.create_task(one.complete(BODY, X_Rose_Job="math"))
            await until(lambda: len(worker.requests) == 1)
            code = asyncio.create_task(other.complete(BODY, X_Rose_Job="code"))
            await until(lambda: is_wanted(one, worker))  # and so the router of math gives it back at once
            assert len(worker.requests) == 1, "the GPU is lent to math"
            assert other.known(worker).view().owner in ("", "math")
            worker.go_on()
            await math
            await code
            lease = other.known(worker).lease
            assert lease is not None and lease.lent_to == "code"
            assert lease.fence >= 2


async def test_a_job_of_higher_priority_gets_the_gpu_that_another_router_keeps_using() -> None:
    jobs = {"high": RouterJob(priority=1)}
    async with ScriptedWorker(leases=Leases()) as worker:
        spec = WorkerSpec.model_validate({"url": worker.url, "kind": "serving"})
        async with two_routers(spec, jobs=jobs, turns_per_gpu=2) as (one, other):

            async def keep_asking() -> None:
                while True:
                    await one.complete(BODY, X_Rose_Job="low")

            low = [asyncio.create_task(keep_asking()) for _ in range(8)]
            await until(lambda: len(worker.requests) > 8)
            for _ in range(3):
                await asyncio.wait_for(other.complete(BODY, X_Rose_Job="high"), 120)
                worker.requests.clear()
                await until(lambda: len(worker.requests) > 8)  # low goes on
            assert not any(task.done() for task in low), "no turn failed"
            for task in low:
                task.cancel()
            await asyncio.gather(*low, return_exceptions=True)


async def test_turns_that_may_not_begin_hold_no_gpu() -> None:
    async with ScriptedWorker(leases=Leases()) as worker:
        spec = WorkerSpec.model_validate({"url": worker.url, "kind": "serving"})
        async with two_routers(spec, with_peers=False) as (one, other):
            await one.complete(BODY, X_Rose_Job="math")
            await one.post("/admin/pause", {"job": "math"})
            math = asyncio.create_task(one.complete(BODY, X_Rose_Job="math"))
            await asyncio.wait_for(other.complete(BODY, X_Rose_Job="code"), 120)
            await one.post("/admin/resume", {"job": "math"})
            await math


async def test_a_jobs_limit_is_divided_among_routers() -> None:
    settings: dict[str, Any] = {"jobs": {"math": {"max_in_flight": 4}}, "heartbeat_s": 1.0}
    async with ScriptedWorker(leases=Leases()) as worker, two_routers(worker.url, **settings) as clients:
        worker.hold()
        turns = [
            asyncio.create_task(client.complete(BODY, X_Rose_Job="math"))
            for client in clients
            for _ in range(5)
        ]
        await until(lambda: len(worker.requests) == 4)
        await asyncio.sleep(0.2)
        assert len(worker.requests) == 4
        worker.go_on()
        await asyncio.gather(*turns)


async def test_every_worker_is_told_once_of_each_router_that_died() -> None:
    told: list[str] = []

    class Listening(Leases):
        def asked(self, ask: Ask, now: float) -> Lease:
            told.extend([ask.gone] if ask.gone is not None else [])
            return super().asked(ask, now)

    async with ScriptedWorker(leases=Listening()) as worker, running_router(worker.url, **SHORT) as router:
        registry = router.plane.registry
        for name in ("a", "b", "back"):
            registry.router_gone(name)
        registry.router_lives("back")
        await until(lambda: len(told) >= 2)
        await asyncio.sleep(0.3)
        assert sorted(told) == ["a", "b"]


@pytest.mark.parametrize(
    ("number", "has_died"), [(errno.ECONNREFUSED, True), (errno.EMFILE, False), (errno.EHOSTUNREACH, False)]
)
def test_only_a_refused_connection_shows_that_a_peer_died(number: int, has_died: bool) -> None:
    key = ConnectionKey("peer", 1, False, True, None, None, None, None)
    assert is_refused(aiohttp.ClientConnectorError(key, OSError(number, "failed"))) is has_died


# What an admin has set ------------------------------------------------------------------------------------


KEY = {"Authorization": "Bearer adm"}


async def admin(client: Client, method: str, path: str, body: dict[str, Any] | None = None) -> None:
    """Makes a change, which must succeed."""
    url = f"{client.router.url}{path}"
    async with client.http.request(
        method, url, json=body if body is not None else {}, headers=KEY
    ) as response:
        assert response.status in (200, 201), await response.text()


async def test_what_an_admin_sets_at_one_router_is_at_the_other() -> None:
    async with (
        ScriptedWorker() as worker,
        ScriptedWorker() as added,
        ScriptedWorker() as gone,
        two_routers(worker.url, gone.url, admin_key="adm") as (one, other),
    ):
        await admin(one, "POST", "/workers", {"url": added.url, "kind": "serving", "gpus": 2})
        await admin(one, "POST", "/admin/pause", {"job": "math"})
        await admin(one, "POST", "/admin/rl_step", {"step": 3, "version": "run/7"})
        await admin(other, "PUT", "/admin/version", {"mode": "max-lag", "max_lag": 3})
        await admin(other, "PUT", "/admin/jobs/math", {"key": "secret", "weight": 2.5})
        await admin(other, "DELETE", f"/workers/{gone.id}")
        for plane in (one.router.plane, other.router.plane):
            await until(lambda p=plane: set(p.registry.members()) == {worker.id, added.id})  # type: ignore[misc]
            await until(lambda p=plane: p.versions.max_lag == 3)  # type: ignore[misc]
            await until(lambda p=plane: p.jobs.holder("secret") == "math")  # type: ignore[misc]
            assert plane.jobs.spec("math").weight == 2.5
            assert plane.jobs.get("math", 0.0).is_paused
            assert plane.registry.members()[added.id].spec.gpus == 2
            assert plane.registry.newest._announced == {"run": 7}
        await admin(other, "DELETE", "/admin/jobs/math")
        await until(lambda: one.router.plane.jobs.holder("secret") is None)
        # Its account is gone too: it would borrow on, without its limit.
        assert all(job.name != "math" for job in one.router.plane.jobs)


async def test_a_router_alone_starts_again_with_all_that_it_knew(tmp_path: Path) -> None:
    state = tmp_path / "router.json"
    async with ScriptedWorker() as worker, ScriptedWorker() as added, ScriptedWorker() as gone:
        mine: dict[str, Any] = {**SHORT, "state": state, "admin_key": "adm"}
        async with (
            running_router(worker.url, gone.url, **mine) as router,
            aiohttp.ClientSession() as http,
        ):
            client, worker.version = Client(router, http), "run/9"
            await admin(client, "POST", "/workers", {"url": added.url})
            await admin(client, "POST", f"/workers/{added.id}/drain")
            await admin(client, "DELETE", f"/workers/{gone.id}")
            await admin(client, "POST", "/admin/pause")
            await admin(client, "PUT", "/admin/jobs/math", {"key": "secret"})
            await admin(client, "PUT", "/admin/version", {"mode": "pinned"})
            await until(lambda: "run/9" in state.read_text())
        assert state.stat().st_mode & 0o777 == 0o600
        worker.version = None
        async with running_router(worker.url, gone.url, **mine) as router:
            plane = router.plane
            assert set(plane.registry.members()) == {worker.id, added.id}
            assert plane.registry.members()[added.id].is_draining
            assert plane.dispatcher.is_paused
            assert plane.jobs.holder("secret") == "math"
            assert plane.versions.mode == "pinned"
            assert plane.registry.newest.of("scripted") == {"run": 9}


async def test_what_was_set_while_a_peer_was_away_reaches_it_and_the_last_change_wins(tmp_path: Path) -> None:
    ports = [free_port(), free_port()]

    def config(number: int) -> RouterConfig:
        peer = f"http://127.0.0.1:{ports[1 - number]}"
        state = tmp_path / f"{number}.json"
        return RouterConfig(port=ports[number], peers=(peer,), state=state, heartbeat_s=0.05)

    async with aiohttp.ClientSession() as http:

        async def set_lag(router: RunningRouter, lag: int) -> None:
            body = {"mode": "max-lag", "max_lag": lag}
            async with http.put(f"{router.url}/admin/version", json=body) as response:
                assert response.status == 200

        async with RunningRouter(config(0)) as one:
            async with RunningRouter(config(1)) as other:
                await set_lag(one, 5)
                await until(lambda: other.plane.versions.max_lag == 5)
            await set_lag(one, 6)
            async with RunningRouter(config(1)) as other:
                assert other.plane.versions.max_lag == 5, "its own file"
                await until(lambda: other.plane.versions.max_lag == 6)
                await set_lag(other, 7)
                await until(lambda: one.plane.versions.max_lag == 7)


async def test_routers_exchange_nothing_without_the_admin_key() -> None:
    body = {"name": "stranger", "every_s": 1, "digest": ""}
    async with running_router(admin_key="adm") as router, aiohttp.ClientSession() as http:
        client = Client(router, http)
        assert (await client.post("/admin/peers", body))[0] == 401
        status, answer = await client.post("/admin/peers", body, Authorization="Bearer adm")
        assert (status, answer["name"]) == (200, router.plane.registry.name)
    async with running_router(api_key="cli") as router, aiohttp.ClientSession() as http:
        client = Client(router, http)
        assert (await client.post("/admin/peers", body, Authorization="Bearer cli"))[0] == 403


async def test_a_state_that_can_not_be_read_or_written_is_a_clear_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{}x")
    for state, match in (
        (broken, "not written by rose router"),
        (tmp_path / "no" / "state.json", "there is no folder"),
    ):
        with pytest.raises(ConfigError, match=match):
            async with RunningRouter(RouterConfig(port=0, state=state)):
                pass


# The death of a router ------------------------------------------------------------------------------------


@pytest.fixture
def patient(tmp_path: Path) -> str:
    """A file by which nothing is a stall or a loss: a busy machine makes long pauses too."""
    file = tmp_path / "router.yaml"
    file.write_text("{stall_s: 300, first_token_s: 300, lost_after_s: 300}")
    return str(file)


class WatchedTurns(RouterTurns):
    """Turns that tell through which routers their tokens come."""

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__(",".join(urls), "scripted")
        self._routers = list(urls)
        self._streams: list[tuple[str, Any]] = []

    async def _ask(self, url: str, body: Mapping[str, Any], headers: Mapping[str, str], answer: Any) -> None:
        self._streams.append((url, answer))
        await super()._ask(url, body, headers, answer)

    def routers(self) -> list[int]:
        """The indexes of the routers, one for each turn that has tokens."""
        return [
            number
            for url, answer in self._streams
            for number, router in enumerate(self._routers)
            if answer.token_ids and url.startswith(router)
        ]


@pytest.mark.slow
async def test_turns_of_a_killed_router_go_on_at_the_other_and_the_cap_holds(patient: str) -> None:
    ports = [free_port(), free_port()]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    async with ScriptedWorker(leases=Leases()) as worker:
        flags = [[patient, "--worker", worker.url, "--peer", urls[1 - number]] for number in range(2)]
        async with router_process(ports[0], *flags[0]) as one, router_process(ports[1], *flags[1]) as other:
            turns = WatchedTurns(urls)
            worker.hold_after = 3
            asked = [
                asyncio.create_task(turns.complete(f"t{number}", [number, 2], {"max_tokens": 8}))
                for number in range(40)
            ]
            await until(lambda: worker.num_held >= 16 and bool(turns.routers()))
            killed = (one, other)[turns.routers()[0]]  # one of them may have got the whole cap
            killed.send_signal(signal.SIGKILL)
            await killed.wait()
            worker.let_pass()
            for number, answer in enumerate(await asyncio.gather(*asked)):
                assert answer.token_ids == expected_tokens([number, 2], 8)
                assert answer.logprobs == [-token / 1000 for token in answer.token_ids]
            await turns.close()
            resumed = [body for body in worker.requests if len(body["prompt"]) > 2]
            assert resumed, "turns went on behind the tokens that had arrived"
            assert worker.most_in_flight <= 16


@pytest.mark.slow
async def test_a_turn_waits_for_a_router_that_starts_again() -> None:
    port = free_port()
    async with ScriptedWorker() as worker:
        turns = RouterTurns(f"http://127.0.0.1:{port}", "scripted")
        waiting = asyncio.create_task(turns.complete("t", PROMPT, {"max_tokens": 4}))
        await asyncio.sleep(0.2)
        async with router_process(port, "--worker", worker.url):
            assert (await waiting).token_ids == expected_tokens(PROMPT, 4)
        await turns.close()
