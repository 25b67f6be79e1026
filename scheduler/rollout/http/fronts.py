"""The fronts beside the router: processes of `rose front`, and the requests that go through one.

Owns: starting, watching and ending them; handing a request to one, and its answer back.
Promises: a front ends with the router, however that ends, because it watches its standard input. One that
ends by itself, or hangs, is started again. A request goes to another front while its client has received nothing. Fronts
listen on Unix sockets in a folder of this user's alone.
Never does: place or charge turns; a front sends them back to the router's token endpoint.
"""

import argparse
import asyncio
import contextlib
import logging
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from rose.arguments import BAD_INPUT_STATUS
from rose.config import child_environment
from rose.errors import ConfigError, NoWorkerError
from rose.http import FRONT_HEADERS, KEEPALIVE_S
from rose.scheduler.rollout.formats.bodies import Json, encode
from rose.scheduler.rollout.http.errors import error_event
from rose.scheduler.rollout.router_config import FrontSpec
from rose.scheduler.rollout.turn.dispatch import DeadlineExceeded

logger = logging.getLogger(__name__)

_ASK_S = 0.5
_HEALTH_EVERY_S = 5.0
_MOST_MISSED = 3
_ANSWER_TIMEOUT = aiohttp.ClientTimeout(total=15.0)
"""A front that parses long answers for many chats is slow, and hangs only after three of these."""
_SHOWN_CHARACTERS = 300
_NAME_FLAG = "--served-model-name"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_STOP_S = 5.0
_LATER_S = 5.0
"""How long after a chat's deadline its front may still say that it has passed."""
_OTHERS_KEYS = ("VLLM_API_KEY", "ROSE_KEY", "ROSE_ROUTER_ADMIN_KEY", "ROSE_WORKER_API_KEY")
"""Variables that fronts must not have: with the first one a front would want that key from the router, and
none of them is for asking a router."""
_PIECE_BYTES = 2**20


class Front:
    """One process. Lives on the router's event loop."""

    def __init__(
        self,
        name: str,
        socket: Path,
        argv: list[str],
        environment: dict[str, str],
        known: frozenset[str] = frozenset(),
    ) -> None:
        """`known`: the models that it is told to serve."""
        self.name = name
        self._socket = socket
        self._argv = argv
        self._environment = environment
        self._process: Process | None = None
        self.http = aiohttp.ClientSession(
            "http://front",
            connector=aiohttp.UnixConnector(str(socket), limit=0, keepalive_timeout=KEEPALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=_PIECE_BYTES,
        )
        self.models: frozenset[str] | None = None
        """What it serves; None while it is not ready."""
        self.known = known
        """What it served last, or is told to serve; empty while nobody knows."""
        self.was_ready = False
        """Whether any of its processes was."""
        self.in_flight = 0

    async def run(self, has_any_served: Callable[[], bool]) -> None:
        """Keeps a process running.

        Raises: ConfigError if it refuses its flags while no front has served yet. Afterwards they are known
            to be right, and what is wrong may pass.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            status = await self._run_once()
            served, self.models = self.models is not None, None
            if status == BAD_INPUT_STATUS and not has_any_served():
                raise ConfigError(f"fronts: {self.name} ended with status {status}; the line above says why")
            pause_s = _FIRST_PAUSE_S if served else min(2 * pause_s, _LONGEST_PAUSE_S)
            logger.error("front ended name=%s status=%s starts_again_in_s=%g", self.name, status, pause_s)
            await asyncio.sleep(pause_s)

    async def _run_once(self) -> int | None:
        """Returns the exit status of a process; None if none could be started."""
        self._socket.unlink(missing_ok=True)
        try:
            # A session of its own: Ctrl-C would end its chats, for which a router that stops still waits.
            process = self._process = await asyncio.create_subprocess_exec(
                *self._arguments(), stdin=PIPE, env=self._environment, start_new_session=True
            )
        except OSError as error:
            logger.error("front not started name=%s error=%s", self.name, error)
            return None
        watch = asyncio.create_task(self._watch(process))
        try:
            return await process.wait()
        finally:
            watch.cancel()

    def _arguments(self) -> list[str]:
        """Returns the command; a front that was not told its model keeps it, whatever models come later."""
        is_told = any(flag.partition("=")[0] == _NAME_FLAG for flag in self._argv)
        return self._argv if is_told or not self.was_ready else [*self._argv, _NAME_FLAG, *sorted(self.known)]

    async def _watch(self, process: Process) -> None:
        """Waits until the process serves, and ends it if it stops answering."""
        while not await self._is_ready():
            await asyncio.sleep(_ASK_S)
        num_missed = 0
        while num_missed < _MOST_MISSED:
            await asyncio.sleep(_HEALTH_EVERY_S)
            num_missed = 0 if await self._is_healthy() else num_missed + 1
        self.models = None
        logger.error("front does not answer name=%s; ending it", self.name)
        process.kill()

    async def _is_ready(self) -> bool:
        try:
            async with self.http.get("/v1/models", timeout=_ANSWER_TIMEOUT) as response:
                if response.status != 200:
                    text = (await response.text())[:_SHOWN_CHARACTERS]
                    logger.warning("front not ready name=%s status=%d says=%s", self.name, response.status, text)
                    return False
                cards = (await response.json())["data"]
                self.models = self.known = frozenset(card["id"] for card in cards)
        except (aiohttp.ClientError, OSError):  # it does not listen yet
            return False
        except (ValueError, KeyError, TypeError):
            logger.exception("front answers nonsense name=%s", self.name)
            return False
        self.was_ready = True
        logger.info("front ready name=%s models=%s", self.name, sorted(self.models))
        return True

    async def _is_healthy(self) -> bool:
        try:
            async with self.http.get("/health", timeout=_ANSWER_TIMEOUT) as response:
                return response.status < 500
        except (aiohttp.ClientError, OSError):
            return False

    async def stop(self) -> None:
        """Ends the process: it does so by itself once its standard input is closed, else it is killed."""
        await self.http.close()
        process = self._process
        if process is None or process.returncode is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


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
        """Whether fronts take this model's requests: those that start again do, too. Until one has said what
        it serves, they take every model's."""
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
                return await _broken_off(answer, 504, message)
            except (aiohttp.ClientError, OSError) as error:
                logger.warning("front broke off name=%s error=%s", front.name, type(error).__name__)
                if answer.prepared:
                    return await _broken_off(answer, 502, f"{front.name} broke off: {type(error).__name__}")
            finally:
                front.in_flight -= 1
        raise NoWorkerError(f"none of {len(self._fronts)} fronts is ready; they start once a worker answers")


async def _broken_off(answer: web.StreamResponse, status: int, message: str) -> web.StreamResponse:
    await answer.write(error_event(status, message))
    return answer


def front_environment(key: str, secret: str) -> dict[str, str]:
    """Returns the environment of the router's own fronts. See Fronts()."""
    inherited = child_environment({"ROSE_ROUTER_API_KEY": key, "ROSE_FRONT_SECRET": secret})
    return {name: value for name, value in inherited.items() if name not in _OTHERS_KEYS}


def served_names(flags: Sequence[str]) -> frozenset[str]:
    """Returns the names that these flags give with --served-model-name."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument(_NAME_FLAG, nargs="+", default=[], dest="names")
    try:
        return frozenset(parser.parse_known_args(flags)[0].names)
    except argparse.ArgumentError:
        return frozenset()  # the front itself says what is wrong


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
