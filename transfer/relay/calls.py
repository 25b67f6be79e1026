"""Blocking HTTP/1.1 calls to one relay, from any thread, over connections that stay open.

Owns the connections: one for each call in progress. Any answer is returned, whatever its status; a relay that
can't be reached or falls silent raises RelayUnreachable. Never retries.

This is Python's own HTTP client because a call through httpx takes several times its processor time, and a
sync of small deltas consists of many calls.
"""

import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPConnection, HTTPException, HTTPSConnection

from rose.errors import RelayUnreachable
from rose.http import KEEPALIVE_S

# A host that is gone may not even refuse. A caller with a second copy of the relay loses this much time.
CONNECT_TIMEOUT_S = 0.8
# This limits silence, not a whole call: a slow link may take as long as it needs while bytes flow. When the
# kernel has taken a body's last byte, up to 4 MB of it are still in transit, for which 4 Mbit/s suffice.
SILENCE_S = 10.0
_PIECE_BYTES = 256 << 10
"""The limit on silence starts again for each piece of a body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayAnswer:
    """The relay's response to one call."""

    status: int
    headers: Message
    body: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


class RelayCalls:
    """The calls to one relay. key: the relay's bearer key, or None where it needs none.

    tls: for a relay that serves TLS.
    """

    def __init__(self, host: str, port: int, key: str | None, tls: ssl.SSLContext | None = None) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        self._idle: list[tuple[HTTPConnection, float]] = []
        self._lock = threading.Lock()

    def call(self, method: str, path: str, content: bytes | None = None) -> RelayAnswer:
        """Sends one request and returns the answer. Raises: RelayUnreachable."""
        connection: HTTPConnection | None = None
        try:
            connection = self._idle_connection() or self._connect()
            answer, stays_open = self._exchange(connection, method, path, content)
        except (OSError, HTTPException) as error:
            if connection is not None:
                connection.close()
            where = f"{'http' if self._tls is None else 'https'}://{self._host}:{self._port}"
            raise RelayUnreachable(f"relay {where}: {method} {path}: {error!r}") from error
        if stays_open:
            with self._lock:
                self._idle.append((connection, time.monotonic()))
        return answer

    def close(self) -> None:
        """Closes the connections that no call is using."""
        with self._lock:
            while self._idle:
                self._idle.pop()[0].close()

    def _exchange(
        self, connection: HTTPConnection, method: str, path: str, content: bytes | None
    ) -> tuple[RelayAnswer, bool]:
        """Returns the answer, and whether the connection can carry another call."""
        headers = dict(self._headers)
        if content is not None:
            headers["Content-Length"] = str(len(content))
        is_sent = True
        try:
            connection.request(method, path, _pieces(content) if content else content, headers)
        except (BrokenPipeError, ConnectionResetError, ssl.SSLEOFError):
            is_sent = False  # a full relay answers without reading the body, so its answer may be there
        with connection.getresponse() as response:
            answer = RelayAnswer(status=response.status, headers=response.headers, body=response.read())
        if not is_sent:
            connection.close()
        return answer, is_sent and not response.will_close

    def _idle_connection(self) -> HTTPConnection | None:
        """Returns the connection used last, unless the relay may be about to close it."""
        with self._lock:
            while self._idle:
                connection, since_s = self._idle.pop()
                if time.monotonic() - since_s < KEEPALIVE_S:
                    return connection
                connection.close()
        return None

    def _connect(self) -> HTTPConnection:
        if self._tls is None:
            connection = HTTPConnection(self._host, self._port, timeout=CONNECT_TIMEOUT_S)
        else:
            connection = HTTPSConnection(self._host, self._port, timeout=CONNECT_TIMEOUT_S, context=self._tls)
        connection.connect()
        connection.sock.settimeout(SILENCE_S)
        return connection


def _pieces(data: bytes) -> Iterator[memoryview]:
    view = memoryview(data)
    for at in range(0, len(view), _PIECE_BYTES):
        yield view[at : at + _PIECE_BYTES]
