"""The fronts beside the router: processes of `rose front`, and the requests that go through one.

Owns: starting, watching and ending them; handing a request to one, and its answer back.
Promises: a front ends with the router, however that ends, because it watches its standard input. One that
ends by itself is started again. A request goes to another front while its client has received nothing. Fronts
listen on Unix sockets in a folder of this user's alone.
Never does: place or charge turns; a front sends them back to the router's token endpoint.
"""

import asyncio
import contextlib
import logging
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from rose.arguments import BAD_INPUT_STATUS
from rose.config import child_environment
from rose.errors import ConfigError, NoWorkerError
from rose.http import FRONT_HEADERS
from rose.scheduler.rollout.formats.bodies import Json, encode
from rose.scheduler.rollout.http.errors import error_event
from rose.scheduler.rollout.router_config import FrontSpec

logger = logging.getLogger(__name__)

_ASK_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_STOP_S = 5.0
_PIECE_BYTES = 2**20


class Front:
    """One process. Lives on the router's event loop."""

    def __init__(self, name: str, socket: Path, argv: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self._socket = socket
        self._argv = argv
        self._environment = environment
        self._process: Process | None = None
        self.http = aiohttp.ClientSession(
            "http://front",
            connector=aiohttp.UnixConnector(str(socket), limit=0),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=_PIECE_BYTES,
        )
        self.models: frozenset[str] | None = None
        """What it serves; None while it is not ready."""
        self.in_flight = 0

    async def run(self) -> None:
        """Keeps a process running. Raises: ConfigError if it refuses its flags."""
        pause_s = _FIRST_PAUSE_S
        while True:
            self._socket.unlink(missing_ok=True)
            process = self._process = await asyncio.create_subprocess_exec(
                *self._argv, stdin=PIPE, env=self._environment
            )
            ready = asyncio.create_task(self._wait_ready())
            try:
                status = await process.wait()
            finally:
                ready.cancel()
            was_ready, self.models = self.models is not None, None
            if status == BAD_INPUT_STATUS and not was_ready:
                raise ConfigError(f"fronts: {self.name} ended with status {status}; the line above says why")
            pause_s = _FIRST_PAUSE_S if was_ready else min(2 * pause_s, _LONGEST_PAUSE_S)
            logger.error("front ended name=%s status=%s starts_again_in_s=%g", self.name, status, pause_s)
            await asyncio.sleep(pause_s)

    async def _wait_ready(self) -> None:
        while True:
            try:
                async with self.http.get("/v1/models") as response:
                    cards = (await response.json())["data"]
                    self.models = frozenset(card["id"] for card in cards)
                    logger.info("front ready name=%s models=%s", self.name, sorted(self.models))
                    return
            except (aiohttp.ClientError, OSError):
                await asyncio.sleep(_ASK_S)

    async def stop(self) -> None:
        await self.http.close()
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


class Fronts:
    """All fronts of a router. Lives on its event loop."""

    def __init__(self, spec: FrontSpec, key: str) -> None:
        """`key`: what fronts ask the router with, for themselves; turns have their clients' keys."""
        self._spec = spec
        self._key = key
        self._fronts: list[Front] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def are_configured(self) -> bool:
        return self._spec.count > 0

    def start(self, router_url: str) -> asyncio.Task[None]:
        """Starts them. The task ends only with a ConfigError, or when it is cancelled."""
        self._folder = tempfile.TemporaryDirectory(prefix="rose-front-")
        environment = child_environment({"ROSE_ROUTER_API_KEY": self._key})
        for index in range(self._spec.count):
            socket = Path(self._folder.name) / str(index)
            own = ["--router", router_url, "--uds", str(socket), "--stop-with-stdin"]
            argv = [sys.executable, "-m", "rose.cli", "front", *own, *self._spec.flags]
            self._fronts.append(Front(f"front-{index}", socket, argv, environment))
        self._task = asyncio.create_task(self._run())
        return self._task

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for front in self._fronts:
                    group.create_task(front.run())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConfigError):
                await self._task
        await asyncio.gather(*(front.stop() for front in self._fronts))
        if self._folder is not None:
            self._folder.cleanup()

    def serve(self, model: str | None) -> bool:
        """Whether fronts take this model's requests: they do until the first one says what it serves."""
        known = [front.models for front in self._fronts if front.models is not None]
        if not self.are_configured:
            return False
        return model is None or not known or any(model in models for models in known)

    @property
    def num_ready(self) -> int:
        return sum(front.models is not None for front in self._fronts)

    async def forward(self, request: web.Request, body: Json) -> web.StreamResponse:
        """Returns a front's answer at the request's own path.

        Raises:
            NoWorkerError: no front is ready, or none answers.
        """
        data, headers = encode(body), _taken(request)
        for front in sorted((each for each in self._fronts if each.models is not None), key=_load):
            answer = web.StreamResponse()
            front.in_flight += 1
            try:
                return await _exchange(front, request, data, headers, answer)
            except (aiohttp.ClientError, OSError) as error:
                logger.warning("front broke off name=%s error=%s", front.name, type(error).__name__)
                if answer.prepared:
                    await answer.write(error_event(502, f"{front.name} broke off: {type(error).__name__}"))
                    return answer
            finally:
                front.in_flight -= 1
        raise NoWorkerError(f"none of {len(self._fronts)} fronts is ready; they start once a worker answers")


def _load(front: Front) -> int:
    return front.in_flight


def _taken(request: web.Request) -> dict[str, str]:
    found = {name: request.headers[name] for name in FRONT_HEADERS if name in request.headers}
    return {**found, "Content-Type": "application/json"}


async def _exchange(
    front: Front, request: web.Request, data: bytes, headers: dict[str, str], answer: web.StreamResponse
) -> web.StreamResponse:
    async with front.http.post(request.rel_url, data=data, headers=headers) as response:
        kind: dict[str, Any] = {"Content-Type": response.headers.get("Content-Type", "application/json")}
        if response.content_type != "text/event-stream":
            return web.Response(body=await response.read(), status=response.status, headers=kind)
        answer.headers.update({**kind, "Cache-Control": "no-cache"})
        piece = await response.content.readany()
        await answer.prepare(request)
        while piece:
            await answer.write(piece)
            piece = await response.content.readany()
        await answer.write_eof()
        return answer
