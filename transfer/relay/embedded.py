"""The embedded relay: objects in the memory of one process, served over HTTP.

Owns the server (aiohttp, one event loop) and its blocking client. An object becomes visible only when its
last byte has arrived. A full relay refuses with the numbers. If ROSE_KEY is set, every call needs that key as
a bearer token. If ROSE_READ_KEY is set too, a caller with it may read everything and write only
acknowledgements. The relay serves TLS if it was given a certificate (tls.py). A thread of the process folds
snapshots (folding.py). Never writes to disk and never evicts: what the trainer put stays until the trainer
removes it.
"""

import asyncio
import hmac
import json
import logging
import signal
import ssl
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from urllib.parse import quote, urlencode

from aiohttp import ClientError, ClientSession, ClientTimeout, web
from aiohttp.typedefs import Middleware

from rose.errors import ConfigError, RelayError, RelayFull, RelayUnreachable
from rose.transfer.format.manifest import is_ack_key
from rose.transfer.relay.calls import CONNECT_TIMEOUT_S, RelayAnswer, RelayCalls
from rose.transfer.relay.change_log import ChangeLog
from rose.transfer.relay.folding import SnapshotFolder
from rose.transfer.relay.object_store import ObjectStore, StoreClient
from rose.transfer.relay.protocol import Relay, RelayChanges
from rose.transfer.relay.tls import advice
from rose.transfer.relay.url import copy_address

logger = logging.getLogger(__name__)

DEFAULT_CAPACITY_BYTES = 8 << 30
_MAX_WAIT_S = 5.0  # a wait for a change is silent, and clients give up a relay that is silent for longer
# Relays are near each other. The writer hears nothing meanwhile, so a peer that hangs is given up sooner.
_HAND_ON_S = 2.0
_HAND_ON_BYTES_PER_S = 20e6
_FULL = web.HTTPInsufficientStorage.status_code
_MISSED_HEADER = "X-Rose-Missed"
_MOST_ACK_BYTES = 4096
_READS_ALONE = "rose_reads_alone"
"""Set on a request that came with the read key."""


def make_app(
    store: ObjectStore, key: str | None, read_key: str | None = None, tls: ssl.SSLContext | None = None
) -> web.Application:
    """Returns the relay's HTTP application. tls: for handing objects on to relays that serve TLS.

    Raises: ConfigError on a read key without another key.
    """
    if read_key is not None and (key is None or read_key == key):
        raise ConfigError("ROSE_READ_KEY: needs a ROSE_KEY too, which differs from it and allows writing")
    app = web.Application(client_max_size=1 << 40, middlewares=[_require_key(key, read_key)])
    _Routes(store, _Peers(key, tls)).add_to(app)
    return app


class _Routes:
    """The calls of the relay's clients, and the thread that folds snapshots."""

    def __init__(self, store: ObjectStore, peers: "_Peers") -> None:
        self._store = store
        self._peers = peers
        self._log = ChangeLog()

    def add_to(self, app: web.Application) -> None:
        app.cleanup_ctx.append(self._fold)
        app.on_shutdown.append(self._end_waits)
        app.on_cleanup.append(self._peers.close)
        app.router.add_put("/v1/objects/{key:.+}", self.write)
        app.router.add_get("/v1/objects/{key:.+}", self.read)
        app.router.add_get("/v1/objects", self.read_all)
        app.router.add_post("/v1/remove", self.remove_listed)
        app.router.add_get("/v1/keys", self.names)
        app.router.add_get("/v1/changes", self.changes)

    async def write(self, request: web.Request) -> web.Response:
        """Stores an object; it is visible when its last byte has arrived."""
        name, is_replacing = request.match_info["key"], request.query.get("replace") == "1"
        self._store.require_room(name, request.content_length or 0)
        data = await request.read()
        self._store.write(name, data, replace=is_replacing)
        self._log.note(name)
        addresses = [address for address in request.query.get("copy_to", "").split(",") if address]
        if request.get(_READS_ALONE, False):
            missed = addresses  # this relay's own key goes with what it hands on
        else:
            sends = (self._peers.send(each, name, data, is_replacing) for each in addresses)
            is_taken = await asyncio.gather(*sends)
            missed = [each for each, taken in zip(addresses, is_taken, strict=True) if not taken]
        return web.Response(status=204, headers={_MISSED_HEADER: ",".join(missed)})

    async def read(self, request: web.Request) -> web.Response:
        """Reads one object."""
        data = self._store.objects.get(request.match_info["key"])
        return web.Response(status=404) if data is None else web.Response(body=data)

    async def remove_listed(self, request: web.Request) -> web.Response:
        """Removes the objects whose keys the JSON list names."""
        for name in await request.json():
            self._store.remove(name)
        return web.Response(status=204)

    async def names(self, request: web.Request) -> web.Response:
        """Lists the keys that start with a prefix."""
        return web.json_response(self._store.names(request.query.get("prefix", "")))

    async def read_all(self, request: web.Request) -> web.Response:
        """Reads every object whose key starts with a prefix."""
        found = {
            name: self._store.objects[name] for name in self._store.names(request.query.get("prefix", ""))
        }
        return web.json_response({name: b64encode(data).decode() for name, data in found.items()})

    async def changes(self, request: web.Request) -> web.Response:
        """Answers when an object under a prefix was written since the last look, or the time is over."""
        prefixes, seen = request.query.getall("prefix", []), request.query.get("seen")
        if seen is None:
            return web.json_response([self._log.position, None])
        return web.json_response(await self._log.wait(prefixes, seen, _timeout_s(request)))

    async def _end_waits(self, app: web.Application) -> None:
        self._log.close()

    async def _fold(self, app: web.Application) -> AsyncIterator[None]:
        folder = SnapshotFolder(StoreClient(self._store, self._log, asyncio.get_running_loop()))
        folder.start()
        yield
        await asyncio.to_thread(folder.stop)  # its last calls need the event loop


def _timeout_s(request: web.Request) -> float:
    timeout_ms = request.query.get("timeout_ms", "")
    if not timeout_ms.isdecimal():
        raise web.HTTPBadRequest(text=f"timeout_ms must be a whole number >= 0, got {timeout_ms!r}")
    return min(int(timeout_ms) / 1000, _MAX_WAIT_S)


class _Peers:
    """Hands objects on to other relays, so that a writer far away sends each of them once."""

    def __init__(self, key: str | None, tls: ssl.SSLContext | None) -> None:
        self._headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        self._tls: ssl.SSLContext | bool = tls if tls is not None else True
        self._session: ClientSession | None = None

    async def send(self, address: str, name: str, data: bytes, is_replacing: bool) -> bool:
        """Returns whether the relay at host:port, or https://host:port, took the object; if it did not, the
        writer is told and sends it itself.
        """
        if self._session is None:
            self._session = ClientSession(headers=self._headers)
        timeout = ClientTimeout(
            total=_HAND_ON_S + len(data) / _HAND_ON_BYTES_PER_S, sock_connect=CONNECT_TIMEOUT_S
        )
        server = address if address.startswith("https://") else f"http://{address}"
        url = f"{server}/v1/objects/{quote(name)}" + ("?replace=1" if is_replacing else "")
        try:
            async with self._session.put(url, data=data, timeout=timeout, ssl=self._tls) as response:
                return response.ok
        except (ClientError, TimeoutError) as error:
            logger.warning("copy not sent: key=%s to=%s error=%r", name, address, error)
            return False

    async def close(self, app: web.Application) -> None:
        if self._session is not None:
            await self._session.close()


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _require_key(key: str | None, read_key: str | None) -> Middleware:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode()

        def has(wanted: str) -> bool:
            return hmac.compare_digest(given, f"Bearer {wanted}".encode())

        if key is not None and not has(key):
            if read_key is None or not has(read_key):
                raise web.HTTPUnauthorized(
                    text="wrong or missing key: set ROSE_KEY, or ROSE_READ_KEY for a follower, to the relay's"
                )
            if not _may_follow(request):
                raise web.HTTPForbidden(
                    text=f"ROSE_READ_KEY reads, and writes acknowledgements of up to {_MOST_ACK_BYTES} bytes "
                    f"alone: {request.method} {request.path} of {request.content_length} bytes needs the "
                    "relay's ROSE_KEY"
                )
            request[_READS_ALONE] = True
        return await handler(request)

    return check


def _may_follow(request: web.Request) -> bool:
    """Whether this is a call of a follower."""
    name = request.match_info.get("key", "")
    is_ack = request.method == "PUT" and is_ack_key(name) and request.query.get("replace") == "1"
    num_bytes = request.content_length
    return request.method == "GET" or (is_ack and num_bytes is not None and num_bytes <= _MOST_ACK_BYTES)


class EmbeddedRelay(Relay):
    """The client of an embedded relay; see rose.transfer.relay.protocol.Relay."""

    def __init__(
        self, host: str, port: int, key: str | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self.address = f"{host}:{port}"
        self._calls = RelayCalls(host, port, key, tls)
        try:
            self.keys("rose/HEAD_RUN")
        except RelayUnreachable as error:
            raise RelayUnreachable(f"{error}{advice(error.__cause__)}") from error
        except RelayError:
            self._calls.close()
            raise

    def put(self, key: str, data: bytes) -> None:
        self._call("PUT", self._path(key), data)

    def upsert(self, key: str, data: bytes) -> None:
        self._call("PUT", self._path(key) + "?replace=1", data)

    def put_with_copies(
        self, key: str, data: bytes, *, is_replacing: bool, copy_to: Sequence[str]
    ) -> Sequence[str]:
        """The relay hands the object on to the other embedded relays before it answers."""
        found = {url: copy_address(url) for url in copy_to}
        addresses = {url: address for url, address in found.items() if address is not None}
        query = f"?copy_to={','.join(addresses.values())}" + ("&replace=1" if is_replacing else "")
        answer = self._call("PUT", self._path(key) + query, data)
        missed = answer.headers.get(_MISSED_HEADER, "").split(",")
        return [url for url, address in addresses.items() if address not in missed]

    def get(self, key: str) -> bytes | None:
        answer = self._call("GET", self._path(key), may_lack=True)
        return None if answer.status == 404 else answer.body

    def remove(self, keys: Iterable[str]) -> None:
        names = list(keys)
        if names:
            self._call("POST", "/v1/remove", json.dumps(names).encode())

    def keys(self, prefix: str) -> list[str]:
        names = json.loads(self._call("GET", f"/v1/keys?prefix={quote(prefix)}").body)
        return [str(name) for name in names]

    def get_all(self, prefix: str) -> dict[str, bytes]:
        found = json.loads(self._call("GET", f"/v1/objects?prefix={quote(prefix)}").body)
        return {name: b64decode(data) for name, data in found.items()}

    def wait(self, prefixes: Sequence[str], seen: str | None, timeout_s: float) -> RelayChanges:
        query = [("prefix", prefix) for prefix in prefixes]
        if seen is not None:
            query += [("seen", seen), ("timeout_ms", str(max(0, round(1000 * timeout_s))))]
        position, keys = json.loads(self._call("GET", f"/v1/changes?{urlencode(query)}").body)
        return RelayChanges(seen=position, keys=keys)

    def close(self) -> None:
        self._calls.close()

    @staticmethod
    def _path(key: str) -> str:
        return f"/v1/objects/{quote(key)}"

    def _call(
        self, method: str, path: str, content: bytes | None = None, *, may_lack: bool = False
    ) -> RelayAnswer:
        answer = self._calls.call(method, path, content)
        if answer.is_success or (may_lack and answer.status == 404):
            return answer
        text = answer.body.decode(errors="replace")
        refused = f"embedded relay refused {method} {path}: {answer.status} {text}"
        raise RelayFull(refused) if answer.status == _FULL else RelayError(refused)


async def serve(host: str, port: int, app: web.Application, tls: ssl.SSLContext | None) -> None:
    """Serves until SIGTERM or SIGINT; prints {"url": ...} once it listens.

    tls: with the relay's certificate; None for plain HTTP. Raises: OSError when the port is taken.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
        bound = runner.addresses[0][1]
        kind = "embedded" if tls is None else "embedded+tls"
        print(json.dumps({"url": f"{kind}://{host}:{bound}"}), flush=True)
        await stopped.wait()
    finally:
        await runner.cleanup()
