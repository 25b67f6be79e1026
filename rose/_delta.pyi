from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.unsignedinteger[Any]]
Lanes = tuple[int, int]

NUM_STREAMS: int

class MalformedStream(ValueError):
    """A G8S stream is short, long, or points outside the array."""

def encode(old: Bits, new: Bits, first_index: int) -> tuple[tuple[bytes, ...], int, Lanes]:
    """The G8S streams of new - old, the number of changed elements, and the change of the state hash."""

def measure(base: Bits, streams: Sequence[bytes], first_index: int) -> tuple[int, Lanes]:
    """Number of changes and change of the state hash that apply() would make; writes nothing."""

def apply(base: Bits, streams: Sequence[bytes], first_index: int) -> tuple[int, Lanes]:
    """Adds the differences in place; raises MalformedStream before the first write."""

def state_hash(bits: Bits, first_index: int) -> Lanes:
    """Sum over elements of the hash of (global index, bits), two lanes modulo 2**64."""

def hash_change(places: NDArray[np.int64], old: Bits, new: Bits) -> Lanes:
    """Change of the state hash when the elements at these global indices go from old to new."""
