"""Which engines, and which of their processes, are attached to a pool.

This module has the rules of attaching, coming back and leaving. A slot is vacated only once every process of
its engine is known to hold no slab. The rules are pure: there are no sockets and there is no clock.

A connection is *present*, *lost* (its socket is closed, but its process may still have slabs mapped and come
back) or *gone* (it said bye, or its process ended). No process joins an engine that has a lost connection,
and an engine of which one connection is gone will leave.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from rose.errors import PoolError
from rose.memory.ledger.ledger import EngineSlot
from rose.memory.ledger.slab_word import MAX_SLOT
from rose.memory.pool.wire import ClientHello, Kind
from rose.types import MAX_ENGINES, Role


class AttachRefused(PoolError):
    """The pool won't take this client. It is transient if a retry may succeed."""

    def __init__(self, message: str, *, is_transient: bool = False) -> None:
        super().__init__(message)
        self.is_transient = is_transient


@dataclass(slots=True, kw_only=True)
class _Member:
    kind: Kind
    rank: int
    pid: int
    is_present: bool = True

    @property
    def part(self) -> tuple[Kind, int]:
        return self.kind, self.rank


@dataclass(slots=True, kw_only=True)
class _Engine:
    role: Role
    engine_id: str
    world_size: int
    members: dict[int, _Member] = field(default_factory=dict)
    is_broken: bool = False
    """A process of it is gone."""

    @property
    def is_leaving(self) -> bool:
        return self.is_broken or not all(member.is_present for member in self.members.values())

    def describe(self) -> str:
        pids = sorted({member.pid for member in self.members.values()})
        return f"{self.role} engine {self.engine_id!r} (pids {', '.join(map(str, pids))})"


class Roster:
    """The engines of one pool, by slot. Connections are distinct numbers."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._engines: dict[int, _Engine] = {}

    def admit(self, connection: int, hello: ClientHello, pid: int) -> int:
        """Admits a scheduler or worker; returns its engine's slot. Raises: AttachRefused."""
        if hello.kind is Kind.WORKER and hello.rank >= hello.world_size:
            raise AttachRefused(f"rank {hello.rank} of {hello.world_size} workers: ranks start at 0")
        slot = self._slot_for(hello)
        engine = self._engines.setdefault(
            slot, _Engine(role=hello.role, engine_id=hello.engine_id, world_size=hello.world_size)
        )
        engine.members[connection] = _Member(kind=hello.kind, rank=hello.rank, pid=pid)
        return slot

    def restore(self, connection: int, hello: ClientHello, pid: int, *, is_broken: bool) -> None:
        """Puts a process that an earlier daemon had admitted into ``hello.slot``; it is lost until it comes
        back.

        ``is_broken`` says whether a process of that engine was gone.
        """
        engine = self._engines.setdefault(
            hello.slot, _Engine(role=hello.role, engine_id=hello.engine_id, world_size=hello.world_size)
        )
        engine.members[connection] = _Member(kind=hello.kind, rank=hello.rank, pid=pid, is_present=False)
        engine.is_broken |= is_broken

    def find(self, hello: ClientHello, pid: int) -> int:
        """Finds the connection that process ``pid`` had before it broke. Raises: AttachRefused."""
        engine = self._engines.get(hello.slot)
        if engine is not None and (engine.role, engine.engine_id, engine.world_size) == (
            hello.role,
            hello.engine_id,
            hello.world_size,
        ):
            for connection, member in engine.members.items():
                if (member.part, member.pid) == ((hello.kind, hello.rank), pid):
                    return connection
        raise AttachRefused(
            f"pool {self._pool} has no {hello.kind} of rank {hello.rank} of {hello.role} engine "
            f"{hello.engine_id!r} with pid {pid} in slot {hello.slot}: the pool is a new one; "
            f"restart the engine"
        )

    def find_lost(self, hello: ClientHello, pid: int) -> int | None:
        """Finds the lost connection of a process that says hello as a new client, which has nothing
        mapped."""
        for connection, former in self.members():
            is_same = former.model_copy(update={"slot": 0}) == hello.model_copy(update={"pid": pid})
            if is_same and not self._engines[former.slot].members[connection].is_present:
                return connection
        return None

    def replace(self, old: int, new: int) -> None:
        """Marks the process behind connection ``old`` as present again, as ``new``."""
        members = self._engines[self._slot_of(old)].members
        members[new] = members.pop(old)
        members[new].is_present = True

    def lose(self, connection: int) -> int:
        """Marks a connection as lost; its process may still have slabs mapped. Returns its engine's slot."""
        slot = self._slot_of(connection)
        self._engines[slot].members[connection].is_present = False
        return slot

    def bury(self, connection: int) -> int | None:
        """Forgets a process that has no slab mapped any more; returns the slot if it was the engine's
        last."""
        slot = self._slot_of(connection)
        engine = self._engines[slot]
        engine.is_broken = True
        del engine.members[connection]
        if engine.members:
            return None
        del self._engines[slot]
        return slot

    def engine(self, slot: int) -> EngineSlot | None:
        """Returns what the ledger shows about an engine, None for an empty slot."""
        engine = self._engines.get(slot)
        if engine is None:
            return None
        schedulers = [m.pid for m in engine.members.values() if m.kind is Kind.SCHEDULER]
        return EngineSlot(
            role=engine.role,
            pid=schedulers[0] if schedulers else 0,
            world_size=engine.world_size,
            is_leaving=engine.is_leaving,
        )

    def members(self) -> Iterator[tuple[int, ClientHello]]:
        """Yields every connection with a hello that would restore it."""
        for slot, engine in self._engines.items():
            for connection, member in engine.members.items():
                yield (
                    connection,
                    ClientHello(
                        role=engine.role,
                        engine_id=engine.engine_id,
                        kind=member.kind,
                        rank=member.rank,
                        world_size=engine.world_size,
                        pid=member.pid,
                        slot=slot,
                    ),
                )

    def broken_slots(self) -> list[int]:
        """Returns the slots of engines that have lost some of their processes for good."""
        return [slot for slot, engine in self._engines.items() if engine.is_broken]

    def check_integrity(self) -> None:
        """Checks that engines differ and that an engine's part has one process. Raises: AssertionError."""
        names = [(engine.role, engine.engine_id) for engine in self._engines.values()]
        assert len(names) == len(set(names)), names
        for slot, engine in self._engines.items():
            parts = [member.part for member in engine.members.values()]
            assert 1 <= slot <= MAX_SLOT and 0 < len(parts) == len(set(parts)), (slot, parts)

    def _slot_for(self, hello: ClientHello) -> int:
        same_role = {slot: engine for slot, engine in self._engines.items() if engine.role is hello.role}
        for slot, engine in same_role.items():
            if engine.engine_id == hello.engine_id and not engine.is_leaving:
                self._check_same_engine(engine, hello)
                return slot
        for engine in same_role.values():
            # The newcomer may be its successor, which finds its slabs free only then.
            if engine.is_leaving:
                raise AttachRefused(
                    f"pool {self._pool}: the {engine.describe()} is leaving; wait until its processes have "
                    f"ended, which frees its slabs",
                    is_transient=True,
                )
        if len(same_role) == MAX_ENGINES[hello.role]:
            engines = ", ".join(engine.describe() for engine in same_role.values())
            raise AttachRefused(
                f"pool {self._pool} has {len(same_role)} {hello.role} engines, the most that can share "
                f"a GPU: {engines}; stop one, or give {hello.engine_id!r} another pool"
            )
        return next(slot for slot in range(1, MAX_SLOT + 1) if slot not in self._engines)

    def _check_same_engine(self, engine: _Engine, hello: ClientHello) -> None:
        if engine.world_size != hello.world_size:
            raise AttachRefused(
                f"the {engine.describe()} has world size {engine.world_size}, got {hello.world_size}"
            )
        if any(member.part == (hello.kind, hello.rank) for member in engine.members.values()):
            part = f"{hello.kind} of rank {hello.rank}"
            raise AttachRefused(f"pool {self._pool}: the {engine.describe()} already has its {part}")

    def _slot_of(self, connection: int) -> int:
        return next(slot for slot, engine in self._engines.items() if connection in engine.members)
