"""The owner of a pool: it makes the memory, hands it to engines and buries dead ones.

Owns the slab file, the ledger and the board while it lives, the socket `pool-NAME.sock` and the lock beside
it. Promises that a dead engine's slabs come free once all its processes have ended, and that a pool has one
daemon. Never takes part in moving slabs: if it dies, engines go on with the memory they already hold.

One thread, one selector. Source: the crash rules are ours; ROSE §4.1 has only "a global allocator".
"""

import fcntl
import logging
import mmap
import os
import selectors
import signal
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from rose._vmm import SlabFile
from rose.errors import ConfigError, PoolError
from rose.memory.ledger import WORD_BYTES, Ledger, Word, ledger_bytes
from rose.memory.roster import AttachRefused, Roster
from rose.memory.wire import (
    BOARD_BYTES,
    MAX_LINE_BYTES,
    PROTOCOL_VERSION,
    Bye,
    Hello,
    Kind,
    Refusal,
    Welcome,
    socket_path,
)
from rose.types import Role

logger = logging.getLogger(__name__)

_SEND_TIMEOUT_S = 1.0
"""A reply of 200 bytes fits any socket buffer; a client that can't take it is broken."""


@dataclass(slots=True)
class _Connection:
    """A client's socket and process. ``socket`` is None once it closed, ``slot`` 0 before its hello."""

    number: int
    socket: socket.socket | None
    pid: int
    pidfd: int
    slot: int = 0
    received: bytearray = field(default_factory=bytearray)


class PoolLock:
    """Holds `pool-NAME.lock`. The kernel drops it with the process: a dead daemon's pool can be retaken."""

    def __init__(self, path: Path, pool: str) -> None:
        self._path = path
        while True:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(self._fd)
                raise PoolError(
                    f"pool already owned: {pool} has a running daemon ({path} is locked)"
                ) from error
            # A daemon that was just stopping may have unlinked the file between our open and our lock.
            if path.exists() and os.fstat(self._fd).st_ino == path.stat().st_ino:
                return
            os.close(self._fd)

    def release(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._fd)


class PoolOwner:
    """One pool. Use as a context manager around :meth:`run`."""

    def __init__(
        self, *, name: str, num_slabs: int, slab_bytes: int, headroom_slabs: int, runtime_dir: Path
    ) -> None:
        """Takes the pool and listens. Raises: PoolError if it has a daemon, ConfigError for bad sizes."""
        self._path = socket_path(runtime_dir, name)
        if not 0 <= headroom_slabs < num_slabs:
            raise ConfigError(
                f"--headroom-slabs {headroom_slabs}: must be 0..{num_slabs - 1} with --num-slabs {num_slabs}"
            )
        self._name = name
        self._lock = PoolLock(self._path.with_suffix(".lock"), name)
        try:
            self._slabs = _make_slab_file(num_slabs, slab_bytes, name)
            self._ledger_fd, ledger_map = _make_shared(f"rose-ledger-{name}", ledger_bytes(num_slabs))
            self._board_fd, _ = _make_shared(f"rose-board-{name}", BOARD_BYTES)
            self._ledger = Ledger.create(
                ledger_map, num_slabs=num_slabs, slab_bytes=slab_bytes, headroom_slabs=headroom_slabs
            )
            self._listener = _listen(self._path)
        except BaseException:
            self._lock.release()
            raise
        self._roster = Roster(name)
        self._connections: dict[int, _Connection] = {}
        self._num_connections = 0
        self._is_stopping = False
        self._selector = selectors.DefaultSelector()
        self._watch(self._listener, self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Gives up the pool's name. Clients keep the memory they have mapped."""
        self._path.unlink(missing_ok=True)
        self._listener.close()
        for connection in self._connections.values():
            if connection.socket is not None:
                connection.socket.close()
            os.close(connection.pidfd)
        self._selector.close()
        os.close(self._ledger_fd)
        os.close(self._board_fd)
        self._lock.release()
        logger.info("pool closed name=%s", self._name)

    def run(self) -> None:
        """Serves clients until :meth:`stop`."""
        logger.info(
            "pool open name=%s num_slabs=%d slab_bytes=%d",
            self._name,
            self._ledger.num_slabs,
            self._ledger.slab_bytes,
        )
        while not self._is_stopping:
            for key, _ in self._selector.select():
                # An earlier event of this round may have closed this one, and its number may be in use again.
                if self._selector.get_map().get(key.fd) is key:
                    key.data()

    def stop(self) -> None:
        """Ends :meth:`run` after the current round of events."""
        self._is_stopping = True

    def stop_on_signals(self) -> None:
        """SIGTERM and SIGINT end :meth:`run`. Main thread only."""
        reader, writer = socket.socketpair()
        for end in (reader, writer):
            end.setblocking(False)
        signal.set_wakeup_fd(writer.fileno())
        self._signal_ends = (reader, writer)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: None)
        self._watch(reader, self.stop)

    def stop_with(self, pid: int) -> None:
        """The end of process ``pid`` ends :meth:`run`. Raises: PoolError if it has ended already."""
        self._watch(_open_pidfd(pid), self.stop)

    # Clients -------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError as error:
            logger.warning("accept failed pool=%s error=%s", self._name, error)
            return
        pid, uid, _gid = struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        try:
            if uid != os.getuid():
                raise AttachRefused(f"pool {self._name} belongs to uid {os.getuid()}, you are uid {uid}")
            pidfd = _open_pidfd(pid)
        except PoolError as error:
            _refuse(client, AttachRefused(str(error)))
            client.close()
            return
        client.setblocking(False)
        self._num_connections += 1
        connection = _Connection(self._num_connections, client, pid, pidfd)
        self._connections[connection.number] = connection
        self._watch(client, lambda: self._read(connection))
        self._watch(pidfd, lambda: self._bury(connection))

    def _read(self, connection: _Connection) -> None:
        assert connection.socket is not None
        try:
            received = connection.socket.recv(4096)
        except BlockingIOError:
            return
        except ConnectionError:
            received = b""
        connection.received += received
        if not received or len(connection.received) > MAX_LINE_BYTES:
            self._hang_up(connection)
            return
        while connection.socket is not None and b"\n" in connection.received:
            line, _, rest = bytes(connection.received).partition(b"\n")
            connection.received = bytearray(rest)
            self._hear(connection, line)

    def _hear(self, connection: _Connection, line: bytes) -> None:
        try:
            if connection.slot:
                Bye.from_line(line)
                self._bury(connection)
            else:
                self._greet(connection, Hello.from_line(line))
        except (PoolError, OSError) as error:
            logger.info("refused pool=%s pid=%d reason=%s", self._name, connection.pid, error)
            if connection.socket is not None and not connection.slot:
                refused = error if isinstance(error, AttachRefused) else AttachRefused(str(error))
                _refuse(connection.socket, refused)
            self._hang_up(connection)

    def _greet(self, connection: _Connection, hello: Hello) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            raise AttachRefused(
                f"client speaks pool protocol {hello.protocol}, pool {self._name} speaks {PROTOCOL_VERSION}: "
                f"run the same rose version on both sides"
            )
        if hello.kind is not Kind.OBSERVER:
            connection.slot = self._roster.admit(connection.number, hello, connection.pid)
            self._ledger.set_engine(connection.slot, self._roster.engine(connection.slot))
            logger.info(
                "attached pool=%s slot=%d role=%s engine=%s kind=%s rank=%d pid=%d",
                self._name,
                connection.slot,
                hello.role,
                hello.engine_id,
                hello.kind,
                hello.rank,
                connection.pid,
            )
        welcome = Welcome(
            slot=connection.slot,
            num_slabs=self._ledger.num_slabs,
            slab_bytes=self._ledger.slab_bytes,
            headroom_slabs=self._ledger.headroom_slabs,
            ledger_words=Word.SLABS + self._ledger.num_slabs,
            daemon_pid=os.getpid(),
        )
        assert connection.socket is not None
        connection.socket.settimeout(_SEND_TIMEOUT_S)
        fds = [self._slabs.fileno(), self._ledger_fd, self._board_fd]
        socket.send_fds(connection.socket, [welcome.to_line()], fds)
        connection.socket.setblocking(False)

    def _hang_up(self, connection: _Connection) -> None:
        """The socket is done with; an engine's process is waited for, as it may have slabs mapped."""
        if connection.socket is not None:
            self._selector.unregister(connection.socket)
            connection.socket.close()
            connection.socket = None
        if connection.slot:
            self._roster.lose(connection.number)
            logger.info("lost pool=%s slot=%d pid=%d", self._name, connection.slot, connection.pid)
        else:
            self._bury(connection)

    def _bury(self, connection: _Connection) -> None:
        """The process has no slab mapped any more."""
        if connection.socket is not None:
            self._selector.unregister(connection.socket)
            connection.socket.close()
        self._selector.unregister(connection.pidfd)
        os.close(connection.pidfd)
        del self._connections[connection.number]
        if not connection.slot:
            return
        slot = self._roster.bury(connection.number)
        if slot is not None:
            self._clear(slot)

    def _clear(self, slot: int) -> None:
        """No process of the engine is left."""
        if self._ledger.engines()[slot].role is Role.SERVING:
            # Nobody else would take them back, and rollout would keep clear of memory that nobody uses.
            self._ledger.serving_used_slabs = 0
            self._ledger.serving_recent_peak_slabs = 0
        freed = self._ledger.force_free(slot)
        self._ledger.count(Word.EXIT_FREED_SLABS, len(freed))
        self._ledger.set_engine(slot, None)
        logger.info("engine left pool=%s slot=%d freed_slabs=%d", self._name, slot, len(freed))

    def _watch(self, source: socket.socket | int, react: Callable[[], None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, react)


def _make_slab_file(num_slabs: int, slab_bytes: int, name: str) -> SlabFile:
    try:
        return SlabFile.create(num_slabs, slab_bytes, f"rose-slabs-{name}")
    except ValueError as error:
        raise ConfigError(f"pool {name}: {error}") from error
    except OSError as error:
        raise PoolError(f"pool {name}: {error.strerror}") from error


def _make_shared(name: str, num_bytes: int) -> tuple[int, mmap.mmap]:
    num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    assert num_bytes % WORD_BYTES == 0
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd, mmap.mmap(fd, num_bytes)


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


def _open_pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except (OSError, ValueError) as error:
        raise PoolError(
            f"can't watch process {pid} ({error}): it must be alive and in the daemon's pid namespace"
        ) from error


def _refuse(client: socket.socket, reason: AttachRefused) -> None:
    client.settimeout(_SEND_TIMEOUT_S)
    try:
        client.sendall(Refusal(refused=str(reason), is_transient=reason.is_transient).to_line())
    except OSError as error:
        logger.debug("refusal not delivered error=%s", error)
