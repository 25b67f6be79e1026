"""The state hash: 128 bits that identify the exact contents of a set of weights.

Owns the value type and its arithmetic; the sums themselves run in rose._delta. The hash is independent of how
the elements are split over buckets or ranks: the hashes of the parts add up to the hash of the whole. Never
hashes names or shapes: the layout's digest does.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rose import _delta

_LANE = 1 << 64


@dataclass(frozen=True, slots=True)
class StateHash:
    """Two sums modulo 2**64 over all elements of mix(global index, raw bits)."""

    first: int = 0
    second: int = 0

    def __add__(self, other: Self) -> Self:
        return type(self)((self.first + other.first) % _LANE, (self.second + other.second) % _LANE)

    def __sub__(self, other: Self) -> Self:
        return type(self)((self.first - other.first) % _LANE, (self.second - other.second) % _LANE)

    def __str__(self) -> str:
        return f"{self.first:016x}{self.second:016x}"

    def to_bytes(self) -> bytes:
        """Returns 16 bytes, both lanes little-endian."""
        return self.first.to_bytes(8, "little") + self.second.to_bytes(8, "little")

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """Inverse of to_bytes(). Raises: ValueError."""
        if len(raw) != 16:
            raise ValueError(f"a state hash has 16 bytes, got {len(raw)}")
        return cls(int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little"))

    @classmethod
    def from_hex(cls, text: str) -> Self:
        """Inverse of str(). Raises: ValueError."""
        if len(text) != 32:
            raise ValueError(f"a state hash has 32 hex digits, got {text!r}")
        return cls(int(text[:16], 16), int(text[16:], 16))

    @classmethod
    def of(cls, bits: NDArray[np.unsignedinteger], first_index: int) -> Self:
        """Returns the hash of consecutive elements that start at a global index."""
        return cls(*_delta.state_hash(bits, first_index))
