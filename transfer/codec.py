"""Codecs: how the difference between two versions of a bucket becomes bytes, and back.

Owns: the payload of a frame. All sparse codecs carry the wrap difference new - old (mod 2**bits) of the
raw bits, so any pattern (NaN, Inf, -0) survives; an additive bf16 delta would not.
Promises: decode() checks a whole payload against its base before anything may be written, and the Patch
it returns can't fail. Nothing here knows versions, keys or names.
Where we differ from the paper (ROSE §4.2): COO is the baseline, G8S with zstd the default.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from rose import _delta
from rose.errors import FrameError
from rose.transfer.state_hash import StateHash

Bits = NDArray[np.unsignedinteger[Any]]
"""A vector of raw element bits: uint8, uint16 or uint32."""

ZSTD_LEVEL = 1  # level 3 saved 1% more at a third of the speed
_SIZES = struct.Struct("<QQ")


class Codec(IntEnum):
    """Wire numbers; a number is never reused."""

    DENSE = 0
    """All new bits; needs no base."""
    COO = 1
    """int32 places, then differences: 6 bytes per changed bf16 element (ROSE §4.2)."""
    G8S = 2
    """Gaps, flags, signs and exceptions in 64 Ki-element blocks, see csrc/delta/g8s.hpp."""
    G8S_ZSTD = 3
    """G8S with each stream compressed on its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One bucket's difference as bytes, and what it does to the state hash."""

    payload: bytes
    num_changed: int
    change: StateHash


class Patch:
    """A checked payload: what to write into one bucket, and the effect of writing it."""

    def __init__(self, codec: Codec, parts: tuple[Any, ...], num_changed: int, change: StateHash) -> None:
        self._codec = codec
        self._parts = parts
        self.num_changed = num_changed
        self.change = change

    def apply_to(self, base: Bits) -> None:
        """Writes the new bits in place; `base` must still hold what decode() saw."""
        if self._codec is Codec.DENSE:
            base[:] = self._parts[0]
        elif self._codec is Codec.COO:
            places, differences = self._parts
            base[places] += differences
        else:
            _delta.apply(base, self._parts, 0)


def encode(codec: Codec, old: Bits, new: Bits, first_index: int) -> Encoded:
    """The difference from `old` to `new`, vectors of equal length and unsigned dtype.

    first_index: global index of element 0, for the state hash. Raises: ValueError on unequal vectors.
    """
    if codec is Codec.DENSE:
        change = StateHash.of(new, first_index) - StateHash.of(old, first_index)
        return Encoded(payload=new.tobytes(), num_changed=int(np.count_nonzero(old != new)), change=change)
    if codec is Codec.COO:
        return _encode_coo(old, new, first_index)
    streams, num_changed, lanes = _delta.encode(old, new, first_index)
    payload = _pack(streams, compress=codec is Codec.G8S_ZSTD)
    return Encoded(payload=payload, num_changed=num_changed, change=StateHash(*lanes))


def decode(codec: Codec, payload: bytes, base: Bits, first_index: int) -> Patch:
    """Checks `payload` against `base` and returns the patch; writes nothing.

    Raises: FrameError when the payload is malformed for a base of this length and width.
    """
    if codec is Codec.DENSE:
        return _decode_dense(payload, base, first_index)
    if codec is Codec.COO:
        return _decode_coo(payload, base, first_index)
    streams = _unpack(payload, base.size, base.itemsize)
    try:
        num_changed, lanes = _delta.measure(base, streams, first_index)
    except _delta.MalformedStream as error:
        raise FrameError(f"payload of {len(payload)} bytes: {error}") from error
    return Patch(codec, streams, num_changed, StateHash(*lanes))


def _encode_coo(old: Bits, new: Bits, first_index: int) -> Encoded:
    if old.size > np.iinfo(np.int32).max:
        raise ValueError(f"COO places are int32, a bucket of {old.size} elements is too long")
    places = np.flatnonzero(old != new)
    differences = new[places] - old[places]
    lanes = _delta.hash_change(places + first_index, old[places], new[places])
    payload = places.astype("<i4").tobytes() + differences.tobytes()
    return Encoded(payload=payload, num_changed=places.size, change=StateHash(*lanes))


def _decode_coo(payload: bytes, base: Bits, first_index: int) -> Patch:
    count, rest = divmod(len(payload), 4 + base.itemsize)
    if rest:
        raise FrameError(f"COO payload of {len(payload)} bytes is no multiple of {4 + base.itemsize}")
    places = np.frombuffer(payload, "<i4", count).astype(np.int64)
    differences = np.frombuffer(payload, base.dtype, count, offset=4 * count)
    in_order = bool(np.all(np.diff(places) > 0))
    if count and (not in_order or places[0] < 0 or places[-1] >= base.size):
        raise FrameError(f"COO places must rise from 0 to below {base.size}")
    old = base[places]
    lanes = _delta.hash_change(places + first_index, old, old + differences)
    return Patch(Codec.COO, (places, differences), count, StateHash(*lanes))


def _decode_dense(payload: bytes, base: Bits, first_index: int) -> Patch:
    if len(payload) != base.nbytes:
        raise FrameError(f"dense payload has {len(payload)} bytes, the bucket {base.nbytes}")
    new = np.frombuffer(payload, base.dtype)
    change = StateHash.of(new, first_index) - StateHash.of(base, first_index)
    return Patch(Codec.DENSE, (new,), int(np.count_nonzero(base != new)), change)


def _pack(streams: tuple[bytes, ...], *, compress: bool) -> bytes:
    """(raw size, stored size) of every stream, then the streams; equal sizes mean stored as is."""
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL)
    sizes: list[bytes] = []
    bodies: list[bytes] = []
    for stream in streams:
        body = compressor.compress(stream) if compress and stream else stream
        if len(body) >= len(stream):
            body = stream
        sizes.append(_SIZES.pack(len(stream), len(body)))
        bodies.append(body)
    return b"".join(sizes + bodies)


def _unpack(payload: bytes, num_elements: int, width: int) -> tuple[bytes, ...]:
    start = _SIZES.size * _delta.NUM_STREAMS
    if len(payload) < start:
        raise FrameError(f"payload of {len(payload)} bytes is shorter than its stream table ({start})")
    # No honest stream outgrows this: refuse before the decompressor is asked for the memory.
    limit = num_elements * (width + 1) + 4096
    streams: list[bytes] = []
    for number in range(_delta.NUM_STREAMS):
        raw_size, stored_size = _SIZES.unpack_from(payload, number * _SIZES.size)
        body = payload[start : start + stored_size]
        if raw_size > limit or stored_size > raw_size or len(body) != stored_size:
            raise FrameError(f"stream {number} claims {stored_size} of {raw_size} bytes, limit {limit}")
        streams.append(body if stored_size == raw_size else _decompress(number, body, raw_size))
        start += stored_size
    if start != len(payload):
        raise FrameError(f"payload has {len(payload) - start} bytes after its last stream")
    return tuple(streams)


def _decompress(number: int, body: bytes, raw_size: int) -> bytes:
    try:
        if zstandard.frame_content_size(body) != raw_size:
            raise FrameError(f"stream {number} does not hold the {raw_size} bytes that its table claims")
        return zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FrameError(f"stream {number} does not decompress: {error}") from error
