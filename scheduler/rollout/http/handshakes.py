"""The TLS handshakes of the router's clients.

Owns: the listening sockets of a router that serves HTTPS, and the connections whose handshake is not
finished. Promises: an address has at most `most` unfinished handshakes, each ends within `limit_s`, and each
is counted once by its result. A connection for which there is no room is closed before it costs a handshake.
An error of one connection is logged and ends no other connection. Never does: speak HTTP (guard.py).
"""

import asyncio
import errno
import ipaddress
import logging
import os
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

UNREAD_S = 60.0
"""A client that takes nothing of its answer for this long is cut off: its turn holds a place on a worker."""
_BACKLOG = 1024
_PAUSE_S = 1.0
"""The wait after a connection that could not be accepted, as when no more files may be open."""
_NO_FAMILY = (errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT)
"""The errors of a kernel without IPv6. A name such as localhost may have such an address all the same."""
_IPV6_NETWORK = 64
"""The bits of an IPv6 address that count: a single host may have all addresses of such a network."""


class Handshakes:
    """Lives on the router's event loop."""

    def __init__(
        self,
        shows: ssl.SSLContext,
        connect: Callable[[], asyncio.BaseProtocol],
        has_room: Callable[[], bool],
        counts: Counter[str],
        most: int,
        limit_s: float,
    ) -> None:
        """`connect` makes the protocol of a connection whose handshake has finished."""
        self._shows = shows
        self._connect = connect
        self._has_room = has_room
        self._counts = counts
        self._most = most
        self._limit_s = limit_s
        self._unfinished: Counter[str] = Counter()
        """The number of unfinished handshakes by address."""
        self._num_unfinished = 0
        self._listeners: dict[socket.socket, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return self._num_unfinished

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Accepts connections at every address of the host. Returns the first address. Raises: OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, address in dict.fromkeys((each[0], each[4]) for each in found):
            try:
                listener = socket.create_server(address, family=family, backlog=_BACKLOG)
            except OSError as error:
                if error.errno in _NO_FAMILY:
                    continue
                raise
            listener.setblocking(False)
            end_unread(listener.fileno())
            self._listeners[listener] = loop.create_task(self._accept(listener))
        if not self._listeners:
            raise OSError(errno.EAFNOSUPPORT, f"none of the addresses of {host} belongs to this machine")
        own_host, own_port = next(iter(self._listeners)).getsockname()[:2]
        return str(own_host), int(own_port)

    async def close(self) -> None:
        """Takes no more connections, and ends the unfinished handshakes."""
        tasks = [*self._listeners.values(), *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, address = await loop.sock_accept(listener)
            except OSError as error:
                logger.warning("no connection is accepted for %g s: %s", _PAUSE_S, error.strerror or error)
                await asyncio.sleep(_PAUSE_S)
                continue
            try:
                self._take(client, address)
            except Exception:  # of one connection: all others are still to be accepted
                logger.exception("connection closed address=%s", address)
                client.close()

    def _take(self, client: socket.socket, address: tuple[Any, ...]) -> None:
        """Begins the handshake of a connection, or closes it if there is no room."""
        origin = _origin(address)
        if self._unfinished.get(origin, 0) >= self._most or not self._has_room():
            self._counts["refused"] += 1
            client.close()
            return
        task = asyncio.get_running_loop().create_task(self._shake_hands(client, origin))
        self._unfinished[origin] += 1
        self._num_unfinished += 1
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _shake_hands(self, client: socket.socket, origin: str) -> None:
        finished, result = _Finished(lambda: self._finish(origin)), "failed"
        try:
            async with asyncio.timeout(self._limit_s):
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: finished, client, ssl=self._shows, ssl_shutdown_timeout=self._limit_s
                )
        except TimeoutError:
            result = "late"
        except OSError as error:
            logger.debug("no TLS origin=%s error=%s", origin, error)
        finally:
            if not finished.is_done:
                self._counts[result] += 1
                self._end(origin)

    def _finish(self, origin: str) -> asyncio.BaseProtocol:
        self._counts["finished"] += 1
        self._end(origin)
        return self._connect()

    def _end(self, origin: str) -> None:
        self._num_unfinished -= 1
        self._unfinished[origin] -= 1
        if not self._unfinished[origin]:
            del self._unfinished[origin]


class _Finished(asyncio.Protocol):
    """Hands over to the connection's own protocol once the handshake has succeeded."""

    def __init__(self, connect: Callable[[], asyncio.BaseProtocol]) -> None:
        self._connect = connect
        self.is_done = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.is_done = True
        protocol = self._connect()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)


def _origin(address: tuple[Any, ...]) -> str:
    """Returns what counts as one address."""
    found = ipaddress.ip_address(address[0].partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is None:
        return str(ipaddress.ip_network((found, _IPV6_NETWORK), strict=False))
    return str(found)


def end_unread(listener: int) -> None:
    """Has the kernel end each connection that is accepted at a listener once its client has taken nothing of
    what waits for it for `UNREAD_S`. The handler then ends, and a turn leaves its worker."""
    with socket.socket(fileno=os.dup(listener)) as same:  # uvloop's own sockets take no options
        same.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * UNREAD_S))
