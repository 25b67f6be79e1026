"""What the scheduler hears of the use of serving GPUs: of routers that start anew, of jobs of one name."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rose.config import Settings
from rose.engine.http.leases import Leases
from rose.ports import free_port
from rose.scheduler.rollout.http.command import RunningRouter
from rose.scheduler.rollout.placing.views import WorkerKind
from rose.scheduler.rollout.router_config import WorkerSpec
from rose.scheduler.runtime.job.spec import RouterSpec
from rose.scheduler.runtime.lending.fleet_router import FleetRouter
from rose.scheduler.runtime.lending.loans import Loan, Use
from tests.scheduler.rollout.conftest import running_router
from tests.scheduler.rollout.scripted_worker import ScriptedWorker
from tests.scheduler.rollout.waiting import until

ADMIN_KEY = "the-admin"
FIRST = Loan(job="math", key="first-key", submission=1, run_id="run", max_serving_gpus=1)
SECOND = Loan(job="math", key="second-key", submission=2, run_id="run", max_serving_gpus=1)


@asynccontextmanager
async def lending_router(port: int = 0, leases: Leases | None = None) -> AsyncIterator[RunningRouter]:
    """A router that has forgotten everything, with a serving GPU of its own."""
    async with ScriptedWorker(leases=leases) as worker:
        spec = WorkerSpec(url=worker.url, kind=WorkerKind.SERVING)
        async with running_router(spec, port=port, admin_key=ADMIN_KEY, heartbeat_s=0.05) as router:
            yield router


def fleet_of(*routers: RunningRouter) -> FleetRouter:
    """The scheduler's side. Its thread waits for loans; the tests tell the routers instead."""
    url = ",".join(router.url for router in routers)
    return FleetRouter(RouterSpec(url=url), Settings.from_environment({"ROSE_ROUTER_ADMIN_KEY": ADMIN_KEY}))


async def tell(fleet: FleetRouter, *loans: Loan) -> tuple[Use, ...]:
    await asyncio.to_thread(fleet._tell, loans)
    news = fleet.news()
    assert news.problem is None
    return news.used


async def run_turn(router: RunningRouter, loan: Loan) -> None:
    body = {"model": "scripted", "prompt": [1, 2, 3], "max_tokens": 5}
    headers = {"Authorization": f"Bearer {loan.key}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{router.url}/v1/completions", json=body, headers=headers) as answer,
    ):
        assert answer.status == 200, await answer.text()


async def test_what_a_router_has_counted_is_of_the_submission_whose_key_it_had() -> None:
    async with lending_router() as router:
        fleet = fleet_of(router)
        assert await tell(fleet, FIRST) == ()
        await run_turn(router, FIRST)
        [before] = await tell(fleet, FIRST)
        assert (before.job, before.submission) == ("math", 1) and before.gpu_s > 0
        await run_turn(router, FIRST)
        [last] = await tell(fleet, SECOND)
        assert (last.submission, last.meter) == (1, before.meter) and last.gpu_s > before.gpu_s
        assert await tell(fleet, SECOND) == ()
        await run_turn(router, SECOND)
        [after] = await tell(fleet, msgspec.structs.replace(SECOND, is_over=True))
        assert after.submission == 2 and after.meter != before.meter


async def test_another_router_that_still_has_an_earlier_jobs_key_charges_no_later_job() -> None:
    async with lending_router() as first, lending_router() as second:
        await tell(fleet_of(second), FIRST)
        await run_turn(second, FIRST)
        fleet = fleet_of(first, second)
        assert await tell(fleet, SECOND) == ()
        assert await tell(fleet, SECOND) == ()


async def test_a_jobs_priority_reaches_the_router_and_the_engine_that_lends_its_gpu() -> None:
    async with lending_router(leases=(leases := Leases())) as router:
        fleet = fleet_of(router)
        await tell(fleet, FIRST)
        assert router.plane.jobs.spec("math").priority == 0
        await tell(fleet, msgspec.structs.replace(FIRST, priority=5))
        assert router.plane.jobs.spec("math").priority == 5
        await run_turn(router, FIRST)
        await until(lambda: [each.ask.priority for each in leases._holders.values() if each.ask] == [5])


@pytest.mark.parametrize("num_schedulers", [1, 2])
async def test_a_router_that_starts_anew_counts_on_another_meter(num_schedulers: int) -> None:
    port = free_port()
    async with lending_router(port) as router:
        fleet = fleet_of(router)
        await tell(fleet, FIRST)
        await run_turn(router, FIRST)
        [before] = await tell(fleet, FIRST)
    async with lending_router(port) as router:
        again = fleet if num_schedulers == 1 else fleet_of(router)
        assert await tell(again, FIRST) == ()
        await run_turn(router, FIRST)
        [after] = await tell(again, FIRST)
        assert (after.submission, after.gpu_s > 0) == (1, True) and after.meter != before.meter


async def test_a_router_of_another_version_is_named_and_keeps_no_other_from_being_told() -> None:
    """It shows its jobs in another form, and one beside it a job without one of a loan's fields."""
    put: list[str] = []

    def router(jobs: object) -> TestServer:
        async def show(_: web.Request) -> web.Response:
            return web.json_response({"jobs": jobs})

        async def take(request: web.Request) -> web.Response:
            put.append(request.path)
            return web.json_response({})

        app = web.Application()
        app.add_routes([web.get("/admin/jobs", show), web.put("/admin/jobs/{job}", take)])
        return TestServer(app)

    settings = Settings.from_environment({"ROSE_ROUTER_ADMIN_KEY": ADMIN_KEY})
    async with router(["math"]) as other, router({"math": {"has_key": True, "run_id": "run"}}) as known:
        alone = FleetRouter(RouterSpec(url=str(other.make_url(""))), settings)
        alone.want((FIRST,))
        await until(lambda: "of this scheduler's version; check" in (alone.news().problem or ""))
        both = FleetRouter(RouterSpec(url=f"{known.make_url('')},{other.make_url('')}"), settings)
        both.want((FIRST,))
        await until(lambda: put == ["/admin/jobs/math"] and both.news().problem is None)
