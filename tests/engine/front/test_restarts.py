"""A router that is killed and started again has all that it knew, and its clients' streams go on."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from front.chats import Json, streamed
from front.running import ENVIRONMENT, READY_S, Setup, front_alone
from real_engine import until

from rose.node.processes import ServerProcess
from rose.ports import free_port
from rose.trainers.turns import RouterTurns, TurnAnswer

pytestmark = pytest.mark.vllm
ADMIN = {"Authorization": "Bearer adm"}
JOB_KEY = "a-long-secret"
LIMIT, NUM_CHATS, NUM_TURNS, NUM_TOKENS = 3, 4, 2, 700
PATIENT = "{stall_s: 300, first_token_s: 300, lost_after_s: 300, stream_interval: 1}"
PROMPT = list(range(40, 60))
SAMPLING: Json = {"temperature": 0.0, "ignore_eos": True, "max_tokens": NUM_TOKENS}
LONG: Json = {"messages": [{"role": "user", "content": "[count]"}], **SAMPLING, "logprobs": True}


class Router:
    """`rose router`, which starts without a worker and is started again at the same address."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        (folder / "router.yaml").write_text(PATIENT)

    @contextlib.contextmanager
    def running(self) -> Iterator[ServerProcess]:
        own = [str(self._folder / "router.yaml"), "--port", str(self._port)]
        argv = [sys.executable, "-m", "rose.cli", "router", *own]
        settings = {"ROSE_ROUTER_ADMIN_KEY": "adm", "ROSE_STATE_DIR": str(self._folder / "state")}
        log = self._folder / "router.log"
        with ServerProcess(argv, "router", log, {**ENVIRONMENT, **settings}) as process:
            process.wait_until(self._listens, "the router listens", READY_S)
            yield process

    def _listens(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health").status_code in (200, 503)
        return False

    def ask(self, method: str, path: str, body: Json | None = None) -> Any:
        return httpx.request(method, self.url + path, json=body, headers=ADMIN).raise_for_status().json()

    def num_tokens(self) -> int:
        return sum(worker["tokens"] for worker in self.ask("GET", "/workers")["workers"])

    def num_queued(self) -> int:
        return int(self.ask("GET", "/admin/status")["jobs"]["math"]["queued"])

    def known(self) -> Json:
        """What an admin has set."""
        jobs = self.ask("GET", "/admin/jobs")["jobs"]
        settings = ("weight", "max_in_flight", "max_queued", "run_id", "model", "paused", "has_key")
        return {
            "workers": [worker["id"] for worker in self.ask("GET", "/workers")["workers"]],
            "jobs": {name: {key: jobs[name][key] for key in settings} for name in ("math", "code")},
            "version": self.ask("GET", "/admin/version"),
        }


def turn(router_url: str, number: int, key: str | None) -> TurnAnswer:
    """A trainer's turn, which is sent again with its Idempotency-Key and the tokens that have come."""

    async def ask() -> TurnAnswer:
        turns = RouterTurns(router_url, "tiny", key)
        try:
            return await turns.complete(f"t{number}", [number, *PROMPT], SAMPLING)
        finally:
            await turns.close()

    return asyncio.run(ask())


def test_a_killed_router_starts_again_with_all_it_knew_and_its_streams_go_on(
    front: Setup, tmp_path: Path
) -> None:
    expected = streamed(front.engine_url, LONG)
    expected_turns = [turn(front.router_url, number, None) for number in range(NUM_TURNS)]
    router = Router(tmp_path)
    setup = Setup(front.model, front.engine_url, router.url, front.proxy)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(router.running())
        router.ask("POST", "/workers", {"url": front.engine_url})
        router.ask("PUT", "/admin/jobs/math", {"key": JOB_KEY, "max_in_flight": LIMIT, "weight": 3})
        router.ask("PUT", "/admin/jobs/code", {"key": "another-secret"})
        router.ask("POST", "/admin/pause", {"job": "code"})
        router.ask("PUT", "/admin/version", {"mode": "max-lag", "max_lag": 2})
        url = stack.enter_context(front_alone(tmp_path, setup, ROSE_ROUTER_API_KEY=JOB_KEY))
        clients = stack.enter_context(ThreadPoolExecutor(NUM_CHATS + NUM_TURNS))
        turns = [clients.submit(turn, router.url, number, JOB_KEY) for number in range(NUM_TURNS)]
        until(lambda: router.num_tokens() > 0, "tokens have come")
        authorization = {"Authorization": f"Bearer {JOB_KEY}"}
        chats = [clients.submit(streamed, url, LONG, **authorization) for _ in range(NUM_CHATS)]
        until(lambda: router.num_queued() > 0, "others wait")
        before, num_before = router.known(), router.num_tokens()
        first.send_signal(signal.SIGKILL)
        stack.enter_context(router.running())
        until(lambda: "math" in router.ask("GET", "/admin/jobs")["jobs"], "turns have come back")
        assert router.known() == before
        assert [each.result() for each in turns] == expected_turns
        assert [each.result() for each in chats] == [expected] * NUM_CHATS
        num_after = router.num_tokens()
    whole = (NUM_CHATS + NUM_TURNS) * NUM_TOKENS
    assert num_before + num_after <= whole + LIMIT, "the first router's tokens were not made again"
