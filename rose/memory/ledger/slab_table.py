"""The words of a pool's slabs, which many processes change at once.

Every change of a slab's state is here, and so is the change sequence that tells others about it. A state
changes by one compare-and-swap, so a process that is killed at any instruction leaves the table whole.

A slab exists once in each shard of the pool, that is once per rank of an engine, on that rank's GPU. It
has one word all the same: it is acquired on all shards at once, and comes free when every rank has unmapped
its part.

    FREE --acquire(slot)--> OWNED(slot) --drain(n ranks)--> DRAINING(n) --release() by each rank--> FREE
      ^------------ force_free(slot), by the daemon, once every process of the engine is gone -----------'
"""

import mmap
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from rose._shm import Words
from rose.errors import PoolError
from rose.memory.ledger.ledger_words import WORD_BYTES, LedgerWord
from rose.memory.ledger.slab_word import MAX_RANKS, MAX_SLOT, NO_SLOT, SlabEntry, SlabState, decode, encode


class SlabTable:
    """One process's view of the slabs' words in the ledger's memory. Usable from any thread."""

    def __init__(self, buffer: mmap.mmap, words: Words, num_slabs: int) -> None:
        """``words`` is the whole ledger in ``buffer``. Raises: PoolError if it can't hold that many slabs."""
        if len(words) < LedgerWord.SLABS + num_slabs:
            raise PoolError(f"ledger of {len(words)} words can't hold {num_slabs} slabs")
        self.num_slabs = num_slabs
        self._words = words
        # A scan of 2,048 slabs takes 5 us; through Words each word takes 0.1 us. What a scan sees may be
        # stale, so every change still goes through a compare-and-swap.
        self._slabs: npt.NDArray[np.int64] = np.frombuffer(
            buffer, dtype=np.int64, count=num_slabs, offset=LedgerWord.SLABS * WORD_BYTES
        )

    def acquire(self, slot: int, count: int) -> list[int]:
        """Takes up to ``count`` free slabs for an engine, lowest first, and returns them."""
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
        return taken

    def drain(self, slabs: Iterable[int], num_ranks: int) -> None:
        """Starts to give OWNED slabs back; each is free once ``num_ranks`` ranks have released it.

        With 0 ranks, for slabs that no worker has mapped, they are free at once.
        Raises: PoolError if a slab isn't OWNED.
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
        """Says that one rank has unmapped a DRAINING slab; returns whether the slab is FREE by that.

        Raises: PoolError if the slab isn't DRAINING.
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
        """Frees all slabs of an engine. For the daemon alone, once no process of that engine is left."""
        self._check_slot(slot)
        freed: list[int] = []
        for slab in self._matching(0xFF00, slot << 8):
            word = self._load(slab)
            if self._swap(slab, word, SlabState.FREE, NO_SLOT, 0, (word >> 32) + 1):
                freed.append(slab)
        self.notify()
        return freed

    def entry(self, slab: int) -> SlabEntry:
        """Returns one slab's state."""
        return decode(self._load(slab))

    @property
    def num_free(self) -> int:
        """Slabs that any engine may acquire."""
        return self.count_matching(0xFF, SlabState.FREE)

    @property
    def num_draining(self) -> int:
        """Slabs that are being given back."""
        return self.count_matching(0xFF, SlabState.DRAINING)

    def num_owned(self, slot: int) -> int:
        """Slabs that an engine owns, without those it is giving back."""
        return self.count_matching(0xFFFF, slot << 8 | SlabState.OWNED)

    def num_giving(self, slot: int) -> int:
        """Slabs that an engine is giving back."""
        return self.count_matching(0xFFFF, slot << 8 | SlabState.DRAINING)

    def owned(self, slot: int) -> list[int]:
        """Returns the slabs behind :meth:`num_owned`, ascending."""
        return self._matching(0xFFFF, slot << 8 | SlabState.OWNED)

    def count_matching(self, mask: int, value: int) -> int:
        """Returns the number of slabs whose word has ``value`` under ``mask``."""
        return self._words.count(LedgerWord.SLABS, self.num_slabs, mask, value)

    # Change notification -------------------------------------------------------------------------

    @property
    def change_seq(self) -> int:
        """A number that grows with every change that another process may wait for."""
        return self._words.load(LedgerWord.CHANGE_SEQ)

    def notify(self) -> None:
        """Wakes every process in :meth:`wait_change`."""
        self._words.add(LedgerWord.CHANGE_SEQ, 1)
        self._words.wake(LedgerWord.CHANGE_SEQ)

    def wait_change(self, seen: int, timeout_s: float) -> int:
        """Sleeps until ``change_seq`` differs from ``seen``, or until the timeout; returns its value then.

        It may return early, with ``seen`` itself. Releases the GIL.
        """
        self._words.wait(LedgerWord.CHANGE_SEQ, seen, timeout_s)
        return self.change_seq

    def _check_slot(self, slot: int) -> None:
        if not 1 <= slot <= MAX_SLOT:
            raise ValueError(f"engine slot must be 1..{MAX_SLOT}, got {slot}")

    def _load(self, slab: int) -> int:
        if not 0 <= slab < self.num_slabs:
            raise ValueError(f"slab must be 0..{self.num_slabs - 1}, got {slab}")
        return self._words.load(LedgerWord.SLABS + slab)

    def _swap(self, slab: int, old: int, state: SlabState, slot: int, num_pending: int, epoch: int) -> bool:
        return self._words.cas(LedgerWord.SLABS + slab, old, encode(state, slot, num_pending, epoch))

    def _matching(self, mask: int, value: int) -> list[int]:
        slabs: list[int] = np.flatnonzero((self._slabs & mask) == value).tolist()
        return slabs
