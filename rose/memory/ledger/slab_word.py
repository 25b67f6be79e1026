"""One slab's word in the ledger, and what it means.

The encoding is epoch << 32 | pending << 16 | slot << 8 | state.
"""

from dataclasses import dataclass
from enum import IntEnum

NO_SLOT = 0
MAX_SLOT = 15
MAX_RANKS = 0xFFFF
_EPOCH_MASK = 0x7FFF_FFFF


class SlabState(IntEnum):
    """What a slab is doing."""

    FREE = 0
    OWNED = 1
    DRAINING = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabEntry:
    """One slab's word, decoded."""

    state: SlabState
    slot: int
    """The engine that holds it; ``NO_SLOT`` if none does."""
    num_pending: int
    """The ranks that have not released it yet."""
    epoch: int
    """The number of times it has come free, modulo 2**31."""

    def __str__(self) -> str:
        return f"{self.state.name} slot={self.slot} pending={self.num_pending} epoch={self.epoch}"


def encode(state: SlabState, slot: int, num_pending: int, epoch: int) -> int:
    """Makes the word of an entry; the epoch wraps."""
    return (epoch & _EPOCH_MASK) << 32 | num_pending << 16 | slot << 8 | state


def decode(word: int) -> SlabEntry:
    """Reads a word. Raises: ValueError for a word without a state."""
    return SlabEntry(
        state=SlabState(word & 0xFF),
        slot=word >> 8 & 0xFF,
        num_pending=word >> 16 & 0xFFFF,
        epoch=word >> 32,
    )
