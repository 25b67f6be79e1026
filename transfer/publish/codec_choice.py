"""Which codec a bucket's difference gets.

Owns the estimate of what each codec costs in time and bytes. Pure. Of the codecs that are about equally fast
over this link, it chooses the one with the fewest bytes. Never chooses COO, the baseline.
"""

from dataclasses import dataclass

from rose.transfer.format.codec import Bits, Codec, SparsePatch, dense_payload, pack_followed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cost:
    """Measured by benchmarks/bench_codec.py on one core with AVX-512, for bf16 after an Adam-like step."""

    per_byte_s: float
    """Time per byte of the bucket, changed or not, for reading both versions."""
    per_change_s: float
    wire_bytes: float
    """Bytes per changed element. They fall with density; this is the value at 1%."""


_COSTS = {
    Codec.G8S: _Cost(per_byte_s=1 / 6.8e9, per_change_s=4.2e-9, wire_bytes=1.42),
    Codec.G8S_ZSTD: _Cost(per_byte_s=1 / 6.8e9, per_change_s=6.9e-9, wire_bytes=1.24),
    Codec.EXPONENT: _Cost(per_byte_s=1 / 1.4e9, per_change_s=21e-9, wire_bytes=0.90),
}
_ABOUT_EQUAL = 1.25
"""The estimates of time are no more exact than this, and others may use the link as well."""


def pack_for_link(patch: SparsePatch, kept: Bits, dtype: str, link_bytes_per_s: float) -> tuple[Codec, bytes]:
    """Returns the codec that suits the density and the link, and its payload. `kept` already has the
    patch.
    """
    codec = choose_codec(patch.num_changed, kept.nbytes, link_bytes_per_s)
    payload = pack_followed(codec, patch, kept, dtype)
    if len(payload) >= kept.nbytes:
        return Codec.DENSE, dense_payload(kept)
    return codec, payload


def choose_codec(num_changed: int, num_bytes: int, link_bytes_per_s: float) -> Codec:
    """Returns the codec for a bucket of `num_bytes` in which `num_changed` elements differ.

    Encoding and sending overlap, bucket after bucket, so the slower of the two sets the pace.
    """
    times = {codec: _time_s(cost, num_changed, num_bytes, link_bytes_per_s) for codec, cost in _COSTS.items()}
    fastest = min(times.values())
    candidates = [codec for codec, time_s in times.items() if time_s <= fastest * _ABOUT_EQUAL]
    return min(candidates, key=lambda codec: _COSTS[codec].wire_bytes)


def _time_s(cost: _Cost, num_changed: int, num_bytes: int, link_bytes_per_s: float) -> float:
    encode_s = num_bytes * cost.per_byte_s + num_changed * cost.per_change_s
    return max(encode_s, num_changed * cost.wire_bytes / link_bytes_per_s)
