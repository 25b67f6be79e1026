"""The router process behind `rose router`.

Owns: start, drain, stop; the command's flags.
Promises: SIGTERM and SIGINT let turns in flight finish for `drain_s`.
Never does: handle requests (service.py).
"""

import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp
import uvloop
from aiohttp import web

from rose.arguments import CommandParser, run_command
from rose.config import Settings, read_yaml
from rose.errors import ConfigError
from rose.http import KEEPALIVE_S
from rose.scheduler.rollout.http.service import Service
from rose.scheduler.rollout.router_config import RouterConfig, build_config, parse_worker
from rose.scheduler.rollout.turn.dataplane import POLICIES, DataPlane

logger = logging.getLogger(__name__)

_READ_BYTES = 2**20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h."""
_MAPPED_BYTES = 2**25
"""The largest that glibc takes."""
_KEPT_BYTES = 2**28


class RunningRouter:
    """A started router; use as an async context manager. `url` is where it listens."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self.url = ""

    async def __aenter__(self) -> "RunningRouter":
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        # No cookies, and room for the echo of a long prompt: both cost CPU per request otherwise.
        self._http = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), read_bufsize=_READ_BYTES
        )
        self.plane = DataPlane(self._config, self._http)
        self._service = Service(self._config, self.plane)
        self._runner = web.AppRunner(
            self._service.build_app(),
            handler_cancellation=True,
            access_log=None,
            read_bufsize=_READ_BYTES,  # a long prompt comes in one go, the connection isn't stopped for it
            shutdown_timeout=1.0,
            # From its opening or last answer on, so that a head that trickles in doesn't hold it for ever.
            keepalive_timeout=self._config.idle_s,
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._config.host, self._config.port)
        try:
            await site.start()
        except OSError as error:
            await self._close()
            where = f"{self._config.host}:{self._config.port}"
            raise ConfigError(
                f"--port: {where} can't be used ({os.strerror(error.errno or 0)}); try another"
            ) from error
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        for spec in self._config.workers:
            self.plane.registry.add(spec)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._close()

    async def drain(self) -> None:
        await self._service.drain()

    async def _close(self) -> None:
        await self._runner.cleanup()
        await self.plane.registry.close()
        self.plane.wire.close()
        await self._http.close()
        if self.plane.traces is not None:
            await asyncio.to_thread(self.plane.traces.close)


async def run_router(config: RouterConfig, ready: Callable[[str], None] | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain. `ready(url)` is called once it listens.

    Raises:
        ConfigError: the port can't be used.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with RunningRouter(config) as router:
        logger.info(
            "router ready url=%s workers=%d policy=%s", router.url, len(config.workers), config.policy
        )
        if ready is not None:
            ready(router.url)
        await stop.wait()
        await router.drain()


def main(argv: Sequence[str]) -> int:
    """Serves until a stop signal. Raises: ConfigError for bad input."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    config = _parse_arguments(argv)
    _keep_freed_memory()
    gc.collect()
    gc.freeze()  # what is there now stays: looking through it again and again shows in the slowest turns
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run_router(config, ready=lambda url: print(f"rose router ready {url}", flush=True)))
    return 0


def _keep_freed_memory() -> None:
    """Let the memory of a long body serve the next one.

    glibc gives it back to the system with each request: about 50 page faults for 190 KB, a fifth of the
    request's CPU. Without glibc nothing is changed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _parse_arguments(argv: Sequence[str]) -> RouterConfig:
    parsed = _parser().parse_args(argv)
    fields = read_yaml(parsed.file, RouterConfig) if parsed.file is not None else {}
    flags = {name: getattr(parsed, name) for name in ("host", "port", "policy")}
    fields |= {name: value for name, value in flags.items() if value is not None}
    if parsed.concurrency_profile is not None:
        fields["concurrency_profile"] = parsed.concurrency_profile
    if parsed.worker:
        fields["workers"] = [*fields.get("workers", ()), *(parse_worker(text) for text in parsed.worker)]
    source = str(parsed.file) if parsed.file is not None else "command line"
    return build_config(fields, source, Settings.from_environment())


def _parser() -> CommandParser:
    parser = CommandParser(
        "rose router",
        "One endpoint for RL rollouts over dedicated and serving GPUs.",
        "rose router --worker http://gpu1:8000 --worker http://gpu2:8001,serving --port 8100",
    )
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="ROUTER.yaml", help="settings, see RouterConfig; flags win"
    )
    parser.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="URL[,dedicated|serving][,gpus=N]",
        help="a rollout engine; may be repeated",
    )
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default 8100)")
    parser.add_argument(
        "--concurrency-profile", type=Path, metavar="FILE", help="cap of turns per GPU, by rose profile"
    )
    parser.add_argument("--policy", choices=tuple(POLICIES), help="placement of turns (default paper)")
    return parser


if __name__ == "__main__":
    sys.exit(run_command("router", main, sys.argv[1:]))
