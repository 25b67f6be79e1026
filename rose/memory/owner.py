"""The owner of a pool: it makes the memory, one shard per tensor-parallel rank, hands it to engines and
buries dead ones.

Owns the socket `pool-NAME.sock`, and the lock and the state file beside it. Promises that a dead engine's
slabs come free once all its processes have ended, that a pool has one daemon, and that a daemon which starts
while engines of its predecessor live takes over their memory instead of making its own. Never takes part in
moving slabs: if it dies, engines go on with the memory they already hold.

One thread. Source: the crash rules are ours; ROSE §4.1 has only "a global allocator".
"""

import logging
import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from rose.errors import ConfigError, PoolError
from rose.memory.event_loop import EventLoop
from rose.memory.fd_limit import ensure_fd_limit
from rose.memory.ledger import Word
from rose.memory.passing import Inbox, send_line
from rose.memory.pool_lock import PoolLock
from rose.memory.pool_memory import PoolMemory, PoolSize
from rose.memory.pool_state import MemberState, PoolState, read_state, write_state
from rose.memory.processes import find_process, open_pidfd, start_ticks
from rose.memory.roster import AttachRefused, Roster
from rose.memory.wire import Bye, Hello, Kind, Refusal, Welcome, socket_path
from rose.types import Role

logger = logging.getLogger(__name__)

MAX_CLIENTS = 64
"""Two engines of up to 16 ranks (MAX_SHARDS), and a few observers."""
HAND_OVER_TIMEOUT_S = 20.0
"""A surviving engine knocks every 0.1 to 1 s; one that loads weights may hold its interpreter for seconds."""
_SEND_TIMEOUT_S = 1.0
"""A reply of 200 bytes fits any socket buffer; a client that can't take it is broken."""


@dataclass(slots=True)
class _Connection:
    """A client's socket and process. ``socket`` is None while it is closed, ``slot`` 0 before its hello."""

    number: int
    socket: socket.socket | None
    pid: int
    started: int
    pidfd: int
    inbox: Inbox
    slot: int = 0


class PoolOwner:
    """One pool. Use as a context manager around :meth:`open` and :meth:`run`."""

    def __init__(self, *, name: str, size: PoolSize, runtime_dir: Path) -> None:
        """Takes the pool's name. Raises: PoolError if it has a daemon, ConfigError for bad sizes."""
        size.check()
        self._path = socket_path(runtime_dir, name)
        self._state_path = self._path.with_suffix(".state")
        self._name = name
        self._size = size
        # The memory's descriptors twice: a client that comes back brings them along.
        num_fds = 2 * size.num_fds + 2 * MAX_CLIENTS
        ensure_fd_limit(num_fds, f"pool {name} with {size.num_slabs} slabs and up to {MAX_CLIENTS} clients")
        self._lock = PoolLock(self._path.with_suffix(".lock"), name)
        try:
            self._listener = _listen(self._path)
        except BaseException:
            self._lock.release()
            raise
        self.loop = EventLoop()
        self._roster = Roster(name)
        self._connections: dict[int, _Connection] = {}
        self._num_connections = 0
        self._memory: PoolMemory | None = None
        self._files: list[tuple[int, int]] = []
        """What the pool's memory consists of: see PoolMemory.files."""
        self.loop.watch(self._listener, self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Gives up the pool's name. Clients keep their memory; the state file stays if there are any."""
        self._path.unlink(missing_ok=True)
        self._listener.close()
        for connection in self._connections.values():
            if connection.socket is not None:
                connection.socket.close()
            connection.inbox.close()
            os.close(connection.pidfd)
        self.loop.close()
        if self._memory is not None:
            self._memory.close()
        self._lock.release()
        logger.info("pool closed name=%s", self._name)

    def open(self) -> None:
        """Takes over the memory that a former daemon's engines hold, or makes new if none of them lives.

        Raises: PoolError if they hold a pool of another size, or none of them hands it over in time.
        """
        state = read_state(self._state_path)
        if state is not None:
            self._restore(state)
        if self._has_members():
            logger.info("waiting for the memory of pool=%s from pids=%s", self._name, self._member_pids())
            self.loop.run(lambda: self._memory is not None or not self._has_members(), HAND_OVER_TIMEOUT_S)
        if self.loop.is_stopping:
            raise PoolError(f"pool {self._name}: stopped before it was open")
        if self._memory is None and self._has_members():
            raise PoolError(
                f"pool {self._name}: processes {self._member_pids()} have its memory and none of them handed "
                f"it over within {HAND_OVER_TIMEOUT_S:.0f} s: stop them and start the daemon again"
            )
        if self._memory is None:
            self._memory = PoolMemory.create(self._name, self._size)
            self._files = self._memory.files()
        self._memory.ledger.check_integrity()
        self._save()

    def run(self) -> None:
        """Serves clients until :attr:`loop` is stopped."""
        logger.info("pool open name=%s %s", self._name, self._size)
        self.loop.run()

    # A former daemon's pool ----------------------------------------------------------------------

    def _restore(self, state: PoolState) -> None:
        """Watches the processes that are left. Raises: PoolError if their pool has another size."""
        pidfds = [find_process(member.hello.pid, member.started) for member in state.members]
        dead_slots = {
            member.hello.slot for member, fd in zip(state.members, pidfds, strict=True) if fd is None
        }
        for member, pidfd in zip(state.members, pidfds, strict=True):
            if pidfd is not None:
                hello = member.hello
                connection = self._add(None, hello.pid, member.started, pidfd)
                connection.slot = hello.slot
                is_broken = hello.slot in dead_slots or hello.slot in state.broken_slots
                self._roster.restore(connection.number, hello, hello.pid, is_broken=is_broken)
        living = {connection.slot for connection in self._connections.values()}
        size = PoolSize(
            num_slabs=state.num_slabs,
            slab_bytes=state.slab_bytes,
            headroom_slabs=state.headroom_slabs,
            num_shards=state.num_shards,
            backend=state.backend,
        )
        if living and size != self._size:
            raise PoolError(
                f"pool {self._name} lives on in processes {self._member_pids()} with {size}, this daemon was "
                f"given {self._size}: start it with the former, or stop those processes first"
            )
        self._files = state.files

    def _take_back(self, connection: _Connection, hello: Hello) -> None:
        """A client that was attached before, with the memory it holds. Raises: PoolError."""
        old = self._connections[self._roster.find(hello, connection.pid)]
        fds = connection.inbox.take_fds()
        files = [(status.st_dev, status.st_ino) for status in map(os.fstat, fds)]
        if files != self._files:
            for fd in fds:
                os.close(fd)
            raise AttachRefused(f"the {len(fds)} descriptors handed over are not pool {self._name}'s memory")
        if self._memory is None:
            memory = PoolMemory(fds)
            if memory.size != self._size:
                memory.close()
                raise AttachRefused(f"the memory handed over has {memory.size}, not {self._size}")
            self._memory = memory
            self._rebuild(memory)
        else:
            for fd in fds:
                os.close(fd)
        self._roster.replace(old.number, connection.number)
        connection.slot, old.slot = old.slot, 0
        self._bury(old)
        self._show(connection.slot)
        logger.info(
            "came back pool=%s slot=%d kind=%s rank=%d pid=%d",
            *(self._name, connection.slot, hello.kind, hello.rank, connection.pid),
        )

    def _rebuild(self, memory: PoolMemory) -> None:
        """Brings the ledger up to date with what happened while nobody watched."""
        for slot in memory.ledger.engines():
            if self._roster.engine(slot) is None:
                self._clear(slot)
        for slot in self._slots():
            self._show(slot)
        logger.info("took over the memory of pool=%s slots=%s", self._name, sorted(self._slots()))

    def _save(self) -> None:
        """For a successor. Without it engines go on as before, but no later daemon will know them."""
        members = [
            MemberState(hello=hello, started=self._connections[number].started)
            for number, hello in self._roster.members()
        ]
        try:
            if not members:
                self._state_path.unlink(missing_ok=True)
                return
            state = PoolState(
                num_slabs=self._size.num_slabs,
                slab_bytes=self._size.slab_bytes,
                headroom_slabs=self._size.headroom_slabs,
                num_shards=self._size.num_shards,
                backend=self._size.backend,
                files=self._files,
                members=members,
                broken_slots=self._roster.broken_slots(),
            )
            write_state(self._state_path, state)
        except OSError:
            logger.exception("can't write %s: a restarted daemon will not find its engines", self._state_path)

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
            if len(self._connections) >= MAX_CLIENTS:
                raise AttachRefused(
                    f"pool {self._name} has {MAX_CLIENTS} clients, its limit; stop some", is_transient=True
                )
            pidfd = open_pidfd(pid)
            started = start_ticks(pid)
        except PoolError as error:
            _refuse(client, error)
            client.close()
            return
        client.setblocking(False)
        connection = self._add(client, pid, started, pidfd)
        self.loop.watch(client, lambda: self._read(connection))

    def _add(self, client: socket.socket | None, pid: int, started: int, pidfd: int) -> _Connection:
        self._num_connections += 1
        connection = _Connection(
            self._num_connections, client, pid, started, pidfd, Inbox(max_fds=self._size.num_fds)
        )
        self._connections[connection.number] = connection
        self.loop.watch(pidfd, lambda: self._bury(connection))
        return connection

    def _read(self, connection: _Connection) -> None:
        assert connection.socket is not None
        try:
            if not connection.inbox.receive(connection.socket):
                self._hang_up(connection)
            while connection.socket is not None and (line := connection.inbox.take_line()) is not None:
                self._hear(connection, line)
        except BlockingIOError:
            return
        except (PoolError, OSError) as error:
            logger.info("refused pool=%s pid=%d reason=%s", self._name, connection.pid, error)
            if connection.socket is not None:
                if not connection.slot:
                    _refuse(connection.socket, error)
                self._hang_up(connection)

    def _hear(self, connection: _Connection, line: bytes) -> None:
        if connection.slot:
            Bye.from_line(line)
            self._bury(connection)
        else:
            self._greet(connection, Hello.from_line(line))

    def _greet(self, connection: _Connection, hello: Hello) -> None:
        fds: tuple[int, ...] = ()
        if not hello.slot and (former := self._roster.find_lost(hello, connection.pid)) is not None:
            # It left, or was not welcomed, while its daemon died: nobody else would ever bury it.
            self._bury(self._connections[former])
        if hello.slot:
            self._take_back(connection, hello)
        elif self._memory is None:
            raise AttachRefused(
                f"pool {self._name} is being taken over from its former daemon", is_transient=True
            )
        elif hello.kind is Kind.OBSERVER:
            fds = self._memory.page_fds
        else:
            self._admit(connection, hello)
            fds = self._memory.fds
        welcome = Welcome(slot=connection.slot, num_fds=len(fds), daemon_pid=os.getpid())
        assert connection.socket is not None
        connection.socket.settimeout(_SEND_TIMEOUT_S)
        send_line(connection.socket, welcome.to_line(), fds)
        connection.socket.setblocking(False)

    def _admit(self, connection: _Connection, hello: Hello) -> None:
        try:
            self._size.check_ranks(self._name, hello.world_size)
        except ConfigError as error:
            raise AttachRefused(str(error)) from error
        connection.slot = self._roster.admit(connection.number, hello, connection.pid)
        # Before anybody can own a slab: a successor takes a slot that the file doesn't know for a dead one's.
        self._save()
        self._show(connection.slot)
        logger.info(
            "attached pool=%s slot=%d role=%s engine=%s kind=%s rank=%d pid=%d",
            *(
                self._name,
                connection.slot,
                hello.role,
                hello.engine_id,
                hello.kind,
                hello.rank,
                connection.pid,
            ),
        )

    def _hang_up(self, connection: _Connection) -> None:
        """The socket is done with; an engine's process is waited for, as it may have slabs mapped."""
        self._close_socket(connection)
        if connection.slot:
            self._show(self._roster.lose(connection.number))
            logger.info("lost pool=%s slot=%d pid=%d", self._name, connection.slot, connection.pid)
        else:
            self._bury(connection)

    def _bury(self, connection: _Connection) -> None:
        """The process has no slab mapped any more."""
        self._close_socket(connection)
        self.loop.drop(connection.pidfd)
        os.close(connection.pidfd)
        del self._connections[connection.number]
        if not connection.slot:
            return
        vacated = self._roster.bury(connection.number)
        # Saved first: a successor clears the slots that it finds nobody for.
        self._save()
        if vacated is None:
            self._show(connection.slot)
        elif self._memory is not None:
            self._clear(vacated)

    def _close_socket(self, connection: _Connection) -> None:
        connection.inbox.close()
        if connection.socket is not None:
            self.loop.drop(connection.socket)
            connection.socket.close()
            connection.socket = None

    # The ledger ----------------------------------------------------------------------------------

    def _show(self, slot: int) -> None:
        if self._memory is not None:
            self._memory.ledger.set_engine(slot, self._roster.engine(slot))

    def _clear(self, slot: int) -> None:
        """No process of the engine is left."""
        assert self._memory is not None
        ledger = self._memory.ledger
        if ledger.engines()[slot].role is Role.SERVING:
            # Nobody else would take them back, and rollout would keep clear of memory that nobody uses.
            ledger.serving_used_slabs = 0
            ledger.serving_recent_peak_slabs = 0
        freed = ledger.force_free(slot)
        ledger.count(Word.EXIT_FREED_SLABS, len(freed))
        ledger.set_engine(slot, None)
        logger.info("engine left pool=%s slot=%d freed_slabs=%d", self._name, slot, len(freed))

    def _slots(self) -> set[int]:
        return {connection.slot for connection in self._connections.values() if connection.slot}

    def _has_members(self) -> bool:
        return bool(self._slots())

    def _member_pids(self) -> str:
        pids = {connection.pid for connection in self._connections.values() if connection.slot}
        return ", ".join(map(str, sorted(pids)))


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
