"""Codecs: how the difference between two versions of a bucket becomes bytes, and back.

Owns the payload of a frame. All sparse codecs carry the wrap difference new - old (mod 2**bits) of the raw
bits, so any bit pattern (NaN, Inf, -0) survives; an additive bf16 delta would not keep it. A difference can
be taken back (Patch.revert). decode() checks a whole payload before anything may be written, and the Patch
that it returns can't fail. Nothing here knows versions, keys or names. Where we differ from the paper (ROSE
§4.2): COO is the baseline, G8S with zstd the default.

Payloads, all little-endian:

    DENSE      the new bits
    COO        int32 places in rising order, then the differences
    G8S        streams (rose.transfer.format.streams) of csrc/delta/g8s.hpp, stored as they are
    G8S_ZSTD   the same, each stream compressed
    EXPONENT   streams of csrc/delta/exponent.hpp, each compressed; decoding needs the old bits
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rose import _delta
from rose.errors import FrameError
from rose.transfer.format.state_hash import StateHash
from rose.transfer.format.streams import pack_streams, unpack_streams
from rose.types import BytesLike

_INTERFACE = 2
if (_found := getattr(_delta, "INTERFACE", 1)) != _INTERFACE:
    raise ImportError(
        f"{_delta.__file__} has interface {_found} and this code needs {_INTERFACE}: it was built from other "
        "code; build it again in ROSE's checkout: make setup, or pip install -e . in your own environment"
    )

Bits = NDArray[np.unsignedinteger[Any]]
"""A vector of raw element bits: uint8, uint16 or uint32."""

NewBits = Bits | Sequence[Bits]
"""A vector, or the pieces that it consists of, in order: tensors are compared where they lie."""

_MANTISSA_BITS = {"F16": 10, "F8_E5M2": 2, "F8_E8M0": 0}
_MANTISSA_BITS_BY_WIDTH = {1: 3, 2: 7, 4: 23}
"""The widths for every other dtype: F8_E4M3, BF16, F32, and integers, for which any width gives a valid
code.
"""


class Codec(IntEnum):
    """The codecs by their numbers on the wire. A number is never reused."""

    DENSE = 0
    """All new bits; decoding needs no base."""
    COO = 1
    """int32 places, then differences: 6 bytes per changed bf16 element (ROSE §4.2)."""
    G8S = 2
    """Gaps, flags, signs and exceptions in 64 Ki-element blocks."""
    G8S_ZSTD = 3
    """G8S with each stream compressed on its own."""
    EXPONENT = 4
    """Gaps among elements with the same old exponent: the fewest bytes and the most time, for slow links."""


class Patch(Protocol):
    """A checked payload: what to write into one bucket."""

    @property
    def num_changed(self) -> int:
        """The number of elements whose bits change."""

    def apply_to(self, base: Bits, first_index: int) -> StateHash:
        """Writes the new bits in place; returns the change of the state hash.

        base: the bits that decode() was given. first_index: the global index of its first element, for the
        hash.
        """

    def apply_noting(self, base: Bits, first_index: int) -> tuple[StateHash, "Elements"]:
        """Does what apply_to() does, and in the same pass notes what changes."""

    def revert(self, base: Bits) -> None:
        """Undoes apply_to() and apply_noting()."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """Changed elements of one vector: their places in it, in rising order, their old and their new bits."""

    places: NDArray[np.int32]
    old: Bits
    new: Bits


class SparsePatch:
    """A wrap difference in memory: 2 bytes and one element for each change."""

    def __init__(self, delta: _delta.Delta) -> None:
        self.delta = delta

    @property
    def num_changed(self) -> int:
        return self.delta.num_changed

    def apply_to(self, base: Bits, first_index: int) -> StateHash:
        return StateHash(*self.delta.apply(base, first_index))

    def apply_noting(self, base: Bits, first_index: int) -> tuple[StateHash, Elements]:
        lanes, places, old, new = self.delta.apply_noting(base, first_index)
        return StateHash(*lanes), Elements(places=places, old=old, new=new)

    def revert(self, base: Bits) -> None:
        self.delta.revert(base, 0)

    def pack(self, codec: Codec, old: Bits, dtype: str) -> bytes:
        """Returns the payload of a sparse codec. old: the bits that this patch is for; only EXPONENT reads
        them.
        """
        if codec is Codec.COO:
            return self.delta.coo()
        if codec is Codec.EXPONENT:
            shift = _MANTISSA_BITS.get(dtype, _MANTISSA_BITS_BY_WIDTH[old.itemsize])
            return pack_streams(self.delta.exponents(old, shift), is_compressed=True)
        return pack_streams(self.delta.g8s(), is_compressed=codec is Codec.G8S_ZSTD)


class DensePatch:
    """All bits of a bucket. After apply_to() it keeps the old bits instead, for revert()."""

    def __init__(self, new: Bits, num_changed: int) -> None:
        self._new: Bits | None = new
        self._old: Bits | None = None
        self.num_changed = num_changed

    def apply_to(self, base: Bits, first_index: int) -> StateHash:
        assert self._new is not None, "applied twice"
        self._old = base.copy()
        base[:] = self._new
        self._new = None
        return StateHash.of(base, first_index) - StateHash.of(self._old, first_index)

    def apply_noting(self, base: Bits, first_index: int) -> tuple[StateHash, Elements]:
        change = self.apply_to(base, first_index)
        assert self._old is not None
        places = np.flatnonzero(self._old != base)
        return change, Elements(places=places.astype(np.int32), old=self._old[places], new=base[places])

    def revert(self, base: Bits) -> None:
        assert self._old is not None, "revert before apply_to"
        base[:] = self._old


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One bucket's difference as bytes, and its effect on the state hash."""

    codec: Codec
    payload: bytes
    patch: Patch
    change: StateHash

    @property
    def num_changed(self) -> int:
        return self.patch.num_changed


def pieces_of(bits: NewBits) -> Sequence[Bits]:
    """Returns the pieces of a vector; a whole vector is its own only piece."""
    return [bits] if isinstance(bits, np.ndarray) else bits


def dense_payload(bits: NewBits) -> bytes:
    """Returns the payload of DENSE."""
    return b"".join(piece.tobytes() for piece in pieces_of(bits))


def dense_bits(
    codec: Codec, payload: BytesLike, dtype: np.dtype[np.unsignedinteger[Any]], num_elements: int
) -> Bits:
    """Returns the bits of a bucket that needs no base. Raises: FrameError unless the payload holds them."""
    num_bytes = num_elements * dtype.itemsize
    if codec is not Codec.DENSE or len(payload) != num_bytes:
        raise FrameError(f"{codec.name} payload of {len(payload)} bytes is not a dense one of {num_bytes}")
    return np.frombuffer(payload, dtype)


def compare(old: Bits, new: NewBits, first_index: int) -> tuple[SparsePatch, StateHash]:
    """Returns the difference from `old` to `new`, of equal length and width, and its effect on the state
    hash.

    first_index: the global index of element 0. Raises: ValueError on vectors of unequal length or width.
    """
    delta, lanes = _delta.Delta.between(old, pieces_of(new), first_index)
    return SparsePatch(delta), StateHash(*lanes)


def follow(kept: Bits, new: NewBits, first_index: int) -> tuple[SparsePatch, StateHash]:
    """Does what compare() does, and `kept`, the old bits, becomes `new` in the same pass over memory."""
    delta, lanes = _delta.Delta.follow(kept, pieces_of(new), first_index)
    return SparsePatch(delta), StateHash(*lanes)


def pack_followed(codec: Codec, patch: SparsePatch, kept: Bits, dtype: str) -> bytes:
    """Returns the payload of a patch that was already applied to `kept`."""
    if codec is Codec.DENSE:
        return dense_payload(kept)
    if codec is not Codec.EXPONENT:
        return patch.pack(codec, kept, dtype)
    patch.revert(kept)  # this codec needs the old bits; its encoding takes many times as long as the revert
    try:
        return patch.pack(codec, kept, dtype)
    finally:
        patch.apply_to(kept, 0)


def encode(codec: Codec, old: Bits, new: NewBits, first_index: int, dtype: str = "") -> Encoded:
    """Returns the difference from `old` to `new` in one codec; `dtype` tells EXPONENT where the exponent
    lies.
    """
    patch, change = compare(old, new, first_index)
    payload = dense_payload(new) if codec is Codec.DENSE else patch.pack(codec, old, dtype)
    return Encoded(codec=codec, payload=payload, patch=patch, change=change)


def decode(codec: Codec, payload: BytesLike, base: Bits) -> Patch:
    """Checks `payload` against `base`, the old bits, and returns the patch. Writes nothing, and keeps nothing
    of a payload in memory of somebody else.

    Raises: FrameError when the payload is malformed for a base of this length and width.
    """
    payload = bytes(payload)
    if codec is Codec.DENSE:
        if len(payload) != base.nbytes:
            raise FrameError(f"dense payload has {len(payload)} bytes, the bucket {base.nbytes}")
        new = np.frombuffer(payload, base.dtype)
        return DensePatch(new, int(np.count_nonzero(base != new)))
    try:
        return SparsePatch(_read(codec, payload, base))
    except _delta.MalformedStream as error:
        raise FrameError(f"payload of {len(payload)} bytes: {error}") from error


def _read(codec: Codec, payload: bytes, base: Bits) -> _delta.Delta:
    size, width = base.size, base.itemsize
    if codec is Codec.COO:
        return _delta.Delta.from_coo(payload, size, width)
    if codec is Codec.EXPONENT:
        streams = unpack_streams(payload, _delta.NUM_EXPONENT_STREAMS, size, width)
        return _delta.Delta.from_exponents(streams, base)
    streams = unpack_streams(payload, _delta.NUM_G8S_STREAMS, size, width)
    return _delta.Delta.from_g8s(streams, size, width)
