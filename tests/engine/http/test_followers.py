"""A router that follows an engine knows of new weights before the first token of them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

import uvicorn
from fastapi import FastAPI

from rose.engine.http import followers as followers_module
from rose.engine.http.control import ServedEngine
from rose.engine.http.endpoint import RoseEndpoint
from rose.engine.http.followers import Followers
from rose.engine.settings import EngineSettings
from rose.engine.status import StatusPage, page_path
from rose.messages import NOTHING_PUBLISHED, AdapterUpdate, WeightUpdate, WeightUpdated
from rose.scheduler.rollout.http.command import RunningRouter
from rose.scheduler.rollout.router_config import RouterConfig, WorkerSpec
from rose.types import Role


class Engine:
    """Without a model; tells what the router knows when its steps go on."""

    output_processor = SimpleNamespace(request_states={})
    outputs_queue = asyncio.Queue[object]()
    is_running = False  # there are no outputs to process

    def __init__(self) -> None:
        self.known: Callable[[], str] = str
        self.known_at_resume: list[str] = []
        self.engine_core = self

    async def resume_generation(self) -> None:
        self.known_at_resume.append(self.known())

    async def reset_prefix_cache(self, **_: object) -> bool:
        """There is no KV to drop."""
        return True

    async def collective_rpc(self, *_: object, **__: object) -> list[tuple[None, None, None]]:
        """One rank, which has nothing to say of what it loaded."""
        return [(None, None, None)]

    def __getattr__(self, name: str) -> Callable[..., Awaitable[None]]:
        async def call(*_: object, **__: object) -> None:
            await asyncio.sleep(0)

        return call


@pytest.fixture
async def served(runtime_dir: Path) -> AsyncIterator[tuple[str, Engine, ServedEngine]]:
    """An engine's routes on a socket."""
    page = StatusPage(page_path(runtime_dir, "e"), create=True)
    engine: Any = Engine()
    control = ServedEngine(engine, EngineSettings(role=Role.ROLLOUT, engine_id="e"), "m")
    app = FastAPI()
    RoseEndpoint().attach_router(app)
    app.state.rose = control
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", engine, control
    finally:
        server.should_exit = True
        await serving
        page.close()


async def test_steps_go_on_under_new_weights_only_when_the_router_knows_of_them(
    served: tuple[str, Engine, ServedEngine], staged: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # However long the machine stalls between two of the router's questions.
    monkeypatch.setattr(followers_module, "MOST_S", 600.0)
    monkeypatch.setattr(followers_module, "GONE_AFTER_INTERVALS", 1000.0)
    url, engine, control = served
    config = RouterConfig(port=0, workers=(WorkerSpec(url=url),), heartbeat_s=0.5, lost_after_s=600)
    async with RunningRouter(config) as router:
        (worker,) = router.plane.registry.workers()
        engine.known = lambda: str(worker.weight_version)
        while not worker.is_alive:
            await asyncio.sleep(0.01)
        versions = [f"run/{number}" for number in range(1, 4)]
        for version in versions:
            update = WeightUpdate(version=version, path=staged["path"], state_hash=staged["state_hash"])
            await control.apply_weights(update)
        assert engine.known_at_resume == versions


class Adapters:
    """An engine's adapters, without the engine."""

    def __init__(self) -> None:
        self.newest: list[str] = []
        self.problems: dict[str, str] = {}

    def versions(self) -> list[str]:
        return self.newest

    async def load(self, update: AdapterUpdate, *, is_active: bool) -> WeightUpdated:
        assert is_active
        self.newest = [update.version]
        return WeightUpdated(version=update.version, state_hash=update.state_hash)


@pytest.mark.slow
async def test_a_new_version_of_an_adapter_is_acknowledged_only_when_the_router_sends_turns_to_it(
    served: tuple[str, Engine, ServedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers_module, "MOST_S", 600.0)
    monkeypatch.setattr(followers_module, "GONE_AFTER_INTERVALS", 1000.0)
    url, _, control = served
    adapters: Any = Adapters()
    control.adapters = adapters
    config = RouterConfig(port=0, workers=(WorkerSpec(url=url),), heartbeat_s=0.5, lost_after_s=600)
    async with RunningRouter(config) as router:
        (worker,) = router.plane.registry.workers()
        while not worker.is_alive:
            await asyncio.sleep(0.01)
        for number in range(1, 4):
            await control.load_adapter(AdapterUpdate(version=f"math/{number}", path="unused", state_hash="0"))
            assert str(worker.adapters["math"]) == f"math/{number}"


async def test_only_followers_that_still_ask_are_waited_for() -> None:
    followers = Followers()
    await followers.until_told("run/1")
    followers.asked("gone", (), 1e-9)
    await followers.until_told("run/1")
    followers.asked("knows", ("other/7", "run/1"), 3600)
    await followers.until_told("run/1")


async def test_a_subscriber_is_known_from_the_start_or_from_its_first_question(
    served: tuple[str, Engine, ServedEngine],
) -> None:
    _, engine, control = served
    told = EngineSettings(role=Role.ROLLOUT, engine_id="e", has_subscriber=True)
    client: Any = engine
    status = ServedEngine(client, told, "m").status()
    assert (status.has_subscriber, status.follows_loans) == (True, False)
    assert not control.status().has_subscriber
    assert status.awaits_weights and not control.status().awaits_weights
    await control.loan.asked(None, None, 0.0)
    assert control.status().has_subscriber and control.status().follows_loans


async def test_an_engine_awaits_its_runs_first_weights_until_its_subscriber_says_that_there_are_none(
    served: tuple[str, Engine, ServedEngine],
) -> None:
    _, _, control = served
    told = []
    for problem in (None, NOTHING_PUBLISHED, None):
        await control.loan.asked(None, problem, 0.0)
        told.append(control.status().awaits_weights)
    await control.loan.asked("lent", NOTHING_PUBLISHED, 0.0)
    assert [*told, control.status().awaits_weights] == [True, False, True, True]
