"""`rose router` with a front, and a proxy before its worker that cuts answers."""

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
from forked_server import ForkedServer

from rose.node.processes import ServerProcess
from rose.ports import free_port
from tests.scheduler.rollout.cutting_proxy import CuttingProxy

NEVER = 10**9
PARSERS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
    *("--dtype", "float32"),
)
"""The same at the worker and at the front."""
OTHERS = ("--middleware", "front.other_parsers.OtherParsers")
SINGLE = ("--middleware", "front.other_parsers.SingleOutputs")
ADAPTERS = ("--enable-lora", "--max-loras", "4", "--max-lora-rank", "8")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
READY_S = 600.0
ROUTER = """
port: {port}
workers: [{{url: "{url}"}}]
stall_s: 300
first_token_s: 300
lost_after_s: 300
avoid_s: 0.05
stream_interval: 1
fronts: {{count: 1, flags: [{flags}]}}
"""
"""Nothing is a stall or a loss because the machine is busy. A token per event: every cut has its place."""


class Setup:
    """Where the tests ask: the engine itself, and the router with a front."""

    def __init__(self, model: Path, engine_url: str, router_url: str, proxy: CuttingProxy) -> None:
        self.model = model
        self.engine_url = engine_url
        self.router_url = router_url
        self.proxy = proxy


class ProxyThread:
    """A cutting proxy with an event loop of its own: it outlives the tests'."""

    def __init__(self, worker_url: str) -> None:
        self.proxy = CuttingProxy(worker_url, NEVER)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> CuttingProxy:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.proxy.__aenter__(), self._loop).result()
        return self.proxy

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self.proxy.__aexit__(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextlib.contextmanager
def front_router(
    folder: Path, worker_url: str, model: Path, wait_worker: Callable[[], object]
) -> Iterator[str]:
    """The user's own command, started while its worker starts; ready once its front answers. Both are forked:
    test_tls.py starts them as a user does."""
    port, file, log = free_port(), folder / "router.yaml", folder / "router.log"
    flags = ", ".join(f'"{flag}"' for flag in ("--model", str(model), *PARSERS))
    file.write_text(ROUTER.format(port=port, url=worker_url, flags=flags))
    argv = [sys.executable, "-m", "rose.cli", "router", str(file)]
    with ForkedServer(ServerProcess(argv, "router", log, ENVIRONMENT), "rose.cli") as router:
        url = f"http://127.0.0.1:{port}"
        wait_worker()
        router.wait_until(lambda: _num_fronts(url) == 1, "a front answers", READY_S)
        yield url


@contextlib.contextmanager
def front_alone(folder: Path, setup: Setup, **environment: str) -> Iterator[str]:
    """A front of its own before a router, with all parsers."""
    port, log = free_port(), folder / "front.log"
    argv = [sys.executable, "-m", "rose.engine.front.command", "--router", setup.router_url]
    argv += ["--model", str(setup.model), "--port", str(port), *PARSERS, *OTHERS]
    with ForkedServer(ServerProcess(argv, "front", log, {**ENVIRONMENT, **environment})) as front:
        url = f"http://127.0.0.1:{port}"
        front.wait_ready(f"{url}/health", READY_S)
        yield url


def _num_fronts(router_url: str) -> int:
    try:
        return int(httpx.get(f"{router_url}/health").json()["fronts"])
    except (httpx.TransportError, KeyError):
        return 0
