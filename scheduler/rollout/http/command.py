"""The router process behind `rose router`.

Owns: the process's start, drain and stop, and the command's flags.
Promises: SIGTERM and SIGINT leave turns in flight `drain_s` to finish.
Never does: handle requests (service.py).
"""

import asyncio
import ctypes
import gc
import logging
import math
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

from rose.arguments import CommandParser, add_insecure_flag, port_number, positive_int, run_command
from rose.config import Settings, make_private_dir, read_yaml
from rose.errors import ConfigError, FolderError
from rose.http import KEEPALIVE_S
from rose.ports import url_host
from rose.scheduler.rollout.http.guard import ClientConnection, RefusedConnection
from rose.scheduler.rollout.http.handshakes import Handshakes, end_unread
from rose.scheduler.rollout.http.service import Service
from rose.scheduler.rollout.router_config import RouterConfig, build_config, parse_worker
from rose.scheduler.rollout.turn.dataplane import POLICIES, DataPlane
from rose.tls import client_context, server_context

logger = logging.getLogger(__name__)

_READ_BYTES = 2**20
_NO_LOG: dict[str, Any] = {"access_log": None}
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h."""
_MAPPED_BYTES = 2**25
"""The largest value that glibc accepts."""
_KEPT_BYTES = 2**28
_SPARE_FILES = 256
"""Open files that are kept for all but clients and turns."""
_FOR_ADMINS = 32
"""The connections beyond `max_connections` on which admins and peers alone are served."""
_ADMINS_IDLE_S = 2.0
"""Such a connection is closed after this time without a whole request head: clients that wait hold none."""
_HANDSHAKE_S = 10.0
"""The most time for a client's TLS handshake, and for its end."""
_LEAST_HANDSHAKES = 64
_HANDSHAKES_PART = 8
"""One address may have this part of `max_connections`, or a few, in their handshakes, unless the settings
say otherwise."""


class RunningRouter:
    """A started router, as an async context manager. It listens at `url`."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._listeners: list[asyncio.Server] = []
        self._connections = set[ClientConnection]()
        self._handshakes: Handshakes | None = None
        """None: the router serves plain HTTP."""
        self.url = ""
        self.fronts: asyncio.Task[None] | None = None
        """Ends with a ConfigError if the fronts refuse their flags."""

    async def __aenter__(self) -> "RunningRouter":
        config = self._config
        trusts, shows = client_context(config.tls_ca), None
        if config.tls_certificate is not None and config.tls_key is not None:
            shows = server_context(config.tls_certificate, config.tls_key)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=trusts)
        # Cookies, and a buffer too small for the echo of a long prompt, would cost CPU with each request.
        self._http = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), read_bufsize=_READ_BYTES
        )
        self.plane = DataPlane(config, self._http, trusts)
        try:
            self._service = Service(config, self.plane)
        except ConfigError:
            await self._http.close()
            raise
        app = self._service.build_app()
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            if shows is not None:
                self._handshakes = self._make_handshakes(shows)
                host, port = await self._handshakes.listen(config.host, config.port)
            else:
                host, port = await self._listen(self._accepted, config.host, config.port)
        except OSError as error:
            await self._close()
            reason = error.strerror or str(error)
            raise ConfigError(
                f"--host, --port: can't listen on {config.host}:{config.port} ({reason}); try another"
            ) from error
        self.url = f"{'http' if shows is None else 'https'}://{url_host(host)}:{port}"
        for spec in config.workers:
            self.plane.registry.add(spec)
        try:
            await self._service.changes.restore()
        except ConfigError:
            await self._close()
            raise
        self._service.peers.start()
        if self._service.fronts.are_configured:
            # Their turns belong to chats whose connections count, and a certificate need not name loopback.
            _, port = await self._listen(lambda: self._connection(set()), "127.0.0.1", 0)
            self.fronts = self._service.fronts.start(f"http://127.0.0.1:{port}")
        return self

    async def _listen(
        self, accepted: Callable[[], asyncio.BaseProtocol], host: str, port: int
    ) -> tuple[str, int]:
        """Returns the address that it got. Raises: OSError."""
        listener = await asyncio.get_running_loop().create_server(accepted, host, port)
        self._listeners.append(listener)
        for each in listener.sockets:
            end_unread(each.fileno())
        own_host, own_port = listener.sockets[0].getsockname()[:2]
        return str(own_host), int(own_port)

    def _make_handshakes(self, shows: ssl.SSLContext) -> Handshakes:
        config, counts = self._config, self.plane.records.counters.handshakes
        most = config.max_handshakes
        if most is None:
            most = max(_LEAST_HANDSHAKES, config.max_connections // _HANDSHAKES_PART)
        limit_s = min(config.idle_s, _HANDSHAKE_S)
        return Handshakes(shows, self._accepted, lambda: self._num_over < _FOR_ADMINS, counts, most, limit_s)

    @property
    def _num_over(self) -> int:
        """The number of connections above the limit; below it, a negative number."""
        num_unfinished = len(self._handshakes) if self._handshakes is not None else 0
        return len(self._connections) + num_unfinished - self._config.max_connections

    def _accepted(self) -> ClientConnection | RefusedConnection:
        if self._num_over >= _FOR_ADMINS:
            return RefusedConnection(self._config.max_connections)
        return self._connection(self._connections, is_for_admins=self._num_over >= 0)

    def _connection(self, is_open: set[ClientConnection], *, is_for_admins: bool = False) -> ClientConnection:
        assert self._runner.server is not None
        return ClientConnection(
            is_open,
            self._runner.server,
            loop=asyncio.get_running_loop(),
            **_NO_LOG,
            read_bufsize=_READ_BYTES,  # a long prompt arrives at once, without stopping the connection
            # Counts from the opening or the last answer, so that a slow request head can't hold a connection.
            keepalive_timeout=min(self._config.idle_s, _ADMINS_IDLE_S if is_for_admins else math.inf),
            is_for_admins=is_for_admins,
        )

    async def __aexit__(self, *exc_info: object) -> None:
        await self._close()

    async def drain(self) -> None:
        await self._service.drain()

    async def _close(self) -> None:
        for listener in self._listeners:
            listener.close()
        if self._handshakes is not None:
            await self._handshakes.close()
        await self._service.fronts.close()
        await self._service.peers.close()
        await self._runner.cleanup()
        await self._service.changes.entries.close()
        await self.plane.registry.close()
        self.plane.wire.close()
        await self._http.close()
        if (traces := self.plane.records.traces) is not None:
            await asyncio.to_thread(traces.close)


async def run_router(config: RouterConfig, ready: Callable[[str], None] | None = None) -> None:
    """Serves until SIGTERM or SIGINT, then drains. `ready(url)` is called once the router listens.

    Raises:
        ConfigError: the address can't be used, or the fronts refuse their flags.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with RunningRouter(config) as router:
        logger.info(
            "router ready url=%s workers=%d policy=%s state=%s",
            *(router.url, len(router.plane.registry.workers()), config.policy, config.state),
        )
        if ready is not None:
            ready(router.url)
        stopping = asyncio.create_task(stop.wait())
        ends = {stopping, router.fronts} if router.fronts is not None else {stopping}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await router.drain()
        if router.fronts is not None and router.fronts.done():
            router.fronts.result()


def main(argv: Sequence[str]) -> int:
    """Serves until a stop signal. Raises: ConfigError for bad input."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    config = _parse_arguments(argv)
    config = config.model_copy(update={"max_connections": _most_connections(config)})
    _keep_freed_memory()
    gc.collect()
    gc.freeze()  # what exists now stays; scanning it again and again would show in the slowest turns
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run_router(config, ready=lambda url: print(f"rose router ready {url}", flush=True)))
    return 0


def _most_connections(config: RouterConfig) -> int:
    """Returns how many clients this process can have, after it has raised its limit of open files as far as
    it may: a turn takes a second file, to its worker, and a chat two more, to its front and back; heartbeats
    take one for each worker."""
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    wanted, num_files = config.max_connections, 4 if config.fronts.count else 2
    bound = max(1, (limit - _SPARE_FILES - len(config.workers)) // num_files)
    most = wanted if limit == resource.RLIM_INFINITY else min(wanted, bound)
    if most < wanted:
        logger.info("max_connections is %d instead of %d: %d files may be open", most, wanted, limit)
    return most


def _keep_freed_memory() -> None:
    """Keeps the memory of a long body for the next one.

    glibc would return it to the system with each request: about 50 page faults for 190 KB, a fifth of the
    request's CPU. Without glibc this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _parse_arguments(argv: Sequence[str]) -> RouterConfig:
    own, dashes, front_flags = _split(argv)
    parsed = _parser().parse_args(own)
    fields = read_yaml(parsed.file, RouterConfig) if parsed.file is not None else {}
    flags = {name: getattr(parsed, name) for name in _SETTINGS}
    fields |= {name: value for name, value in flags.items() if value is not None}
    if parsed.peer:
        fields["peers"] = [*fields.get("peers", ()), *parsed.peer]
    if parsed.worker:
        fields["workers"] = [*fields.get("workers", ()), *(parse_worker(text) for text in parsed.worker)]
    given = {"count": parsed.front} if parsed.front is not None else {}
    given |= {"flags": front_flags} if dashes else {}
    if given:
        fields["fronts"] = {**fields.get("fronts", {}), **given}
    source = str(parsed.file) if parsed.file is not None else "command line"
    settings = Settings.from_environment()
    config = build_config(fields, source, settings)
    config.check_exposure("--host", config.host, is_insecure=parsed.insecure)
    if "state" not in fields and config.port != 0:
        config = config.model_copy(update={"state": _own_state(config, settings)})
    return config


def _own_state(config: RouterConfig, settings: Settings) -> Path | None:
    """Returns the default file for what an admin sets. Its name has the host, as hosts may share the folder.
    None if the folder can't be made, as for a user without a home.

    Raises: ConfigError if the folder is not this user's.
    """
    fix = "set ROSE_STATE_DIR to another one, or give --state"
    try:
        folder = make_private_dir(settings.state_dir, fix)
    except FolderError as error:
        logger.warning("what an admin sets is not kept: %s", error)
        return None
    return folder / f"router-{socket.gethostname()}-{config.host}-{config.port}.json"


_SETTINGS = ("host", "port", "policy", "concurrency_profile", "state", "tls_certificate", "tls_key")
"""Those that flags set, too."""


def _split(argv: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """Returns the router's own arguments, whether `--` follows, and the fronts' flags behind it."""
    at = list(argv).index("--") if "--" in argv else len(argv)
    return list(argv[:at]), at < len(argv), list(argv[at + 1 :])


def _parser() -> CommandParser:
    parser = CommandParser(
        "rose router",
        "Places RL rollouts on dedicated and serving GPUs, behind one endpoint.",
        "rose router --worker http://gpu1:8000 --worker http://gpu2:8001,serving --port 8100",
    )
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="ROUTER.yaml",
        help="settings (see examples/router.yaml); flags win over them",
    )
    parser.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="URL[,dedicated|serving][,gpus=N]",
        help="address of a rollout engine; may be repeated (default: dedicated, with 1 GPU)",
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="URL",
        help="address of another router before the same workers; may be repeated",
    )
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FILE",
        help="file that keeps what an admin sets, and is read at the start (default: a file in "
        "$ROSE_STATE_DIR, named after this machine, host and port)",
    )
    parser.add_argument("--host", help="address to listen on (default 127.0.0.1)")
    add_insecure_flag(parser)
    parser.add_argument("--port", type=port_number, help="port to listen on (default 8100)")
    parser.add_argument(
        "--tls-certificate", type=Path, metavar="FILE", help="serve HTTPS with this certificate, in PEM"
    )
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="the certificate's key, in PEM")
    parser.add_argument(
        "--concurrency-profile",
        type=Path,
        metavar="FILE",
        help="turns per GPU, as rose profile --concurrency has measured them",
    )
    parser.add_argument(
        "--front",
        type=positive_int,
        metavar="N",
        help="start N processes of rose front; their flags come last, after --: -- --model DIR "
        "--tool-call-parser NAME",
    )
    parser.add_argument("--policy", choices=tuple(POLICIES), help="policy that places turns (default cost)")
    return parser


if __name__ == "__main__":
    sys.exit(run_command("router", main, sys.argv[1:]))
