"""The shared record of who owns which slab.

Owns the layout of the ledger memory and every change of a slab's state. Promises that any number of
schedulers, workers and the daemon may use one ledger at once without locks: a state changes by one
compare-and-swap, so a process killed at any instruction leaves a ledger that is whole.
Never maps memory, and never decides who should own a slab.

A slab exists once per shard of the pool, that is once per tensor-parallel rank, each on its own GPU. It has
one word all the same: a slab is acquired on all shards at once, and comes free when every rank has unmapped
its part.

    FREE --acquire(slot)--> OWNED(slot) --drain(n ranks)--> DRAINING(n) --release() by each rank--> FREE
      ^------------ force_free(slot), by the daemon, once every process of the engine is gone -----------'

From the first death among an engine's processes to the last one, its slabs are *quarantined*: the words stay
as they are, as a process that is left may still have them mapped, and the slot is marked.

Words (int64):
    [0, 8)     header: magic, version, sizes          [32, 96)   engine slots, 4 words each
    [8, 16)    change sequence, on its own cache line  [96, 128)  unused
    [16, 24)   policy                                  [128, ..)  one word per slab:
    [24, 32)   counters                                see rose/memory/slab_word.py
"""

import mmap
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from rose._shm import Words
from rose.errors import PoolError, PoolExhausted
from rose.memory.backend import BackendKind
from rose.memory.slab_word import MAX_RANKS, MAX_SLOT, NO_SLOT, SlabEntry, SlabState, decode, encode
from rose.types import Role

MAGIC = 0x524F53454C454447  # "ROSELEDG"
VERSION = 3
WORD_BYTES = 8

_SLOT_WORDS = 4


class Word(IntEnum):
    """Index of each word below the slabs."""

    MAGIC = 0
    VERSION = 1
    NUM_SLABS = 2
    SLAB_BYTES = 3
    HEADROOM_SLABS = 4
    NUM_SHARDS = 5
    BACKEND = 6
    CHANGE_SEQ = 8
    POLICY = 16
    SERVING_USED = 17
    SERVING_RECENT_PEAK = 18
    CUTS = 24
    RECLAIMED_REQUESTS = 25
    EXPIRED_LEASES = 26
    EXIT_FREED_SLABS = 27
    SLOTS = 32
    SLABS = 128


class Pressure(IntEnum):
    """State of the memory policy (ROSE §4.1): see rose/memory/policy.py."""

    NORMAL = 0
    PRESSURE = 1
    FROZEN = 2


COUNTERS = (Word.CUTS, Word.RECLAIMED_REQUESTS, Word.EXPIRED_LEASES, Word.EXIT_FREED_SLABS)
_ROLES = (None, Role.SERVING, Role.ROLLOUT)
_BACKENDS = (BackendKind.HOST, BackendKind.CUDA)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """What the memory policy decided last. Read and written as one word, so no half of it is ever stale."""

    rl_step: int = 0
    rollout_budget_slabs: int = 0
    pressure: Pressure = Pressure.NORMAL

    def encode(self) -> int:
        if not 0 <= self.rl_step < 1 << 31 or not 0 <= self.rollout_budget_slabs < 1 << 24:
            raise ValueError(
                f"rl_step {self.rl_step} and rollout_budget_slabs {self.rollout_budget_slabs} must be >= 0 "
                f"and below 2**31 and 2**24"
            )
        return self.rl_step << 32 | self.rollout_budget_slabs << 8 | self.pressure

    @classmethod
    def decode(cls, word: int) -> "PolicyState":
        return cls(
            rl_step=word >> 32, rollout_budget_slabs=word >> 8 & 0xFF_FFFF, pressure=Pressure(word & 0xFF)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSlot:
    """One engine known to the pool."""

    role: Role
    pid: int
    """Its scheduler's process, 0 until that one attached."""
    world_size: int
    is_leaving: bool = False
    """One of its processes is gone or out of touch: its slabs are quarantined until all are gone."""


def ledger_bytes(num_slabs: int) -> int:
    """Bytes that a ledger of ``num_slabs`` takes."""
    return (Word.SLABS + num_slabs) * WORD_BYTES


class Ledger:
    """One process's view of the shared ledger. Usable from any thread."""

    def __init__(self, buffer: mmap.mmap) -> None:
        """Opens a formatted ledger over a writable mmap. Raises: PoolError for another layout."""
        self._words = Words(buffer)
        magic, version = self._words.load(Word.MAGIC), self._words.load(Word.VERSION)
        if (magic, version) != (MAGIC, VERSION):
            raise PoolError(
                f"ledger has layout {magic:#x} version {version}, this rose knows {MAGIC:#x} version "
                f"{VERSION}: restart the pool daemon with this version"
            )
        self.num_slabs = self._words.load(Word.NUM_SLABS)
        self.slab_bytes = self._words.load(Word.SLAB_BYTES)
        self.headroom_slabs = self._words.load(Word.HEADROOM_SLABS)
        self.num_shards = self._words.load(Word.NUM_SHARDS)
        self.backend = _BACKENDS[self._words.load(Word.BACKEND)]
        if len(self._words) < Word.SLABS + self.num_slabs:
            raise PoolError(f"ledger of {len(self._words)} words can't hold {self.num_slabs} slabs")
        # Scans take 5 us for 2,048 slabs, against 0.1 us a word through Words. What they see may be stale, so
        # every change still goes through a compare-and-swap.
        self._slabs: npt.NDArray[np.int64] = np.frombuffer(
            buffer, dtype=np.int64, count=self.num_slabs, offset=Word.SLABS * WORD_BYTES
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
        """Formats zeroed memory of ``ledger_bytes(num_slabs)`` or more; every slab starts FREE."""
        if num_slabs < 1 or not 0 <= headroom_slabs < num_slabs:
            raise ValueError(f"headroom_slabs {headroom_slabs} must be >= 0 and below num_slabs {num_slabs}")
        words = Words(buffer)
        words.store(Word.VERSION, VERSION)
        words.store(Word.NUM_SLABS, num_slabs)
        words.store(Word.SLAB_BYTES, slab_bytes)
        words.store(Word.HEADROOM_SLABS, headroom_slabs)
        words.store(Word.NUM_SHARDS, num_shards)
        words.store(Word.BACKEND, _BACKENDS.index(backend))
        words.store(Word.MAGIC, MAGIC)
        return cls(buffer)

    # Slabs ---------------------------------------------------------------------------------------

    def acquire(self, slot: int, count: int, *, all_or_nothing: bool = False) -> list[int]:
        """Takes up to ``count`` free slabs for an engine, lowest first.

        Raises: PoolExhausted with all_or_nothing where fewer are free; nothing is taken then.
        """
        self._check_slot(slot)
        if count < 0:
            raise ValueError(f"can't acquire {count} slabs")
        taken: list[int] = []
        while len(taken) < count:
            free = self._matching(0xFF, SlabState.FREE)
            if not free:
                break
            for slab in free:
                if len(taken) == count:
                    break
                word = self._load(slab)
                epoch = word >> 32
                if word & 0xFF == SlabState.FREE and self._swap(slab, word, SlabState.OWNED, slot, 0, epoch):
                    taken.append(slab)
        if all_or_nothing and len(taken) < count:
            self.drain(taken, 0)
            raise PoolExhausted(f"need {count} slabs, {len(taken)} free of {self.num_slabs}")
        return taken

    def drain(self, slabs: Iterable[int], num_ranks: int) -> None:
        """Starts giving OWNED slabs back: each is free once ``num_ranks`` ranks released it.

        With 0 ranks, for slabs that no worker ever mapped, they are free at once.
        Raises: PoolError where a slab isn't OWNED.
        """
        if not 0 <= num_ranks <= MAX_RANKS:
            raise ValueError(f"num_ranks must be 0..{MAX_RANKS}, got {num_ranks}")
        for slab in slabs:
            word = self._load(slab)
            entry = decode(word)
            if num_ranks > 0:
                target = (SlabState.DRAINING, entry.slot, num_ranks, entry.epoch)
            else:
                target = (SlabState.FREE, NO_SLOT, 0, entry.epoch + 1)
            if entry.state is not SlabState.OWNED or not self._swap(slab, word, *target):
                raise PoolError(f"slab {slab}: can't drain, it is {decode(self._load(slab))}")
        if num_ranks == 0:
            self.notify()

    def release(self, slab: int) -> bool:
        """One rank has unmapped a DRAINING slab; True if it was the last one, so the slab is FREE now.

        Raises: PoolError where the slab isn't DRAINING.
        """
        while True:
            word = self._load(slab)
            entry = decode(word)
            if entry.state is not SlabState.DRAINING:
                raise PoolError(f"slab {slab}: can't release, it is {entry}")
            if entry.num_pending > 1:
                left = (SlabState.DRAINING, entry.slot, entry.num_pending - 1, entry.epoch)
                if self._swap(slab, word, *left):
                    return False
            elif self._swap(slab, word, SlabState.FREE, NO_SLOT, 0, entry.epoch + 1):
                self.notify()
                return True

    def force_free(self, slot: int) -> list[int]:
        """Frees all slabs of an engine. Only for the daemon, once no process of that engine is left."""
        self._check_slot(slot)
        freed: list[int] = []
        for slab in self._matching(0xFF00, slot << 8):
            word = self._load(slab)
            if self._swap(slab, word, SlabState.FREE, NO_SLOT, 0, (word >> 32) + 1):
                freed.append(slab)
        self.notify()
        return freed

    def entry(self, slab: int) -> SlabEntry:
        """One slab's state."""
        return decode(self._load(slab))

    @property
    def num_free(self) -> int:
        """Slabs that anybody may acquire."""
        return int(np.count_nonzero((self._slabs & 0xFF) == SlabState.FREE))

    @property
    def num_draining(self) -> int:
        """Slabs on their way back."""
        return int(np.count_nonzero((self._slabs & 0xFF) == SlabState.DRAINING))

    @property
    def num_quarantined(self) -> int:
        """Slabs of engines that are leaving: they come free when the last process of each has ended."""
        leaving = [slot for slot, engine in self.engines().items() if engine.is_leaving]
        return sum(int(np.count_nonzero((self._slabs & 0xFF00) == slot << 8)) for slot in leaving)

    def num_owned(self, slot: int) -> int:
        """Slabs that an engine owns, without those it is giving back."""
        return int(np.count_nonzero((self._slabs & 0xFFFF) == (slot << 8 | SlabState.OWNED)))

    def owned(self, slot: int) -> list[int]:
        """The slabs behind :meth:`num_owned`, ascending."""
        return self._matching(0xFFFF, slot << 8 | SlabState.OWNED)

    # Policy words --------------------------------------------------------------------------------

    @property
    def policy(self) -> PolicyState:
        """Budget, pressure and RL step, as one consistent reading."""
        return PolicyState.decode(self._words.load(Word.POLICY))

    def swap_policy(self, seen: PolicyState, new: PolicyState) -> bool:
        """Replaces what was read; False if somebody else changed it meanwhile, e.g. began a new RL step.

        Decide again then: a cut computed from the last step's budget must not undo this step's. A change
        notifies.
        """
        if not self._words.cas(Word.POLICY, seen.encode(), new.encode()):
            return False
        if new != seen:
            self.notify()
        return True

    def begin_rl_step(self, rl_step: int, rollout_budget_slabs: int) -> None:
        """A new RL step with its budget, whatever was before; ends a freeze. Notifies."""
        new = PolicyState(rl_step=rl_step, rollout_budget_slabs=rollout_budget_slabs)
        while not self.swap_policy(self.policy, new):
            pass

    @property
    def serving_used_slabs(self) -> int:
        """Slabs that serving's KV needs now. Written every serving step, so setting doesn't notify."""
        return self._words.load(Word.SERVING_USED)

    @serving_used_slabs.setter
    def serving_used_slabs(self, value: int) -> None:
        self._words.store(Word.SERVING_USED, value)

    @property
    def serving_recent_peak_slabs(self) -> int:
        """Maximum of the above over serving's window. Setting doesn't notify."""
        return self._words.load(Word.SERVING_RECENT_PEAK)

    @serving_recent_peak_slabs.setter
    def serving_recent_peak_slabs(self, value: int) -> None:
        self._words.store(Word.SERVING_RECENT_PEAK, value)

    def count(self, counter: Word, increment: int = 1) -> int:
        """Adds to one of ``COUNTERS``; returns the new value (``increment=0`` reads it)."""
        if counter not in COUNTERS:
            raise ValueError(f"{counter.name} is not a counter")
        return self._words.add(counter, increment)

    # Change notification -------------------------------------------------------------------------

    @property
    def change_seq(self) -> int:
        """Grows with every change that another process may wait for."""
        return self._words.load(Word.CHANGE_SEQ)

    def notify(self) -> None:
        """Wakes everybody in :meth:`wait_change`."""
        self._words.add(Word.CHANGE_SEQ, 1)
        self._words.wake(Word.CHANGE_SEQ)

    def wait_change(self, seen: int, timeout_s: float) -> int:
        """Sleeps until ``change_seq`` differs from ``seen`` or the timeout; returns its value then.

        May return early with ``seen`` itself. Releases the GIL.
        """
        self._words.wait(Word.CHANGE_SEQ, seen, timeout_s)
        return self.change_seq

    # Engines -------------------------------------------------------------------------------------

    def engines(self) -> dict[int, EngineSlot]:
        """The engines attached to the pool, by slot."""
        found: dict[int, EngineSlot] = {}
        for slot in range(1, MAX_SLOT + 1):
            at = Word.SLOTS + slot * _SLOT_WORDS
            role = _ROLES[self._words.load(at)]
            if role is not None:
                pid, world_size, is_leaving = (self._words.load(at + part) for part in (1, 2, 3))
                found[slot] = EngineSlot(
                    role=role, pid=pid, world_size=world_size, is_leaving=bool(is_leaving)
                )
        return found

    def set_engine(self, slot: int, engine: EngineSlot | None) -> None:
        """Records who sits in a slot, None for nobody. Only for the daemon."""
        self._check_slot(slot)
        at = Word.SLOTS + slot * _SLOT_WORDS
        if engine is not None:
            self._words.store(at + 1, engine.pid)
            self._words.store(at + 2, engine.world_size)
            self._store_and_notify(at + 3, int(engine.is_leaving))
        self._store_and_notify(at, _ROLES.index(engine.role if engine is not None else None))

    # Integrity -----------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Every word means something. Safe while others work. Raises: PoolError naming the slab."""
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
                raise PoolError(f"slab {slab}: {entry} can't be, engine slots are {sorted(known)}")

    def _check_slot(self, slot: int) -> None:
        if not 1 <= slot <= MAX_SLOT:
            raise ValueError(f"engine slot must be 1..{MAX_SLOT}, got {slot}")

    def _load(self, slab: int) -> int:
        if not 0 <= slab < self.num_slabs:
            raise ValueError(f"slab {slab} of {self.num_slabs}")
        return self._words.load(Word.SLABS + slab)

    def _swap(self, slab: int, old: int, state: SlabState, slot: int, num_pending: int, epoch: int) -> bool:
        return self._words.cas(Word.SLABS + slab, old, encode(state, slot, num_pending, epoch))

    def _matching(self, mask: int, value: int) -> list[int]:
        slabs: list[int] = np.flatnonzero((self._slabs & mask) == value).tolist()
        return slabs

    def _store_and_notify(self, index: int, value: int) -> None:
        if self._words.load(index) != value:
            self._words.store(index, value)
            self.notify()
