"""A router that is killed and started again forgets nothing, and chats through a front of its own go on."""

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

from rose.node.checks import free_port
from rose.node.processes import ServerProcess

pytestmark = pytest.mark.vllm
KEYS = {"ROSE_ROUTER_ADMIN_KEY": "adm"}
ADMIN = {"Authorization": "Bearer adm"}
JOB_KEY = "a-long-secret"
JOB = {"Authorization": f"Bearer {JOB_KEY}"}
LIMIT, NUM_CHATS = 2, 5
PATIENT = "{stall_s: 300, first_token_s: 300, lost_after_s: 300, stream_interval: 1}"
LONG: Json = {
    "messages": [{"role": "user", "content": "[count]"}],
    **{"temperature": 0.0, "ignore_eos": True, "max_tokens": 700, "logprobs": True},
}


class Router:
    """`rose router --state`, which starts without a worker and is started again at the same address."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        (folder / "router.yaml").write_text(PATIENT)

    @contextlib.contextmanager
    def running(self) -> Iterator[ServerProcess]:
        own = [str(self._folder / "router.yaml"), "--port", str(self._port)]
        argv = [sys.executable, "-m", "rose.cli", "router", *own, "--state", str(self._folder / "state.json")]
        log = self._folder / "router.log"
        with ServerProcess(argv, "router", log, {**ENVIRONMENT, **KEYS}) as process:
            process.wait_until(self._listens, "the router listens", READY_S)
            yield process

    def _listens(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health").status_code in (200, 503)
        return False

    def ask(self, method: str, path: str, body: Json | None = None) -> Any:
        return httpx.request(method, self.url + path, json=body, headers=ADMIN).raise_for_status().json()

    def job(self) -> Json:
        found: Json = self.ask("GET", "/admin/status")["jobs"].get("math", {})
        return found

    def is_busy(self) -> bool:
        """Whether as many chats of the job run as its limit allows, and the others wait."""
        job = self.job()
        return (job["in_flight"], job["queued"]) == (LIMIT, NUM_CHATS - LIMIT) and self.num_tokens() > 0

    def num_tokens(self) -> int:
        return sum(worker["tokens"] for worker in self.ask("GET", "/workers"))


def known(router: Router) -> Json:
    """What an admin has set."""
    jobs = router.ask("GET", "/admin/jobs")["jobs"]
    settings = ("weight", "max_in_flight", "max_queued", "run_id", "model", "paused", "has_key")
    return {
        "workers": [worker["id"] for worker in router.ask("GET", "/workers")],
        "jobs": {name: {key: jobs[name][key] for key in settings} for name in ("math", "code")},
        "version": router.ask("GET", "/admin/version"),
    }


def test_a_killed_router_starts_again_with_all_it_knew_and_its_chats_go_on(
    front: Setup, tmp_path: Path
) -> None:
    expected = streamed(front.engine_url, LONG)
    router = Router(tmp_path)
    setup = Setup(front.model, front.engine_url, router.url, front.proxy)
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(NUM_CHATS) as clients:
        first = stack.enter_context(router.running())
        router.ask("POST", "/workers", {"url": front.engine_url})
        router.ask("PUT", "/admin/jobs/math", {"key": JOB_KEY, "max_in_flight": LIMIT, "weight": 3})
        router.ask("PUT", "/admin/jobs/code", {"key": "another-secret"})
        router.ask("POST", "/admin/pause", {"job": "code"})
        router.ask("PUT", "/admin/version", {"mode": "max-lag", "max_lag": 2})
        url = stack.enter_context(front_alone(tmp_path, setup, ROSE_ROUTER_API_KEY=JOB_KEY))
        before = known(router)
        chats = [clients.submit(streamed, url, LONG, **JOB) for _ in range(NUM_CHATS)]
        until(router.is_busy, "chats run and others wait")
        first.send_signal(signal.SIGKILL)
        stack.enter_context(router.running())
        assert known(router) == before
        until(router.is_busy, "as many run and wait as before")
        assert [chat.result() for chat in chats] == [expected] * NUM_CHATS
        assert router.num_tokens() < NUM_CHATS * LONG["max_tokens"], "the first router's tokens were kept"
