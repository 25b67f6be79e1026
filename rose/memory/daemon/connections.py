"""The clients of a pool's daemon: their sockets, and the processes behind them.

A line that is handed on comes from a process of this user that is being watched, and a client that is turned
away is told why. Only the pool's owner knows what a line means and what a client holds
(rose/memory/daemon/owner.py).
"""

import logging
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rose.errors import PoolError
from rose.memory.daemon.event_loop import EventLoop
from rose.memory.daemon.roster import AttachRefused
from rose.memory.pool.passing import Inbox, send_line
from rose.memory.pool.processes import watch_process
from rose.memory.pool.wire import Refusal, Welcome

logger = logging.getLogger(__name__)

MAX_CLIENTS = 64
"""Enough for two engines of 16 ranks (MAX_SHARDS), or twelve of four, and a few observers."""
_SEND_TIMEOUT_S = 1.0
"""A reply of 200 bytes fits into any socket buffer, so a client that can't take it is broken."""


@dataclass(slots=True)
class Connection:
    """A client's socket and process. ``socket`` is None once it is closed; ``slot`` is 0 before the hello."""

    number: int
    socket: socket.socket | None
    pid: int
    started: int
    pidfd: int
    inbox: Inbox
    slot: int = 0

    def welcome(self, welcome: Welcome, fds: Sequence[int]) -> None:
        """Answers a hello. Raises: OSError."""
        assert self.socket is not None
        self.socket.settimeout(_SEND_TIMEOUT_S)
        send_line(self.socket, welcome.to_line(), fds)
        self.socket.setblocking(False)


class Connections:
    """The daemon's connections by number. Everything happens in ``loop``, on its thread."""

    def __init__(
        self,
        path: Path,
        pool: str,
        loop: EventLoop,
        *,
        max_fds: int,
        on_line: Callable[[Connection, bytes], None],
        on_hang_up: Callable[[Connection], None],
        on_end: Callable[[Connection], None],
    ) -> None:
        """Listens at ``path``. Raises: PoolError.

        ``on_line`` may raise a PoolError; a client without a slot is told it before the daemon hangs up.
        ``on_hang_up`` is called when a socket is done with, ``on_end`` when a process has ended.
        """
        self._path = path
        self._pool = pool
        self._loop = loop
        self._max_fds = max_fds
        self._on_line, self._on_hang_up, self._on_end = on_line, on_hang_up, on_end
        self._connections: dict[int, Connection] = {}
        self._num_made = 0
        self._listener = _listen(path)
        loop.watch(self._listener, self._accept)

    def close(self) -> None:
        """Gives up the socket's name and closes every connection."""
        self._path.unlink(missing_ok=True)
        self._listener.close()
        for connection in self._connections.values():
            if connection.socket is not None:
                connection.socket.close()
            connection.inbox.close()
            os.close(connection.pidfd)

    def __getitem__(self, number: int) -> Connection:
        return self._connections[number]

    def members(self) -> list[Connection]:
        """Returns the connections that have a slot."""
        return [connection for connection in self._connections.values() if connection.slot]

    def slots(self) -> set[int]:
        """Returns the slots of :meth:`members`."""
        return {connection.slot for connection in self.members()}

    def member_pids(self) -> str:
        """Returns the processes of :meth:`members`, for a message."""
        return ", ".join(map(str, sorted({connection.pid for connection in self.members()})))

    def add(self, client: socket.socket | None, pid: int, started: int, pidfd: int) -> Connection:
        """Watches a process, and its socket if it has one. Takes socket and pidfd over."""
        self._num_made += 1
        connection = Connection(self._num_made, client, pid, started, pidfd, Inbox(self._max_fds))
        self._connections[connection.number] = connection
        self._loop.watch(pidfd, lambda: self._on_end(connection))
        if client is not None:
            client.setblocking(False)
            self._loop.watch(client, lambda: self._read(connection))
        return connection

    def close_socket(self, connection: Connection) -> None:
        """Closes the socket and goes on watching the process. Idempotent."""
        connection.inbox.close()
        if connection.socket is not None:
            self._loop.drop(connection.socket)
            connection.socket.close()
            connection.socket = None

    def drop(self, connection: Connection) -> None:
        """Closes the socket and forgets the process."""
        self.close_socket(connection)
        self._loop.drop(connection.pidfd)
        os.close(connection.pidfd)
        del self._connections[connection.number]

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError as error:
            logger.warning("accept failed pool=%s error=%s", self._pool, error)
            return
        pid, uid, _gid = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        try:
            if uid != os.getuid():
                raise AttachRefused(f"pool {self._pool} belongs to uid {os.getuid()}, you are uid {uid}")
            if len(self._connections) >= MAX_CLIENTS:
                raise AttachRefused(
                    f"pool {self._pool} has {MAX_CLIENTS} clients, its limit; stop some", is_transient=True
                )
            pidfd, started = watch_process(pid)
        except PoolError as error:
            _refuse(client, error)
            client.close()
            return
        self.add(client, pid, started, pidfd)

    def _read(self, connection: Connection) -> None:
        assert connection.socket is not None
        try:
            if not connection.inbox.receive(connection.socket):
                self._on_hang_up(connection)
            while connection.socket is not None and (line := connection.inbox.take_line()) is not None:
                self._on_line(connection, line)
        except BlockingIOError:
            return
        except (PoolError, OSError) as error:
            logger.info("refused pool=%s pid=%d reason=%s", self._pool, connection.pid, error)
            if connection.socket is not None:
                if not connection.slot:
                    _refuse(connection.socket, error)
                self._on_hang_up(connection)


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)  # left by a dead daemon: we hold its lock
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        listener.listen(64)
    except OSError as error:
        listener.close()
        raise PoolError(f"{path}: can't listen ({error.strerror})") from error
    return listener


def _refuse(client: socket.socket, reason: Exception) -> None:
    is_transient = isinstance(reason, AttachRefused) and reason.is_transient
    client.settimeout(_SEND_TIMEOUT_S)
    try:
        client.sendall(Refusal(refused=str(reason), is_transient=is_transient).to_line())
    except OSError as error:
        logger.debug("refusal not delivered error=%s", error)
