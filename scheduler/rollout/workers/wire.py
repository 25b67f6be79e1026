"""HTTP/1.1 to the workers, for turns and heartbeats: one request, one answer, which may be a stream.

Owns: kept-alive connections to each worker. Promises: the pieces of an answer are handed on as they arrive. A
connection that was not read to its end is closed, so that vLLM drops the request. No turn is sent on a
connection that was idle for so long that the worker may be closing it; a heartbeat that meets such a
connection is sent again. Never does: redirects, cookies, compression, to send a turn twice. aiohttp's client
does the first three, at more CPU per request and per chunk; everything else goes through it.
"""

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httptools
from yarl import URL

from rose.http import KEEPALIVE_S

_GET = b"GET %b HTTP/1.1\r\nHost: %b\r\n%b\r\n"
_HEAD = b"POST %b HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\n%bContent-Length: %d\r\n\r\n"
_CONNECT_S = 5.0
_MAX_BUFFERED_BYTES = 2**20
"""Once more than this is unread, the worker has to wait."""
_JOIN_BYTES = 2**14
"""Copying a body of up to this size costs less than writing a second buffer."""


class NotConnected(ConnectionError):
    """The worker's address takes no connection."""


class WorkerConnection(asyncio.Protocol):
    """A connection to a worker, and the answer being read from it."""

    def __init__(self) -> None:
        self.status = 0
        self.is_complete = False
        self.idle_since = 0.0
        self._transport: Any = None
        self._parser: Any = None
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._is_held_back = False
        self._has_head = False
        self._keeps_alive = False
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    # Called by a request ----------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether another request may use the connection, as far as is known."""
        return self._failure is None and not self._transport.is_closing()

    @property
    def is_fresh(self) -> bool:
        """Whether its server surely keeps it open."""
        return self.is_open and time.monotonic() - self.idle_since < KEEPALIVE_S

    async def begin(self, head: bytes, body: Sequence[bytes], num_bytes: int) -> None:
        """Sends a request and waits for the status of its answer. Raises: ConnectionError."""
        self._parser = httptools.HttpResponseParser(self)
        self.is_complete = self._has_head = False
        self._pieces, self._num_bytes = [], 0
        if num_bytes <= _JOIN_BYTES:
            self._transport.write(b"".join((head, *body)))
        else:
            self._transport.writelines((head, *body))
        while not self._has_head:
            await self._wait()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields the body as it arrives. Raises: ConnectionError if it breaks off."""
        while True:
            if self._pieces:
                pieces, self._pieces, self._num_bytes = self._pieces, [], 0
                if self._is_held_back:
                    self._is_held_back = False
                    self._transport.resume_reading()
                for piece in pieces:
                    yield piece
            elif self.is_complete:
                return
            else:
                await self._wait()

    async def text(self) -> str:
        """Returns the whole body. Raises: ConnectionError."""
        return b"".join([piece async for piece in self.pieces()]).decode(errors="replace")

    @property
    def can_be_kept(self) -> bool:
        return self.is_complete and self._keeps_alive and self._failure is None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Called by the event loop -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            if self._parser is None or self.is_complete:
                raise ConnectionError("the worker sent data that was not asked for")
            self._parser.feed_data(data)
        except (httptools.HttpParserError, ConnectionError) as error:
            self._fail(ConnectionError(f"not HTTP: {error}"))
            self.close()
        self._wake()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        # vLLM always sends a length or chunks, so the end of the connection never marks the end of an answer.
        self._fail(ConnectionError(f"connection lost: {exc}" if exc is not None else "connection closed"))
        self._wake()

    def _fail(self, failure: Exception) -> None:
        if self._failure is None:
            self._failure = failure

    # Called by the parser -----------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_head = self.status >= 200  # a 1xx is not the answer yet

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._num_bytes += len(body)
        if self._num_bytes > _MAX_BUFFERED_BYTES and not self._is_held_back:
            self._is_held_back = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        self.is_complete = self.status >= 200
        self._keeps_alive = bool(self._parser.should_keep_alive())  # the parser forgets it afterwards


class Wire:
    """The connections to all workers. Lives on the router's event loop."""

    def __init__(self, trusts: ssl.SSLContext) -> None:
        """trusts: the certificates that workers at https addresses must show one of."""
        self._trusts = trusts
        self._idle: dict[tuple[str | None, int | None], list[WorkerConnection]] = {}

    async def post(self, url: URL, headers: bytes, body: Sequence[bytes]) -> WorkerConnection:
        """Sends JSON in pieces and returns once the answer's status is known.

        `headers`: whole lines, each with its line end. The caller has to call done(), also after a failure.

        Raises:
            OSError: there is no connection, or it broke off.
        """
        connection = self._kept(url, lambda kept: kept.is_fresh)
        connection = connection if connection is not None else await self._connect(url)
        num_bytes = sum(map(len, body))
        head = _HEAD % (url.raw_path.encode(), url.authority.encode(), headers, num_bytes)
        try:
            await connection.begin(head, body, num_bytes)
        except BaseException:
            connection.close()
            raise
        return connection

    async def get(self, url: URL, target: str, headers: bytes) -> tuple[int, bytes]:
        """Asks for `target`, a path with its query, and returns the status and the whole body of the answer.

        Raises:
            OSError: there is no connection (NotConnected), or it broke off.
        """
        head = _GET % (target.encode(), url.authority.encode(), headers)
        while (kept := self._kept(url, lambda kept: kept.is_open)) is not None:
            try:
                return await self._asked(url, kept, head)
            except ConnectionError:
                continue  # the worker has closed it in the meantime
        return await self._asked(url, await self._connect(url), head)

    async def _asked(self, url: URL, connection: WorkerConnection, head: bytes) -> tuple[int, bytes]:
        try:
            await connection.begin(head, (), 0)
            return connection.status, b"".join([piece async for piece in connection.pieces()])
        finally:
            self.done(url, connection)

    def _kept(self, url: URL, is_usable: Callable[[WorkerConnection], bool]) -> WorkerConnection | None:
        """Takes out an idle connection; those that are not usable are closed."""
        idle = self._idle.get((url.host, url.port), [])
        while idle:
            if is_usable(connection := idle.pop()):
                return connection
            connection.close()
        return None

    async def _connect(self, url: URL) -> WorkerConnection:
        host, port = url.host, url.port
        assert host is not None and port is not None, f"WorkerSpec lets no {url} pass"
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, made = await asyncio.get_running_loop().create_connection(
                    WorkerConnection, host, port, ssl=self._trusts if url.scheme == "https" else None
                )
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {_CONNECT_S:g} s") from error
        except OSError as error:
            raise NotConnected(str(error)) from error
        return made

    def done(self, url: URL, connection: WorkerConnection) -> None:
        """Ends a request, and keeps the connection if the answer was read to its end and the address was not
        forgotten meanwhile."""
        idle = self._idle.get((url.host, url.port))
        if idle is not None and connection.can_be_kept:
            connection.idle_since = time.monotonic()
            idle.append(connection)
        else:
            connection.close()

    def keep(self, url: URL) -> None:
        """Keeps connections to an address for later requests, until it is forgotten."""
        self._idle.setdefault((url.host, url.port), [])

    def forget(self, url: URL) -> None:
        """Closes the connections to an address: the idle ones now, the others after their requests."""
        for connection in self._idle.pop((url.host, url.port), ()):
            connection.close()

    def close(self) -> None:
        for idle in self._idle.values():
            for connection in idle:
                connection.close()
        self._idle.clear()
