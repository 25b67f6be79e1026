"""The delta codecs against the formats of other systems, on one core: bytes, and speed beside memcpy.

Weights are bf16 roundings of an fp32 master before and after an Adam-like step; the learning rate sets the
density. Every format encodes, decodes and applies the same 64 MB bucket, one after the other in each repeat,
and must give the new bits exactly. GB/s count the bucket's bytes, changed or not. Formats:
  default       G8S with zstd          exponent   gaps among elements of equal old exponent
  g8s           G8S without zstd       coo        int32 place + difference (ROSE §4.2, vLLM, verl)
  coo_torch     coo written with torch       dense      all bits, changed or not
  gap16_zstd    u16 gaps + values, zstd (PULSE)        xor_zstd   dense XOR, zstd (slime)

Per density: `bytes_per_changed_element` (frame header included), `wire_over_entropy` (wire bytes over the
bound for independent places and differences), `encode_gbps` and `apply_gbps` (decode and apply), both also
over memcpy of the same repeat. `exchange_over_memcpy` is an engine's part: comparing the changed elements of
a live parameter with their old bits and writing the new ones, beside torch in two passes. All times are CPU
seconds. `chosen_over_dense` is computed from them: for the codec that the publisher chooses for a link, the
longest of encoding, sending and applying, over the same for dense; the largest ratio of several links.

    python benchmarks/bench_codec.py --json codec.json
"""

import argparse
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from lib.harness import median_figure, run_benchmark
from lib.transfer.codec_peers import PEERS, Bits, PeerFormat, adam_step

from rose import _delta
from rose.engine.weights.in_place import replace_on_device
from rose.errors import RoseError
from rose.measure.figures import Figure
from rose.transfer.format.codec import Codec, decode, encode
from rose.transfer.format.frame import HEADER_BYTES
from rose.transfer.publish.codec_choice import choose_codec

LEARNING_RATES = {"0.18%": 9e-8, "1%": 6.3e-7, "5%": 4.2e-6, "20%": 2.4e-5, "50%": 1.15e-4}
"""The names say the density that they give; the figures state it as measured."""
OURS = {
    "default": Codec.G8S_ZSTD,
    "exponent": Codec.EXPONENT,
    "g8s": Codec.G8S,
    "coo": Codec.COO,
    "dense": Codec.DENSE,
}
BEST = "avx512"
"""Stands for the best instructions that the processor has."""
LINKS_GBPS = (0.2, 1.0, 5.0, 20.0, 200.0)
BUCKET_ELEMENTS = 32 << 20
MEMCPY = "memcpy"


@dataclass(slots=True)
class _Case:
    """One density: what every format took."""

    num_changed: int
    bound_bytes: float
    wire_bytes: dict[str, int] = field(default_factory=dict)
    encode_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    apply_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    exchange_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = ("avx512", "avx2", "neon", "portable")
    parser.add_argument("--instructions", choices=names, help="default: the best that the processor has")
    parser.add_argument("--density", choices=LEARNING_RATES, action="append", help="may be repeated")


def measure(args: argparse.Namespace) -> list[Figure]:
    torch.set_num_threads(1)
    repeats = 3 if args.quick else 9
    instructions = _delta.set_instructions(args.instructions if args.instructions is not None else BEST)
    if args.instructions not in (None, instructions):
        raise RoseError(f"this processor has no {args.instructions}")
    formats = [_ours(name, codec) for name, codec in OURS.items()] + list(PEERS)
    figures: list[Figure] = []
    for label in args.density if args.density is not None else LEARNING_RATES:
        lr = LEARNING_RATES[label]
        old, new = adam_step(BUCKET_ELEMENTS, lr, args.seed)
        case = _Case(int(np.count_nonzero(old != new)), entropy_bytes(old, new))
        for _ in range(repeats):
            _repeat(case, formats, old, new)
            _repeat_exchange(case, old, new)
        figures += [*_figures(case, label), _choice_figure(case, label, instructions)]
    return figures


def _ours(name: str, codec: Codec) -> PeerFormat:
    def apply(payload: bytes, base: Bits) -> None:
        decode(codec, payload, base).apply_to(base, 0)

    return PeerFormat(
        name=name, encode=lambda old, new: encode(codec, old, new, 0, "BF16").payload, apply=apply
    )


def _repeat(case: _Case, formats: list[PeerFormat], old: Bits, new: Bits) -> None:
    base = old.copy()
    copy_s = _seconds(lambda: np.copyto(base, old))
    case.encode_s[MEMCPY].append(copy_s)
    case.apply_s[MEMCPY].append(copy_s)
    for each in formats:
        payload = b""

        def encode_once(each: PeerFormat = each) -> None:
            nonlocal payload
            payload = each.encode(old, new)

        case.encode_s[each.name].append(_seconds(encode_once))
        case.wire_bytes[each.name] = len(payload) + HEADER_BYTES
        base[:] = old
        case.apply_s[each.name].append(
            _seconds(lambda each=each, payload=payload: each.apply(payload, base))  # type: ignore[misc]
        )
        if not np.array_equal(base, new):
            raise RoseError(f"format {each.name} did not give the new bits")


def _repeat_exchange(case: _Case, old: Bits, new: Bits) -> None:
    live = old.copy()
    places = np.flatnonzero(old != new).astype(np.int32)
    before, after = old[places], new[places]
    case.exchange_s[MEMCPY].append(_seconds(lambda: np.copyto(live, old)))

    def in_one_pass() -> None:
        if not _delta.exchange(live, places, 0, before, after):
            raise RoseError("the live weights are not the old ones")

    def with_torch() -> None:
        target = torch.from_numpy(live.view(np.int16))
        if not replace_on_device(target, places, 0, before.view(np.uint16), after.view(np.uint16)):
            raise RoseError("the live weights are not the old ones")

    for name, exchange in (("one pass", in_one_pass), ("torch", with_torch)):
        case.exchange_s[name].append(_seconds(exchange))
        if not np.array_equal(live, new):
            raise RoseError(f"{name} did not give the new bits")
        live[:] = old


def _seconds(work: Callable[[], object]) -> float:
    """Returns the CPU seconds of this process, which others on the machine disturb less than its time."""
    started = time.process_time()
    work()
    return time.process_time() - started


def entropy_bytes(old: Bits, new: Bits) -> float:
    """Returns the fewest bytes that can code the changes if places and differences are independent."""
    differences = (new - old)[old != new]
    density = differences.size / old.size
    places = float(old.size) * _entropy_bits(np.array([density, 1 - density]))
    _, counts = np.unique(differences, return_counts=True)
    return float(places + differences.size * _entropy_bits(counts / differences.size)) / 8


def _entropy_bits(probabilities: np.ndarray) -> float:
    positive = probabilities[probabilities > 0]
    return float(-(positive * np.log2(positive)).sum())


def _figures(case: _Case, label: str) -> list[Figure]:
    per_change = {name: size / case.num_changed for name, size in case.wire_bytes.items()}
    bound = case.bound_bytes / case.num_changed
    is_main = label == "1%"
    figures = [
        Figure(name=f"density[{label}]", value=case.num_changed / BUCKET_ELEMENTS, unit="changed elements"),
        Figure(
            name=f"bytes_per_changed_element[{label}]",
            value=per_change["default"],
            unit="bytes",
            target="<= 1.30" if is_main else None,
            peers={name: value for name, value in per_change.items() if name not in ("default", "exponent")},
        ),
        Figure(
            name=f"bytes_per_changed_element[exponent, {label}]",
            value=per_change["exponent"],
            unit="bytes",
            target="<= 1.05" if is_main else None,
            peers={"bound without context": bound},
        ),
        Figure(
            name=f"wire_over_entropy[{label}]",
            value=per_change["default"] / bound,
            unit="ratio",
            target="<= 1.10" if is_main else None,
            peers={name: per_change[name] / bound for name in ("exponent", "gap16_zstd", "xor_zstd", "coo")},
        ),
    ]
    figures.append(_exchange_figure(case, label))
    speeds = (("encode", case.encode_s, ">= 6", ">= 0.6"), ("apply", case.apply_s, ">= 10", ">= 0.9"))
    for name, seconds, target, over_memcpy in speeds:
        rates = {each: [_gbps(value) for value in values] for each, values in seconds.items()}
        ratios = [copy / ours for copy, ours in zip(seconds[MEMCPY], seconds["default"], strict=True)]
        peers = {each: statistics.median(rate) for each, rate in rates.items() if each != "default"}
        figures += [
            median_figure(
                f"{name}_gbps[{label}]",
                rates["default"],
                "GB/s",
                target=target if is_main else None,
                peers=dict(peers),
            ),
            median_figure(
                f"{name}_over_memcpy[{label}]", ratios, "ratio", target=over_memcpy if is_main else None
            ),
        ]
    return figures


def _exchange_figure(case: _Case, label: str) -> Figure:
    copies = case.exchange_s[MEMCPY]
    ratios = {
        name: [copy / each for copy, each in zip(copies, seconds, strict=True)]
        for name, seconds in case.exchange_s.items()
    }
    peers: dict[str, float | None] = {"torch": statistics.median(ratios["torch"])}
    return median_figure(f"exchange_over_memcpy[{label}]", ratios["one pass"], "ratio", peers=peers)


def _choice_figure(case: _Case, label: str, instructions: str) -> Figure:
    """Returns how much longer a bucket takes with the chosen codec than dense, at the worst link."""
    ratios: dict[str, float | None] = {}
    worst = 0.0
    for link_gbps in LINKS_GBPS:
        link_bytes_per_s = link_gbps * 1e9 / 8
        chosen = choose_codec(case.num_changed, 2 * BUCKET_ELEMENTS, link_bytes_per_s, instructions)
        name = next(name for name, codec in OURS.items() if codec is chosen)
        ours, dense = (
            max(
                statistics.median(case.encode_s[each]),
                case.wire_bytes[each] / link_bytes_per_s,
                statistics.median(case.apply_s[each]),
            )
            for each in (name, "dense")
        )
        ratios[f"{name} at {link_gbps:g} Gbps"] = ours / dense
        worst = max(worst, ours / dense)
    return Figure(
        name=f"chosen_over_dense[{label}]",
        value=worst,
        unit="ratio",
        target="<= 1",
        kind="simulated",
        peers=ratios,
    )


def _gbps(seconds: float) -> float:
    return 2 * BUCKET_ELEMENTS / seconds / 1e9 if seconds > 0 else math.inf


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, add_arguments))
