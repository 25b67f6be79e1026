"""Two routers before the same stand-in engines, as processes.

Owns: their start, their SIGKILL and their end. Promises: everything started is ended, also on failure; a
router is ready when start() returns. Never: measures.
"""

import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import httpx

from rose.config import child_environment
from rose.errors import WorkerError
from rose.ports import free_port

_STUB = Path(__file__).with_name("stub_engine.py")
_START_S = 60.0
_POLL_S = 0.05


class FleetRig:
    """A context manager: engines and routers."""

    def __init__(
        self, num_engines: int, gpus_each: int, chunk_tokens: int, chunk_ms: float, kind: str = "dedicated"
    ) -> None:
        self._num_engines = num_engines
        self._worker = f"{kind},gpus={gpus_each}"
        self._stub_flags = [f"--chunk-tokens={chunk_tokens}", f"--chunk-ms={chunk_ms}"]
        self._engines: list[subprocess.Popen[bytes]] = []
        self._routers: dict[int, subprocess.Popen[bytes]] = {}
        self._state = TemporaryDirectory(prefix="rose-bench-")
        self.ports = [free_port(), free_port()]
        self.engine_urls: list[str] = []

    @property
    def urls(self) -> list[str]:
        """The routers' addresses."""
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def __enter__(self) -> Self:
        try:
            for _ in range(self._num_engines):
                argv = [sys.executable, str(_STUB), *self._stub_flags]
                process = subprocess.Popen(argv, stdout=subprocess.PIPE)
                self._engines.append(process)
                assert process.stdout is not None
                self.engine_urls.append(process.stdout.readline().decode().strip())
            for number in range(len(self.ports)):
                self.start(number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self._routers.values(), *self._engines):
            process.kill()
            process.wait()
        self._state.cleanup()

    def start(self, number: int) -> None:
        """Starts a router, and waits until it knows all engines."""
        port, peer = self.ports[number], self.urls[1 - number]
        argv = [sys.executable, "-m", "rose.scheduler.rollout.http.command", "--port", str(port)]
        for url in self.engine_urls:
            argv += ["--worker", f"{url},{self._worker}"]
        self._routers[number] = subprocess.Popen(
            [*argv, "--peer", peer],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=child_environment({"ROSE_STATE_DIR": self._state.name}),
        )
        until = time.monotonic() + _START_S
        while self._num_alive(number) < self._num_engines:
            if time.monotonic() > until:
                raise WorkerError(f"router {number} did not become ready in {_START_S:.0f} s")
            time.sleep(_POLL_S)

    def _num_alive(self, number: int) -> int:
        try:
            answer = httpx.get(f"{self.urls[number]}/health", trust_env=False, timeout=1.0)
            return int(answer.json()["alive"])
        except httpx.HTTPError:
            return 0

    def kill(self, number: int) -> None:
        """SIGKILL."""
        process = self._routers.pop(number)
        process.kill()
        process.wait()

    def turns(self) -> list[tuple[int, float, float]]:
        """Returns what the first engine has run: the first token of each turn's prompt, its begin and end."""
        found = httpx.get(f"{self.engine_urls[0]}/turns", trust_env=False).json()
        return [(marker, began, ended) for marker, began, ended in found]

    def peaks(self) -> list[dict[str, int]]:
        """Returns what each engine has counted: peak, turns, refused."""
        return [httpx.get(f"{url}/peak", trust_env=False).json() for url in self.engine_urls]
