"""Where each int64 word of the ledger lies, and the version of this layout.

[0, 8)     header: magic, version, sizes           [32, 96)   engine slots, 4 words each
[8, 16)    change sequence, on its own cache line  [96, 144)  what engines use, reserve and want, by slot
[16, 24)   policy: see rose/memory/ledger/policy_word.py  [144, ..)  one word per slab:
[24, 32)   counters                                           see rose/memory/ledger/slab_word.py
"""

from enum import IntEnum

MAGIC = 0x524F53454C454447  # "ROSELEDG"
VERSION = 5
WORD_BYTES = 8
SLOT_WORDS = 4


class LedgerWord(IntEnum):
    """The index of each word before the slabs."""

    MAGIC = 0
    VERSION = 1
    NUM_SLABS = 2
    SLAB_BYTES = 3
    HEADROOM_SLABS = 4
    NUM_SHARDS = 5
    BACKEND = 6
    CHANGE_SEQ = 8
    POLICY = 16
    CUTS = 24
    RECLAIMED_REQUESTS = 25
    EXPIRED_LEASES = 26
    EXIT_FREED_SLABS = 27
    SLOTS = 32
    USED = 96
    RESERVED = 112
    WANTED = 128
    SLABS = 144


COUNTERS = (
    LedgerWord.CUTS,
    LedgerWord.RECLAIMED_REQUESTS,
    LedgerWord.EXPIRED_LEASES,
    LedgerWord.EXIT_FREED_SLABS,
)


def ledger_bytes(num_slabs: int) -> int:
    """Returns the bytes that a ledger of ``num_slabs`` slabs takes."""
    return (LedgerWord.SLABS + num_slabs) * WORD_BYTES
