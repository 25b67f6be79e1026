"""The wire formats of other weight-transfer systems, re-implemented for comparison in bench_codec.py.

Owns: formats as their papers and sources describe them, over the same raw bits. Promises: each decodes to the
same bits it was given (the benchmark checks). Never used by the product.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray

Bits = NDArray[np.uint16]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFormat:
    """encode(old, new) -> payload; apply(payload, base) writes the new bits into base."""

    name: str
    encode: Callable[[Bits, Bits], bytes]
    apply: Callable[[bytes, Bits], None]


def _encode_coo_torch(old: Bits, new: Bits) -> bytes:
    before, after = torch.from_numpy(old.view(np.int16)), torch.from_numpy(new.view(np.int16))
    places = (before != after).nonzero().squeeze(1).to(torch.int32)
    values = after[places]
    return places.numpy().tobytes() + values.numpy().tobytes()


def _apply_coo_torch(payload: bytes, base: Bits) -> None:
    count = len(payload) // 6
    places = np.frombuffer(payload, np.int32, count)
    values = np.frombuffer(payload, np.int16, count, offset=4 * count)
    target = torch.from_numpy(base.view(np.int16))
    target[torch.from_numpy(places.astype(np.int64))] = torch.from_numpy(values.copy())


def _encode_gaps(old: Bits, new: Bits) -> bytes:
    places = np.flatnonzero(old != new)
    gaps = np.diff(places, prepend=-1) - 1
    # A gap of 65535 or more is carried by escapes of 65535.
    escapes = gaps // 65535
    coded = np.full(places.size + int(escapes.sum()), 65535, np.uint16)
    ends = np.cumsum(escapes + 1) - 1
    coded[ends] = gaps % 65535
    body = coded.tobytes() + new[places].tobytes()
    return coded.size.to_bytes(8, "little") + zstandard.ZstdCompressor(level=1).compress(body)


def _apply_gaps(payload: bytes, base: Bits) -> None:
    body = zstandard.ZstdDecompressor().decompress(payload[8:])
    num_coded = int.from_bytes(payload[:8], "little")
    coded = np.frombuffer(body, np.uint16, num_coded)
    values = np.frombuffer(body, np.uint16, offset=2 * num_coded)
    is_last = coded != 65535
    places = (np.cumsum(coded.astype(np.int64) + is_last) - 1)[is_last]
    base[places] = values


def _encode_xor(old: Bits, new: Bits) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress((old ^ new).tobytes())


def _apply_xor(payload: bytes, base: Bits) -> None:
    base ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(payload), np.uint16)


PEERS = (
    PeerFormat(name="coo_torch", encode=_encode_coo_torch, apply=_apply_coo_torch),
    PeerFormat(name="gap16_zstd", encode=_encode_gaps, apply=_apply_gaps),
    PeerFormat(name="xor_zstd", encode=_encode_xor, apply=_apply_xor),
)
"""The formats of ROSE's paper, vLLM and verl (int32 + value, written with torch), of PULSE and of slime."""


def adam_step(num_elements: int, lr: float, seed: int) -> tuple[Any, Any]:
    """bf16 bits before and after a step of Adam on an fp32 master copy of weights of deviation 0.02.

    Updates are lr times a ratio of moments, which for a noisy gradient is spread over (-1, 1).
    """
    generator = torch.Generator().manual_seed(seed)
    master = torch.empty(num_elements).normal_(0, 0.02, generator=generator)
    old = master.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    ratio = torch.empty(num_elements).normal_(0, 0.4, generator=generator).clamp_(-1, 1)
    new = master.add_(ratio, alpha=lr).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return old, new
