from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.unsignedinteger[Any]]
Lanes = tuple[int, int]

INTERFACE: int
NUM_G8S_STREAMS: int
NUM_EXPONENT_STREAMS: int

class MalformedStream(ValueError):
    """A stream is short, long, or points outside the array."""

class Delta:
    """The wrap difference new - old of two vectors of raw bits, in memory: places and differences."""

    @staticmethod
    def between(old: Bits, new: Sequence[Bits], first_index: int) -> tuple[Delta, Lanes]:
        """Returns the difference from `old` to `new`, which may lie in pieces, and the change of the state
        hash.
        """

    @staticmethod
    def follow(kept: Bits, new: Sequence[Bits], first_index: int) -> tuple[Delta, Lanes]:
        """Does what between() does, and in the same pass `kept` becomes `new`. Raises: ValueError before it
        writes.
        """

    @staticmethod
    def from_g8s(streams: Sequence[bytes], num_elements: int, width: int) -> Delta:
        """Inverse of g8s(). Raises: MalformedStream."""

    @staticmethod
    def from_coo(payload: bytes, num_elements: int, width: int) -> Delta:
        """Inverse of coo(). Raises: MalformedStream."""

    @staticmethod
    def from_exponents(streams: Sequence[bytes], base: Bits) -> Delta:
        """Inverse of exponents() for the same base. Raises: MalformedStream."""

    @staticmethod
    def from_parts(
        counts: NDArray[np.uint32], places: NDArray[np.uint16], differences: Bits, num_elements: int
    ) -> Delta:
        """Inverse of parts(). Raises: MalformedStream."""

    def parts(self) -> tuple[NDArray[np.uint32], NDArray[np.uint16], Bits]:
        """Returns copies: changes per 64 Ki-element block, their places in it, the differences."""

    def g8s(self) -> tuple[bytes, ...]:
        """Returns the streams of csrc/delta/g8s.hpp."""

    def coo(self) -> bytes:
        """Returns int32 places, then differences."""

    def exponents(self, base: Bits, shift: int) -> tuple[bytes, ...]:
        """Returns the streams of csrc/delta/exponent.hpp. base: the old bits. shift: the width of their
        mantissa.
        """

    def apply(self, base: Bits, first_index: int) -> Lanes:
        """Adds the differences in place; returns the change of the state hash."""

    def apply_noting(self, base: Bits, first_index: int) -> tuple[Lanes, NDArray[np.int32], Bits, Bits]:
        """Does what apply() does; returns also the changed elements' places, their old and their new bits."""

    def revert(self, base: Bits, first_index: int) -> Lanes:
        """Subtracts the differences in place; returns the change of the state hash."""

    @property
    def num_elements(self) -> int: ...
    @property
    def num_changed(self) -> int: ...
    @property
    def width(self) -> int: ...

def state_hash(bits: Bits, first_index: int) -> Lanes:
    """Returns the sum over all elements of the hash of (global index, bits): two lanes modulo 2**64."""

def exchange(
    bits: Bits, places: NDArray[np.int32] | NDArray[np.int64], shift: int, old: Bits, new: Bits
) -> bool:
    """Replaces old[k] by new[k] at bits[places[k] + shift], for all k or for none.

    Returns False, with nothing changed, where an element holds other bits or lies outside. Raises: ValueError
    on vectors of unequal length or width, and on such that are read-only or not aligned.
    """

def set_instructions(wanted: str) -> str:
    """Chooses "avx512", "avx2", "neon" or "portable", or the next one that the processor has, for all
    threads.

    Returns the choice. Raises: ValueError.
    """
