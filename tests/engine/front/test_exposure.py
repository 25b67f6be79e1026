"""Who reaches a front: beyond this machine only clients of a router that wants a key from each, and none for
longer than it reads."""

import asyncio
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from forked_server import ForkedServer
from front.running import READY_S

from rose.engine.front.agreement import RouterQuestions
from rose.engine.front.command import _vllm_arguments
from rose.engine.front.server import listen
from rose.http import http_client
from rose.node.processes import ServerProcess
from tests.scheduler.rollout.conftest import running_router
from tests.scheduler.rollout.scripted_worker import ScriptedWorker

pytestmark = pytest.mark.vllm


def front(router_url: str, log: Path, environment: Mapping[str, str]) -> str:
    """Returns what a front that should listen everywhere says when it ends."""
    argv = [sys.executable, "-m", "rose.cli", "front", "--router", router_url, "--model", "scripted"]
    command = ServerProcess([*argv, "--host", "0.0.0.0"], "front", log, {"VLLM_API_KEY": "", **environment})
    with ForkedServer(command) as started:
        assert started.wait(READY_S) == 2, started.log_tail()
    return log.read_text().splitlines()[-1]


async def test_a_front_everywhere_is_refused_without_a_key_and_before_an_open_router(
    tmp_path: Path,
) -> None:
    async with (
        ScriptedWorker() as worker,
        running_router(worker.url) as router,
        running_router(worker.url, api_key="cli") as keyed,
    ):
        both = f"{keyed.url},{router.url}"
        for urls, environment, named in (
            (router.url, {"VLLM_API_KEY": "leaves /invocations open"}, "the router"),
            (both, {"ROSE_ROUTER_API_KEY": "cli"}, router.url),
        ):
            line = await asyncio.to_thread(front, urls, tmp_path / "front.log", environment)
            assert "--host 0.0.0.0: whoever reaches" in line
            assert f"ROSE_ROUTER_API_KEY at {named} and front" in line


@pytest.mark.parametrize("key", [None, "cli"])
async def test_a_front_finds_out_whether_its_router_is_open(key: str | None) -> None:
    async with ScriptedWorker() as worker, running_router(worker.url, api_key=key) as router:

        def ask() -> bool:
            with http_client(router.url, key="cli", timeout=60) as client:
                return RouterQuestions(client).is_open(router.url)

        assert await asyncio.to_thread(ask) == (key is None)


def test_the_kernel_cuts_off_a_client_that_reads_nothing_for_a_minute() -> None:
    _, listener = listen(_vllm_arguments("nowhere", ["--port", "0"]))
    with listener:
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


def test_a_front_of_a_router_listens_for_it_alone(tmp_path: Path) -> None:
    _, listener = listen(_vllm_arguments("nowhere", ["--uds", str(tmp_path / "0")]))
    with listener:
        assert listener.family == socket.AF_UNIX
