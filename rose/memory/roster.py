"""Which engines, and which of their processes, are attached to a pool.

Owns the rules of attaching and leaving. Promises that a slot is vacated only once every process of its
engine is known to hold no slab. Pure: no sockets, no clock.

A connection is *present*, then *lost* (its socket closed, its process may still have slabs mapped), then
*gone* (it said bye or its process ended). An engine that lost anybody is *leaving* and takes nobody in.
"""

from dataclasses import dataclass, field

from rose.errors import PoolError
from rose.memory.ledger import EngineSlot
from rose.memory.slab_word import MAX_SLOT
from rose.memory.wire import Hello, Kind
from rose.types import Role


class AttachRefused(PoolError):
    """The pool won't take this client; transient if a retry may succeed."""

    def __init__(self, message: str, *, is_transient: bool = False) -> None:
        super().__init__(message)
        self.is_transient = is_transient


@dataclass(slots=True, kw_only=True)
class _Member:
    kind: Kind
    rank: int
    pid: int


@dataclass(slots=True, kw_only=True)
class _Engine:
    role: Role
    engine_id: str
    world_size: int
    members: dict[int, _Member] = field(default_factory=dict)
    is_leaving: bool = False

    def describe(self) -> str:
        pids = sorted({member.pid for member in self.members.values()})
        return f"{self.role} engine {self.engine_id!r} (pids {', '.join(map(str, pids))})"


class Roster:
    """The engines of one pool, by slot. Connections are any distinct ints."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._engines: dict[int, _Engine] = {}

    def admit(self, connection: int, hello: Hello, pid: int) -> int:
        """Takes a scheduler or worker in; returns its engine's slot. Raises: AttachRefused."""
        if hello.kind is Kind.WORKER and hello.rank >= hello.world_size:
            raise AttachRefused(f"rank {hello.rank} of {hello.world_size} workers: ranks start at 0")
        slot = self._slot_for(hello)
        engine = self._engines.setdefault(
            slot, _Engine(role=hello.role, engine_id=hello.engine_id, world_size=hello.world_size)
        )
        engine.members[connection] = _Member(kind=hello.kind, rank=hello.rank, pid=pid)
        return slot

    def lose(self, connection: int) -> None:
        """The connection broke; its process may still have slabs mapped."""
        slot = self._slot_of(connection)
        self._engines[slot].is_leaving = True

    def bury(self, connection: int) -> int | None:
        """The connection's process has no slab mapped any more; returns the slot if that was the last one."""
        slot = self._slot_of(connection)
        engine = self._engines[slot]
        engine.is_leaving = True
        del engine.members[connection]
        if engine.members:
            return None
        del self._engines[slot]
        return slot

    def engine(self, slot: int) -> EngineSlot:
        """What the ledger shows of an engine."""
        engine = self._engines[slot]
        schedulers = [m.pid for m in engine.members.values() if m.kind is Kind.SCHEDULER]
        return EngineSlot(
            role=engine.role, pid=schedulers[0] if schedulers else 0, world_size=engine.world_size
        )

    def check_integrity(self) -> None:
        """One engine per role, nobody twice. Raises: AssertionError."""
        roles = [engine.role for engine in self._engines.values()]
        assert len(roles) == len(set(roles)), roles
        for slot, engine in self._engines.items():
            parts = [(member.kind, member.rank) for member in engine.members.values()]
            assert 1 <= slot <= MAX_SLOT and 0 < len(parts) == len(set(parts)), (slot, parts)

    def _slot_for(self, hello: Hello) -> int:
        for slot, engine in self._engines.items():
            if engine.role is not hello.role:
                continue
            if engine.is_leaving:
                raise AttachRefused(
                    f"pool {self._pool}: the {engine.describe()} is leaving, its slabs come free when its "
                    f"processes have ended",
                    is_transient=True,
                )
            self._check_same_engine(engine, hello)
            return slot
        return next(slot for slot in range(1, MAX_SLOT + 1) if slot not in self._engines)

    def _check_same_engine(self, engine: _Engine, hello: Hello) -> None:
        if engine.engine_id != hello.engine_id:
            raise AttachRefused(
                f"pool {self._pool} already has a {engine.describe()}; stop it first, or give "
                f"{hello.engine_id!r} another pool"
            )
        if engine.world_size != hello.world_size:
            raise AttachRefused(
                f"the {engine.describe()} has world size {engine.world_size}, got {hello.world_size}"
            )
        if any((m.kind, m.rank) == (hello.kind, hello.rank) for m in engine.members.values()):
            part = f"{hello.kind} of rank {hello.rank}"
            raise AttachRefused(f"pool {self._pool}: the {engine.describe()} already has its {part}")

    def _slot_of(self, connection: int) -> int:
        return next(slot for slot, engine in self._engines.items() if connection in engine.members)
