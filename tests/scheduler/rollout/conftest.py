"""Routers for tests: the real service on a free port."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from rose.scheduler.rollout.http.command import RunningRouter
from rose.scheduler.rollout.placing.views import WorkerKind
from rose.scheduler.rollout.router_config import RouterConfig, WorkerSpec
from rose.scheduler.rollout.workers.worker import Worker
from tests.scheduler.rollout.scripted_worker import ScriptedWorker
from tests.scheduler.rollout.stock_worker import StockWorker, stock_worker
from tests.scheduler.rollout.tiny_model import make_tiny_qwen3
from tests.scheduler.rollout.waiting import until


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StockWorker]:
    """One real engine for all tests of this folder: it takes longer to start than they do."""
    model = make_tiny_qwen3(tmp_path_factory.mktemp("model"))
    with stock_worker(model, tmp_path_factory.mktemp("log") / "engine.log") as worker:
        yield worker


@pytest.fixture
def engine_url(engine: StockWorker) -> str:
    return engine.url


class Client:
    """The router and a client of it."""

    def __init__(self, router: RunningRouter, http: aiohttp.ClientSession) -> None:
        self.router = router
        self.http = http

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, Any]:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.post(f"{self.router.url}{path}", json=body, headers=names) as response:
            return response.status, await response.json()

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(f"{self.router.url}{path}") as response:
            return response.status, await response.json()

    async def complete(self, body: dict[str, Any], **headers: str) -> Any:
        status, answer = await self.post("/v1/completions", {"return_token_ids": True, **body}, **headers)
        assert status == 200, answer
        return answer

    def known(self, worker: ScriptedWorker) -> Worker:
        """What the router knows of a worker."""
        return self.router.plane.registry.members()[worker.id]

    def counters(self) -> Any:
        return self.router.plane.records.counters.as_json()


@asynccontextmanager
async def running_router(*workers: WorkerSpec | str, **settings: Any) -> AsyncIterator[RunningRouter]:
    """A router on a free port that sees these workers, or those at these addresses, alive."""
    specs = tuple(each if isinstance(each, WorkerSpec) else WorkerSpec(url=each) for each in workers)
    # Nothing is a stall or a loss by default: a busy machine makes long pauses too.
    patient = {"port": 0, "stall_s": 300, "first_token_s": 300, "lost_after_s": 300}
    config = RouterConfig(workers=specs, **{**patient, **settings})
    async with RunningRouter(config) as router:
        await until(lambda: all(w.is_alive for w in router.plane.registry.workers()))
        yield router


StartRouter = Callable[..., AbstractAsyncContextManager[Client]]


@pytest.fixture
def start_router() -> StartRouter:
    """start_router(worker or (worker, kind), ..., **settings): a router that sees them all alive."""

    @asynccontextmanager
    async def start(
        *workers: ScriptedWorker | tuple[ScriptedWorker, str], **settings: Any
    ) -> AsyncIterator[Client]:
        pairs = [w if isinstance(w, tuple) else (w, "dedicated") for w in workers]
        specs = tuple(WorkerSpec(url=worker.url, kind=WorkerKind(kind)) for worker, kind in pairs)
        # Without the limit of 100 connections, which would queue requests here instead of in the router.
        connector, short = aiohttp.TCPConnector(limit=0), {"heartbeat_s": 0.05, "avoid_s": 0.05}
        async with (
            running_router(*specs, **{**short, **settings}) as router,
            aiohttp.ClientSession(connector=connector) as http,
        ):
            yield Client(router, http)

    return start


def deaf_client(router_url: str, path: str, body: dict[str, Any]) -> socket.socket:
    """Sends a request, and reads nothing of its answer."""
    data = json.dumps(body).encode()
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, port = router_url.removeprefix("http://").split(":")
    deaf.connect((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nHost: r\r\nContent-Length: {len(data)}\r\n\r\n"
    deaf.sendall(head.encode() + data)
    return deaf


@asynccontextmanager
async def router_process(port: int, *flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`rose router` in a process of its own, which listens."""
    command = [sys.executable, "-m", "rose.scheduler.rollout.http.command", "--port", str(port), *flags]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        assert await process.stdout.readline()
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
