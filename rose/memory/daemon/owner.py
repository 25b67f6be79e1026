"""The owner of a pool: makes the memory, one shard per rank of an engine, hands it to engines, and takes
back what dead engines held.

It owns the pool's memory, the lock and the state file; connections.py has its clients' sockets. A pool has
one daemon. A dead engine's slabs come free once all its processes have ended. A daemon that starts while
engines of its predecessor live takes over their memory instead of making new memory. The daemon takes no part
in moving slabs: if it dies, engines go on with the memory they hold. But a rollout engine that hangs with
memory that serving lacks is killed.

One thread. Source: the crash rules are ours; ROSE §4.1 has only "a global allocator".
"""

import logging
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from rose.errors import ConfigError, PoolError
from rose.memory.daemon.connections import MAX_CLIENTS, Connection, Connections
from rose.memory.daemon.event_loop import EventLoop, Stopped
from rose.memory.daemon.hung import HUNG_LOOKS, HungEngines
from rose.memory.daemon.pool_lock import PoolLock
from rose.memory.daemon.pool_state import MemberState, PoolState, read_state, write_state
from rose.memory.daemon.roster import AttachRefused, Roster
from rose.memory.pool.pool_memory import PoolMemory, PoolSize
from rose.memory.pool.processes import SHARE_PIDS, find_process
from rose.memory.pool.wire import Bye, ClientHello, Kind, Welcome, socket_path
from rose.memory.slabs.fd_limit import ensure_fd_limit

logger = logging.getLogger(__name__)

HAND_OVER_TIMEOUT_S = 20.0
"""A surviving engine connects again every 0.1 to 1 s, but one that loads weights may hold its interpreter for
seconds."""
_LOOK_S = 1.0
"""How often it looks for engines that hang."""


class PoolOwner:
    """One pool. Use as a context manager around :meth:`open` and :meth:`run`."""

    def __init__(self, *, name: str, size: PoolSize, runtime_dir: Path) -> None:
        """Takes the pool's name. Raises: PoolError if it has a daemon, ConfigError for bad sizes."""
        size.check()
        path = socket_path(runtime_dir, name)
        self._state_path = path.with_suffix(".state")
        self._name = name
        self._size = size
        # The memory's descriptors twice: a client that comes back brings them along.
        num_fds = 2 * size.num_fds + 2 * MAX_CLIENTS
        ensure_fd_limit(num_fds, f"pool {name} with {size.num_slabs} slabs and up to {MAX_CLIENTS} clients")
        self.loop = EventLoop()
        self._roster = Roster(name)
        self._memory: PoolMemory | None = None
        self._files: list[tuple[int, int]] = []
        """The files that the pool's memory consists of: see PoolMemory.files."""
        with ExitStack() as undo:
            undo.callback(self.loop.close)
            self._lock = PoolLock(path.with_suffix(".lock"), name)
            undo.callback(self._lock.release)
            self._connections = Connections(
                path,
                name,
                self.loop,
                max_fds=size.num_fds,
                on_line=self._hear,
                on_hang_up=self._hang_up,
                on_end=self._bury,
            )
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Gives up the pool's name. Clients keep their memory, and the state file stays if there are any."""
        self._connections.close()
        self.loop.close()
        if self._memory is not None:
            self._memory.close()
        self._lock.release()
        logger.info("pool closed name=%s", self._name)

    def open(self) -> None:
        """Takes over the memory that a former daemon's engines hold; makes new memory if none of them lives.

        Raises: PoolError if they hold a pool of another size, if none of them hands it over in time, or if a
        stop signal came; ConfigError if there is no room for the memory.
        """
        state = read_state(self._state_path)
        if state is not None:
            self._restore(state)
        connections = self._connections
        if connections.members():
            logger.info(
                "waiting for the memory of pool=%s from pids=%s", self._name, connections.member_pids()
            )
            self.loop.run(lambda: self._memory is not None or not connections.members(), HAND_OVER_TIMEOUT_S)
        try:
            with self.loop.stop_raises():
                if self.loop.is_stopping:
                    raise Stopped
                self._memory = self._memory or self._make_memory()
        except Stopped as error:
            raise PoolError(f"pool {self._name}: stopped before it was open") from error
        self._memory.ledger.check_integrity()
        self._save()

    def _make_memory(self) -> PoolMemory:
        """Makes new memory. Raises: PoolError if processes of former engines still hold the old one."""
        if pids := self._connections.member_pids():
            raise PoolError(
                f"pool {self._name}: processes {pids} have its memory and none of them "
                f"handed it over within {HAND_OVER_TIMEOUT_S:.0f} s: stop them and start the daemon again"
            )
        memory = PoolMemory.create(self._name, self._size)
        self._files = memory.files()
        return memory

    def run(self) -> None:
        """Serves clients until :attr:`loop` is stopped, and ends engines that hang with serving's memory."""
        logger.info("pool open name=%s %s", self._name, self._size)
        hung = HungEngines()
        while not self.loop.is_stopping:
            self.loop.run(timeout_s=_LOOK_S)
            assert self._memory is not None, "open() comes first"
            for slot, num_due in hung.find(self._memory.ledger).items():
                self._kill(slot, num_due)

    def _kill(self, slot: int, num_due: int) -> None:
        """Kills an engine's processes. Its slabs come free once they have ended."""
        members = [each for each in self._connections.members() if each.slot == slot]
        logger.error(
            "killing hung engine pool=%s slot=%d pids=%s: serving has lacked slabs for %.0f s, in which it "
            "gave back none of the %d that it has to; start it again",
            *(self._name, slot, [each.pid for each in members], HUNG_LOOKS * _LOOK_S, num_due),
        )
        for each in members:
            try:
                signal.pidfd_send_signal(each.pidfd, signal.SIGKILL)
            except OSError as error:  # it has just ended, or a container's profile forbids it
                logger.error("not killed pool=%s pid=%d error=%s", self._name, each.pid, error.strerror)

    # A former daemon's pool ----------------------------------------------------------------------

    def _restore(self, state: PoolState) -> None:
        """Watches the processes that are left of a former pool. Raises: PoolError if it has another size."""
        pidfds = [find_process(member.hello.pid, member.started) for member in state.members]
        dead_slots = {
            member.hello.slot for member, fd in zip(state.members, pidfds, strict=True) if fd is None
        }
        for member, pidfd in zip(state.members, pidfds, strict=True):
            if pidfd is not None:
                hello = member.hello
                connection = self._connections.add(None, hello.pid, member.started, pidfd)
                connection.slot = hello.slot
                is_broken = hello.slot in dead_slots or hello.slot in state.broken_slots
                self._roster.restore(connection.number, hello, hello.pid, is_broken=is_broken)
        pids = self._connections.member_pids()
        if pids and state.size != self._size:
            raise PoolError(
                f"pool {self._name} lives on in processes {pids} with {state.size}, but this daemon has "
                f"{self._size}: start it with their sizes, or stop those processes first"
            )
        self._files = state.files

    def _take_back(self, connection: Connection, hello: ClientHello) -> None:
        """Takes back a client that was attached before, with the memory that it holds. Raises: PoolError."""
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
        """Brings the ledger up to date with what happened while there was no daemon."""
        for slot in memory.ledger.engines():
            if self._roster.engine(slot) is None:
                self._clear(slot)
        slots = self._connections.slots()
        for slot in slots:
            self._show(slot)
        logger.info("took over the memory of pool=%s slots=%s", self._name, sorted(slots))

    def _save(self) -> None:
        """Saves the state for a successor. Without it engines go on, but no later daemon knows them."""
        members = [
            MemberState(hello=hello, started=self._connections[number].started)
            for number, hello in self._roster.members()
        ]
        try:
            if not members:
                self._state_path.unlink(missing_ok=True)
                return
            broken = self._roster.broken_slots()
            state = PoolState.of(self._size, files=self._files, members=members, broken_slots=broken)
            write_state(self._state_path, state)
        except OSError:
            logger.exception("can't write %s: a restarted daemon will not find its engines", self._state_path)

    # Clients -------------------------------------------------------------------------------------

    def _hear(self, connection: Connection, line: bytes) -> None:
        if connection.slot:
            Bye.from_line(line)
            self._bury(connection)
        else:
            self._greet(connection, ClientHello.from_line(line))

    def _greet(self, connection: Connection, hello: ClientHello) -> None:
        fds: tuple[int, ...] = ()
        if hello.pid != connection.pid:
            raise AttachRefused(
                f"this process has pid {hello.pid} for itself and {connection.pid} for the daemon of pool "
                f"{self._name}: {SHARE_PIDS}"
            )
        if not hello.slot and (former := self._roster.find_lost(hello, connection.pid)) is not None:
            # It left, or got no welcome, while its daemon died: nothing else would ever bury it.
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
        connection.welcome(Welcome(slot=connection.slot, num_fds=len(fds), daemon_pid=os.getpid()), fds)

    def _admit(self, connection: Connection, hello: ClientHello) -> None:
        try:
            self._size.check_ranks(self._name, hello.world_size)
        except ConfigError as error:
            raise AttachRefused(str(error)) from error
        connection.slot = self._roster.admit(connection.number, hello, connection.pid)
        # Saved before the engine can own a slab: a successor clears a slot that the file doesn't name.
        self._save()
        self._show(connection.slot)
        logger.info(
            "attached pool=%s slot=%d role=%s engine=%s kind=%s rank=%d pid=%d",
            *(self._name, connection.slot, hello.role, hello.engine_id),
            *(hello.kind, hello.rank, connection.pid),
        )

    def _hang_up(self, connection: Connection) -> None:
        """Closes a socket; an engine's process is still waited for, as it may have slabs mapped."""
        self._connections.close_socket(connection)
        if connection.slot:
            self._show(self._roster.lose(connection.number))
            logger.info("lost pool=%s slot=%d pid=%d", self._name, connection.slot, connection.pid)
        else:
            self._bury(connection)

    def _bury(self, connection: Connection) -> None:
        """Forgets a process that has no slab mapped any more."""
        self._connections.drop(connection)
        if not connection.slot:
            return
        vacated = self._roster.bury(connection.number)
        # Saved first: a successor clears the slots for which it finds no process.
        self._save()
        if vacated is None:
            self._show(connection.slot)
        elif self._memory is not None:
            self._clear(vacated)

    # The ledger ----------------------------------------------------------------------------------

    def _show(self, slot: int) -> None:
        if self._memory is not None:
            self._memory.ledger.set_engine(slot, self._roster.engine(slot))

    def _clear(self, slot: int) -> None:
        """Frees the slabs of an engine that has no process left."""
        assert self._memory is not None
        num_freed = self._memory.ledger.vacate(slot)
        logger.info("engine left pool=%s slot=%d freed_slabs=%d", self._name, slot, num_freed)
