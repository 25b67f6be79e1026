"""The fronts beside the router: processes of `rose front`, and the requests that go through one.

Owns: which fronts there are, and for which models; handing a request to one, and its answer back. Promises:
fronts end with the router, however it ends. A request can go to another front while its client has received
nothing, and ends soon after its deadline. Fronts listen on Unix sockets in a folder that only this user can
read. Never does: place or charge turns; a front sends them back to the router's token endpoint.
"""

import asyncio
import contextlib
import logging
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from rose.config import child_environment
from rose.errors import ConfigError, NoWorkerError
from rose.http import FRONT_HEADERS
from rose.scheduler.rollout.formats.bodies import Json, encode
from rose.scheduler.rollout.http.errors import error_event
from rose.scheduler.rollout.http.event_stream import hand_on
from rose.scheduler.rollout.http.front_process import Front, served_names
from rose.scheduler.rollout.router_config import FrontSpec
from rose.scheduler.rollout.turn.dispatch import DeadlineExceeded

logger = logging.getLogger(__name__)

_LATER_S = 5.0
"""How long after a chat's deadline its front may still say that it has passed."""
_OTHERS_KEYS = (
    "VLLM_API_KEY",
    "ROSE_KEY",
    "ROSE_ROUTER_ADMIN_KEY",
    "ROSE_ROUTER_MEMBER_KEY",
    "ROSE_WORKER_API_KEY",
)
"""Variables that fronts must not have: with the first one a front would want that key from the router, and
none of them is for asking a router."""


class Fronts:
    """All fronts of a router. Lives on its event loop."""

    def __init__(self, spec: FrontSpec, key: str, secret: str) -> None:
        """`key`: what fronts ask the router with, for themselves; turns have their clients' keys. `secret`:
        by which the router knows its own fronts' turns."""
        self._spec = spec
        self._environment = front_environment(key, secret)
        self._fronts: list[Front] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def are_configured(self) -> bool:
        return self._spec.count > 0

    def start(self, router_url: str) -> asyncio.Task[None]:
        """Starts them. The task ends only with a ConfigError, or when it is cancelled."""
        self._folder = tempfile.TemporaryDirectory(prefix="rose-front-")
        known = served_names(self._spec.flags)
        for index in range(self._spec.count):
            socket = Path(self._folder.name) / str(index)
            own = ["--router", router_url, "--uds", str(socket), "--stop-with-stdin"]
            argv = [sys.executable, "-m", "rose.cli", "front", *own, *self._spec.flags]
            self._fronts.append(Front(f"front-{index}", socket, argv, self._environment, known))
        self._task = asyncio.create_task(self._run())
        return self._task

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for front in self._fronts:
                    group.create_task(front.run(self._has_any_served))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    def _has_any_served(self) -> bool:
        return any(front.was_ready for front in self._fronts)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConfigError):
                await self._task
        await asyncio.gather(*(front.stop() for front in self._fronts))
        if self._folder is not None:
            self._folder.cleanup()

    def serve(self, model: str | None) -> bool:
        """Returns whether fronts take this model's requests: those that start again do, too. Until one has
        said what it serves, they take every model's."""
        if not self.are_configured:
            return False
        known = frozenset[str]().union(*(front.known for front in self._fronts))
        return model is None or not known or model in known

    @property
    def num_ready(self) -> int:
        return sum(front.models is not None for front in self._fronts)

    async def forward(self, request: web.Request, body: Json, deadline: float) -> web.StreamResponse:
        """Returns a front's answer at the request's own path; `deadline` is monotonic time in seconds.

        Raises:
            ClientLeft: while the answer was sent.
            NoWorkerError: no front is ready, or none answers.
            DeadlineExceeded: the front has not answered long after the deadline.
        """
        data, headers = encode(body), _taken(request)
        for front in sorted((each for each in self._fronts if each.models is not None), key=_load):
            answer = web.StreamResponse()
            front.in_flight += 1
            try:
                async with asyncio.timeout(max(0.0, deadline - time.monotonic()) + _LATER_S):
                    return await _exchange(front, request, data, headers, answer)
            except TimeoutError:
                message = f"{front.name} has not answered by the deadline"
                if not answer.prepared:
                    raise DeadlineExceeded(message) from None
                return await _broken_off(request, answer, 504, message)
            except (aiohttp.ClientError, OSError) as error:
                logger.warning("front broke off name=%s error=%s", front.name, type(error).__name__)
                if answer.prepared:
                    message = f"{front.name} broke off: {type(error).__name__}"
                    return await _broken_off(request, answer, 502, message)
            finally:
                front.in_flight -= 1
        raise NoWorkerError(f"none of {len(self._fronts)} fronts is ready; they start once a worker answers")


async def _broken_off(
    request: web.Request, answer: web.StreamResponse, status: int, message: str
) -> web.StreamResponse:
    await hand_on(request, answer, error_event(status, message))
    return answer


def front_environment(key: str, secret: str) -> dict[str, str]:
    """Returns the environment of the router's own fronts. See Fronts()."""
    inherited = child_environment({"ROSE_ROUTER_API_KEY": key, "ROSE_FRONT_SECRET": secret})
    return {name: value for name, value in inherited.items() if name not in _OTHERS_KEYS}


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
        while piece:
            await hand_on(request, answer, piece)
            piece = await response.content.readany()
        return answer
