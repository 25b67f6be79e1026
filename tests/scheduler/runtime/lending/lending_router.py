"""A router of a serving fleet, and the serving GPUs that it lends."""

import asyncio
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from served_cluster import wait_until

from rose.engine.http.leases import Leases
from rose.node.processes import ServerProcess
from rose.ports import free_port
from tests.scheduler.rollout.scripted_worker import ScriptedWorker

ADMIN_KEY = "the-admin"


class Router:
    """`rose router` at a fixed address, with a serving worker."""

    def __init__(self, folder: Path, worker_url: str, *, keeps_state: bool) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        settings = folder / "router.yaml"
        settings.write_text(f"state: {folder / 'router.json' if keeps_state else 'null'}\n")
        command = [sys.executable, "-m", "rose.scheduler.rollout.http.command", str(settings)]
        self._argv = [*command, "--port", str(port), "--worker", f"{worker_url},serving"]
        self._log = folder / "router.log"
        self.process = self._start()

    def _start(self) -> ServerProcess:
        return ServerProcess(self._argv, "router", self._log).start()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        wait_until(lambda: not self.process.is_alive(), "the router's death")

    def start_again(self) -> None:
        self.process.stop(0.0)
        self.process = self._start()

    def add(self, worker: ScriptedWorker) -> None:
        """Adds an engine that is no serving GPU."""
        self._admin("POST", "/workers", {"url": worker.url})

    def remove(self, worker: ScriptedWorker) -> None:
        self._admin("DELETE", f"/workers/{worker.url.removeprefix('http://')}")

    def _admin(self, method: str, path: str, body: object = None) -> None:
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        answer = httpx.request(method, f"{self.url}{path}", json=body, headers=headers)
        assert answer.is_success, answer.text

    def jobs(self) -> dict[str, dict[str, Any]]:
        """The jobs that the router knows; nothing while it starts."""
        headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
        try:
            found: dict[str, Any] = httpx.get(f"{self.url}/admin/jobs", headers=headers).json()["jobs"]
        except httpx.HTTPError:
            return {}
        return found

    def knows(self, job: str) -> bool:
        return self.jobs().get(job, {}).get("has_key") is True


@contextmanager
def lent_worker(**fields: Any) -> Iterator[ScriptedWorker]:
    """A serving GPU's worker that gets the weights of each run for which it is lent."""
    with served(ScriptedWorker(leases=Leases(), version="base/7", follows_loans=True, **fields)) as worker:
        yield worker


@contextmanager
def served(worker: ScriptedWorker) -> Iterator[ScriptedWorker]:
    """Serves the worker in a thread of its own."""
    is_up, is_over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with worker:
            is_up.set()
            while not is_over.is_set():
                if worker.leases is not None and worker.leases.run is not None:
                    worker.version = f"{worker.leases.run}/1"
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert is_up.wait(60)
        yield worker
    finally:
        is_over.set()
        thread.join()
