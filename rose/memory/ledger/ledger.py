"""The shared record of a pool: who owns which slab, which engines there are, and what the policy decided.

SlabTable (slab_table.py) has the slabs' words; this module has all others. Any number of schedulers and
workers and the daemon may use one ledger at once, without locks. It records who owns a slab, and does not
decide it.

From the first death among an engine's processes to the last, its slabs are *quarantined*: their words stay,
because a process that is left may still have them mapped, and the slot is marked.
"""

import mmap
from dataclasses import dataclass

import numpy as np

from rose._shm import Words
from rose.errors import PoolError
from rose.memory.ledger.ledger_words import COUNTERS, MAGIC, SLOT_WORDS, VERSION, Word
from rose.memory.ledger.policy_word import PolicyState
from rose.memory.ledger.slab_table import SlabTable
from rose.memory.ledger.slab_word import MAX_SLOT, NO_SLOT, SlabState, decode
from rose.memory.slabs.backend import BackendKind
from rose.types import Role

_ROLES = (None, Role.SERVING, Role.ROLLOUT)
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
        magic, version = words.load(Word.MAGIC), words.load(Word.VERSION)
        if (magic, version) != (MAGIC, VERSION):
            raise PoolError(
                f"ledger has layout {magic:#x} version {version}, but this rose knows {MAGIC:#x} version "
                f"{VERSION}: restart the pool daemon with this version"
            )
        super().__init__(buffer, words, words.load(Word.NUM_SLABS))
        self.slab_bytes = words.load(Word.SLAB_BYTES)
        self.headroom_slabs = words.load(Word.HEADROOM_SLABS)
        self.num_shards = words.load(Word.NUM_SHARDS)
        self.backend = _BACKENDS[words.load(Word.BACKEND)]

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
        words.store(Word.VERSION, VERSION)
        words.store(Word.NUM_SLABS, num_slabs)
        words.store(Word.SLAB_BYTES, slab_bytes)
        words.store(Word.HEADROOM_SLABS, headroom_slabs)
        words.store(Word.NUM_SHARDS, num_shards)
        words.store(Word.BACKEND, _BACKENDS.index(backend))
        words.store(Word.MAGIC, MAGIC)
        return cls(buffer)

    # Policy words --------------------------------------------------------------------------------

    @property
    def policy(self) -> PolicyState:
        """Budget, pressure and RL step, as one consistent reading."""
        return PolicyState.decode(self._words.load(Word.POLICY))

    def swap_policy(self, seen: PolicyState, new: PolicyState) -> bool:
        """Replaces the state that was read; returns False if it has changed meanwhile.

        The caller then has to decide again: a cut that was computed from the last RL step's budget must not
        undo this step's. A change notifies.
        """
        if not self._words.cas(Word.POLICY, seen.encode(), new.encode()):
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
        """Slabs that serving's KV needs now. It is set in every serving step, so setting it doesn't
        notify."""
        return self._words.load(Word.SERVING_USED)

    @serving_used_slabs.setter
    def serving_used_slabs(self, value: int) -> None:
        self._words.store(Word.SERVING_USED, value)

    @property
    def serving_reserve_slabs(self) -> int:
        """What rollout budgets leave to serving beside the headroom. Setting it doesn't notify."""
        return self._words.load(Word.SERVING_RESERVE)

    @serving_reserve_slabs.setter
    def serving_reserve_slabs(self, value: int) -> None:
        self._words.store(Word.SERVING_RESERVE, value)

    @property
    def rollout_wanted_slabs(self) -> int:
        """How many slabs rollout wants to own, which it may by its budget."""
        return self._words.load(Word.ROLLOUT_WANTED)

    @rollout_wanted_slabs.setter
    def rollout_wanted_slabs(self, value: int) -> None:
        """Notifies if rollout now lacks more slabs than are free or on their way: serving has to give."""
        is_more = value > self._words.load(Word.ROLLOUT_WANTED)
        self._words.store(Word.ROLLOUT_WANTED, value)
        if is_more and self.rollout_lacks > self.num_free + self.num_draining:
            self.notify()

    @property
    def rollout_lacks(self) -> int:
        """How many of the slabs that it wants rollout doesn't own."""
        wanted = self.rollout_wanted_slabs
        return max(0, wanted - self.num_held(Role.ROLLOUT)) if wanted else 0

    def count(self, counter: Word, increment: int = 1) -> int:
        """Adds to one of ``COUNTERS`` and returns the new value; an increment of 0 reads it."""
        if counter not in COUNTERS:
            raise ValueError(f"{counter.name} is not a counter")
        return self._words.add(counter, increment)

    # Engines -------------------------------------------------------------------------------------

    def engines(self) -> dict[int, EngineSlot]:
        """The engines attached to the pool, by slot."""
        found: dict[int, EngineSlot] = {}
        for slot in range(1, MAX_SLOT + 1):
            at = Word.SLOTS + slot * SLOT_WORDS
            role = _ROLES[self._words.load(at)]
            if role is not None:
                pid, world_size, is_leaving = (self._words.load(at + part) for part in (1, 2, 3))
                found[slot] = EngineSlot(
                    role=role, pid=pid, world_size=world_size, is_leaving=bool(is_leaving)
                )
        return found

    def set_engine(self, slot: int, engine: EngineSlot | None) -> None:
        """Records the engine in a slot, None for an empty one. For the daemon alone."""
        self._check_slot(slot)
        at = Word.SLOTS + slot * SLOT_WORDS
        if engine is not None:
            self._words.store(at + 1, engine.pid)
            self._words.store(at + 2, engine.world_size)
            self._store_and_notify(at + 3, int(engine.is_leaving))
        self._store_and_notify(at, _ROLES.index(engine.role if engine is not None else None))

    def vacate(self, slot: int) -> int:
        """Frees an engine's slabs and its slot; returns how many slabs came free. For the daemon, as
        force_free."""
        # Nothing else resets them, and each side would leave alone memory that nobody uses.
        if self.engines()[slot].role is Role.SERVING:
            self.serving_used_slabs = 0
            self.serving_reserve_slabs = 0
        else:
            self.rollout_wanted_slabs = 0
        num_freed = len(self.force_free(slot))
        self.count(Word.EXIT_FREED_SLABS, num_freed)
        self.set_engine(slot, None)
        return num_freed

    def num_held(self, role: Role) -> int:
        """Slabs that the engines of a role own."""
        return sum(self.num_owned(slot) for slot, one in self.engines().items() if one.role is role)

    @property
    def num_quarantined(self) -> int:
        """Slabs of engines that are leaving; they come free when the engine's last process has ended."""
        leaving = [slot for slot, engine in self.engines().items() if engine.is_leaving]
        return sum(int(np.count_nonzero((self._slabs & 0xFF00) == slot << 8)) for slot in leaving)

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
                raise PoolError(f"slab {slab}: {entry} can't be, the engine slots are {sorted(known)}")

    def _store_and_notify(self, index: int, value: int) -> None:
        if self._words.load(index) != value:
            self._words.store(index, value)
            self.notify()
