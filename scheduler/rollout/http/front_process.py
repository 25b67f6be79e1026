"""One front beside the router: the process of `rose front`, from its start to its end.

Owns: starting, watching and ending it. Promises: a process that ends by itself, or hangs, is started again,
for the same model. It ends when its standard input ends, and ignores signals before that, so that the router
can drain. Never does: send it requests (fronts.py).
"""

import argparse
import asyncio
import logging
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp

from rose.arguments import BAD_INPUT_STATUS
from rose.errors import ConfigError
from rose.http import KEEPALIVE_S

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
                    logger.warning(
                        "front not ready name=%s status=%d says=%s", self.name, response.status, text
                    )
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


def served_names(flags: Sequence[str]) -> frozenset[str]:
    """Returns the names that these flags give with --served-model-name."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument(_NAME_FLAG, nargs="+", default=[], dest="names", help=argparse.SUPPRESS)
    try:
        return frozenset(parser.parse_known_args(flags)[0].names)
    except argparse.ArgumentError:
        return frozenset()  # the front itself says what is wrong
