"""The shared record of a pool: who owns which slab, which engines there are, and what the policy decided.

SlabTable (slab_table.py) has the slabs' words; this module has all others. Any number of schedulers and
workers and the daemon may use one ledger at once, without locks. It records who owns a slab, and does not
decide it.

From the first death among an engine's processes to the last, its slabs are *quarantined*: their words stay,
because a process that is left may still have them mapped, and the slot is marked.
"""

import mmap
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rose._shm import Words
from rose.errors import PoolError
from rose.memory.ledger.ledger_words import COUNTERS, MAGIC, SLOT_WORDS, VERSION, LedgerWord
from rose.memory.ledger.policy_word import PolicyState
from rose.memory.ledger.slab_table import SlabTable
from rose.memory.ledger.slab_word import MAX_SLOT, NO_SLOT, SlabState, decode
from rose.memory.slabs.backend import BackendKind
from rose.types import Role

_ROLES = (None, Role.SERVING, Role.ROLLOUT)
_SLOTS = range(1, MAX_SLOT + 1)
_BACKENDS = (BackendKind.HOST, BackendKind.CUDA)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSlot:
    """One engine known to the pool."""

    role: Role
    pid: int
    """Its scheduler's process; 0 until that has attached."""
    world_size: int
    is_leaving: bool = False
    """Whether one of its processes is gone or lost; its slabs are then quarantined until all are gone."""


class Ledger(SlabTable):
    """One process's view of the shared ledger. Usable from any thread."""

    def __init__(self, buffer: mmap.mmap) -> None:
        """Opens a formatted ledger in a writable mmap. Raises: PoolError for another layout."""
        words = Words(buffer)
        magic, version = words.load(LedgerWord.MAGIC), words.load(LedgerWord.VERSION)
        if (magic, version) != (MAGIC, VERSION):
            raise PoolError(
                f"ledger has layout {magic:#x} version {version}, but this rose knows {MAGIC:#x} version "
                f"{VERSION}: restart the pool daemon with this version"
            )
        super().__init__(buffer, words, words.load(LedgerWord.NUM_SLABS))
        self.slab_bytes = words.load(LedgerWord.SLAB_BYTES)
        self.headroom_slabs = words.load(LedgerWord.HEADROOM_SLABS)
        self.num_shards = words.load(LedgerWord.NUM_SHARDS)
        self.backend = _BACKENDS[words.load(LedgerWord.BACKEND)]
        # What is read of every slot in every step; one load after another would take 5 us. Each word is one
        # process's, and a sum of several is of about one moment either way.
        header = np.frombuffer(buffer, dtype=np.int64, count=LedgerWord.SLABS)
        slots = header[LedgerWord.SLOTS : LedgerWord.SLOTS + SLOT_WORDS * (MAX_SLOT + 1)]
        self._roles, self._leaving = slots[::SLOT_WORDS], slots[3::SLOT_WORDS]
        self._used, self._reserved, self._wanted = (
            header[first : first + MAX_SLOT + 1]
            for first in (LedgerWord.USED, LedgerWord.RESERVED, LedgerWord.WANTED)
        )

    @classmethod
    def create(
        cls,
        buffer: mmap.mmap,
        *,
        num_slabs: int,
        slab_bytes: int,
        headroom_slabs: int,
        num_shards: int = 1,
        backend: BackendKind = BackendKind.HOST,
    ) -> "Ledger":
        """Formats ``ledger_bytes(num_slabs)`` or more bytes of zeros; every slab starts FREE."""
        if num_slabs < 1 or not 0 <= headroom_slabs < num_slabs:
            raise ValueError(f"headroom_slabs must be 0..{num_slabs - 1}, got {headroom_slabs}")
        words = Words(buffer)
        words.store(LedgerWord.VERSION, VERSION)
        words.store(LedgerWord.NUM_SLABS, num_slabs)
        words.store(LedgerWord.SLAB_BYTES, slab_bytes)
        words.store(LedgerWord.HEADROOM_SLABS, headroom_slabs)
        words.store(LedgerWord.NUM_SHARDS, num_shards)
        words.store(LedgerWord.BACKEND, _BACKENDS.index(backend))
        words.store(LedgerWord.MAGIC, MAGIC)
        return cls(buffer)

    # Policy words --------------------------------------------------------------------------------

    @property
    def policy(self) -> PolicyState:
        """Budget, pressure and RL step, as one consistent reading."""
        return PolicyState.decode(self._words.load(LedgerWord.POLICY))

    def swap_policy(self, seen: PolicyState, new: PolicyState) -> bool:
        """Replaces the state that was read; returns False if it has changed meanwhile.

        The caller then has to decide again, because a cut that was computed from the last RL step's budget
        must not undo this step's. A change notifies.
        """
        if not self._words.cas(LedgerWord.POLICY, seen.encode(), new.encode()):
            return False
        if new != seen:
            self.notify()
        return True

    def begin_rl_step(self, rl_step: int, rollout_budget_slabs: int) -> None:
        """Sets a new RL step and its budget, which ends a freeze. Notifies."""
        new = PolicyState(rl_step=rl_step, rollout_budget_slabs=rollout_budget_slabs)
        while not self.swap_policy(self.policy, new):
            pass

    @property
    def serving_used_slabs(self) -> int:
        """Slabs that the serving engines' KV needs now."""
        return sum(self._used.tolist())

    @property
    def serving_reserve_slabs(self) -> int:
        """What rollout budgets leave to the serving engines beside the headroom."""
        return sum(self._reserved.tolist())

    def set_serving_use(self, slot: int, *, used: int, reserved: int) -> None:
        """Sets a serving engine's part of these two. It is set in every serving step, so it doesn't
        notify."""
        self._words.store(LedgerWord.USED + slot, used)
        self._words.store(LedgerWord.RESERVED + slot, reserved)

    def want(self, slot: int, num_slabs: int) -> None:
        """Sets how many slabs an engine wants to own, which it may; 0 if it lacks none.

        Notifies if engines now lack more slabs than are free or on their way: serving has to give.
        """
        is_more = num_slabs > self._words.load(LedgerWord.WANTED + slot)
        self._words.store(LedgerWord.WANTED + slot, num_slabs)
        if is_more and self._lacking(_SLOTS) > self.num_free + self.num_draining:
            self.notify()

    @property
    def rollout_lacks(self) -> int:
        """How many of the slabs that they want the rollout engines don't own."""
        return self._lacking(self.slots_of(Role.ROLLOUT))

    @property
    def serving_lacks(self) -> int:
        """How many of the slabs without which their requests wait the serving engines don't own."""
        return self._lacking(self.slots_of(Role.SERVING))

    def others_lack(self, slot: int) -> int:
        """Returns how many of the slabs that they want the engines in other slots don't own."""
        return self._lacking(other for other in _SLOTS if other != slot)

    def _lacking(self, slots: Iterable[int]) -> int:
        wanted = self._wanted.tolist()
        return sum(max(0, wanted[slot] - self.num_owned(slot)) for slot in slots if wanted[slot])

    def count(self, counter: LedgerWord, increment: int = 1) -> int:
        """Adds to one of ``COUNTERS`` and returns the new value; an increment of 0 reads it."""
        if counter not in COUNTERS:
            raise ValueError(f"{counter.name} is not a counter")
        return self._words.add(counter, increment)

    # Engines -------------------------------------------------------------------------------------

    def engines(self) -> dict[int, EngineSlot]:
        """Returns the engines attached to the pool, by slot."""
        found: dict[int, EngineSlot] = {}
        for slot in _SLOTS:
            at = LedgerWord.SLOTS + slot * SLOT_WORDS
            role = _ROLES[self._words.load(at)]
            if role is not None:
                pid, world_size, is_leaving = (self._words.load(at + part) for part in (1, 2, 3))
                found[slot] = EngineSlot(
                    role=role, pid=pid, world_size=world_size, is_leaving=bool(is_leaving)
                )
        return found

    def slots_of(self, role: Role) -> list[int]:
        """Returns the slots of the engines of a role."""
        number = _ROLES.index(role)
        return [slot for slot, one in enumerate(self._roles.tolist()) if one == number]

    def set_engine(self, slot: int, engine: EngineSlot | None) -> None:
        """Records the engine in a slot, None for an empty one. For the daemon alone."""
        self._check_slot(slot)
        at = LedgerWord.SLOTS + slot * SLOT_WORDS
        if engine is not None:
            self._words.store(at + 1, engine.pid)
            self._words.store(at + 2, engine.world_size)
            self._store_and_notify(at + 3, int(engine.is_leaving))
        self._store_and_notify(at, _ROLES.index(engine.role if engine is not None else None))

    def vacate(self, slot: int) -> int:
        """Frees an engine's slabs and its slot; returns how many slabs came free. For the daemon, as
        force_free."""
        # Nothing else resets them, and the others would leave alone memory that nobody uses.
        self.set_serving_use(slot, used=0, reserved=0)
        self._words.store(LedgerWord.WANTED + slot, 0)
        num_freed = len(self.force_free(slot))
        self.count(LedgerWord.EXIT_FREED_SLABS, num_freed)
        self.set_engine(slot, None)
        return num_freed

    def num_held(self, role: Role) -> int:
        """Slabs that the engines of a role own."""
        return sum(map(self.num_owned, self.slots_of(role)))

    @property
    def num_quarantined(self) -> int:
        """Slabs of engines that are leaving; they come free when the engine's last process has ended."""
        if not self._leaving.any():
            return 0
        leaving = [slot for slot, engine in self.engines().items() if engine.is_leaving]
        return sum(self.count_matching(0xFF00, slot << 8) for slot in leaving)

    # Integrity -----------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Checks that every word has a meaning, also while others work. Raises: PoolError naming the slab."""
        before = self.engines().keys()
        words = self._slabs.tolist()
        # An engine may attach or leave during the check; either sighting vouches for its slabs.
        known = before | self.engines().keys()
        for slab, word in enumerate(words):
            try:
                entry = decode(word)
            except ValueError as error:
                raise PoolError(f"slab {slab}: word {word:#x} has no state") from error
            has_owner = entry.slot in known if entry.state is not SlabState.FREE else entry.slot == NO_SLOT
            is_pending = entry.num_pending > 0
            if not has_owner or is_pending != (entry.state is SlabState.DRAINING) or entry.epoch < 0:
                raise PoolError(f"slab {slab}: {entry} is invalid; the engine slots are {sorted(known)}")

    def _store_and_notify(self, index: int, value: int) -> None:
        if self._words.load(index) != value:
            self._words.store(index, value)
            self.notify()
