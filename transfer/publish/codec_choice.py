"""Which codec a bucket's difference gets.

Owns the estimate of what each codec costs in time and bytes. Pure. Of the codecs that are about equally fast
over this link, it chooses the one with the fewest bytes, and none that takes longer than sending all bits.
Never chooses COO, the baseline.
"""

from dataclasses import dataclass

from rose import _delta
from rose.transfer.format.codec import Bits, Codec, SparsePatch, dense_payload, pack_followed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Times on one core, in nanoseconds."""

    per_byte: float
    """Per byte of the bucket, changed or not."""
    per_change: float

    def seconds(self, num_changed: int, num_bytes: int) -> float:
        return 1e-9 * (num_bytes * self.per_byte + num_changed * self.per_change)


@dataclass(frozen=True, slots=True)
class _Costs:
    """What comparing both versions and encoding take together, and what decoding and applying take."""

    encode: _Work
    apply: _Work


def _costs(encode: tuple[float, float], apply: tuple[float, float]) -> _Costs:
    works = (_Work(per_byte=per_byte, per_change=per_change) for per_byte, per_change in (encode, apply))
    return _Costs(*works)


_AVX2 = {
    Codec.DENSE: _costs(encode=(0.34, 3.9), apply=(1.40, 0.0)),
    Codec.G8S: _costs(encode=(0.14, 6.1), apply=(0.03, 5.8)),
    Codec.G8S_ZSTD: _costs(encode=(0.14, 9.7), apply=(0.03, 6.6)),
    Codec.EXPONENT: _costs(encode=(0.94, 22.0), apply=(0.95, 17.0)),
}
_COSTS = {
    "avx512": {
        Codec.DENSE: _costs(encode=(0.32, 1.6), apply=(0.43, 0.0)),
        Codec.G8S: _costs(encode=(0.12, 2.6), apply=(0.03, 2.5)),
        Codec.G8S_ZSTD: _costs(encode=(0.12, 6.4), apply=(0.03, 3.0)),
        Codec.EXPONENT: _costs(encode=(0.57, 15.0), apply=(0.45, 17.0)),
    },
    "avx2": _AVX2,
    "neon": _AVX2,  # not measured
    "portable": {
        Codec.DENSE: _costs(encode=(0.40, 4.7), apply=(1.75, 0.0)),
        Codec.G8S: _costs(encode=(0.20, 8.2), apply=(0.03, 6.0)),
        Codec.G8S_ZSTD: _costs(encode=(0.20, 11.4), apply=(0.03, 6.9)),
        Codec.EXPONENT: _costs(encode=(1.00, 25.0), apply=(0.95, 17.0)),
    },
}
"""By the processor's instructions, measured on one core for bf16, of which 5% and 50% changed."""
_WIRE_BYTES = {Codec.G8S: 1.42, Codec.G8S_ZSTD: 1.24, Codec.EXPONENT: 0.90}
"""Bytes per changed element. They fall with density; these are the values at 1%."""
_ABOUT_EQUAL = 1.25
"""The estimates of time are no more exact than this, and others may use the link as well."""
_INSTRUCTIONS = _delta.set_instructions("avx512")
"""The best that the processor has, which a process starts with."""


def pack_for_link(patch: SparsePatch, kept: Bits, dtype: str, link_bytes_per_s: float) -> tuple[Codec, bytes]:
    """Returns the codec that suits the density and the link, and its payload. `kept` already has the
    patch.
    """
    codec = choose_codec(patch.num_changed, kept.nbytes, link_bytes_per_s)
    payload = pack_followed(codec, patch, kept, dtype)
    if len(payload) >= kept.nbytes:
        return Codec.DENSE, dense_payload(kept)
    return codec, payload


def choose_codec(
    num_changed: int, num_bytes: int, link_bytes_per_s: float, instructions: str = _INSTRUCTIONS
) -> Codec:
    """Returns the codec for a bucket of `num_bytes` in which `num_changed` elements differ.

    Encoding, sending and applying overlap, bucket after bucket, so the slowest of them sets the pace.
    instructions: those of both sides, as _delta.set_instructions() names them.
    """
    costs = _COSTS[instructions]

    def pace_s(codec: Codec, wire_bytes: float) -> float:
        works = (costs[codec].encode, costs[codec].apply)
        return max(wire_bytes / link_bytes_per_s, *(work.seconds(num_changed, num_bytes) for work in works))

    times = {codec: pace_s(codec, num_changed * each) for codec, each in _WIRE_BYTES.items()}
    longest_s = min(min(times.values()) * _ABOUT_EQUAL, pace_s(Codec.DENSE, num_bytes))
    candidates = [codec for codec, time_s in times.items() if time_s <= longest_s]
    return min(candidates, key=_WIRE_BYTES.__getitem__, default=Codec.DENSE)
