"""A trainer in bfloat16 that quantizes for engines in fp8 sends a small part of what bfloat16 would take.

Weights are bf16 roundings of an fp32 master before and after an Adam-like step that changes about 1% of them
in bf16. One publisher sends them as they are, others quantize them first, with a scale for each tensor, row
or block of 128 by 128. All encode with the default codec.
  fp8_over_bf16_bytes   bytes of the second version in the relay, over those in bf16
  fp8_blocks_over_copy  what quantizing adds to the time that the trainer waits, over a copy of its weights;
                        CPU seconds of one thread

    python benchmarks/bench_fp8.py --json fp8.json
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import safetensors.torch
import torch
from lib.harness import median_figure, run_benchmark
from lib.transfer.codec_peers import adam_step

from rose.measure.figures import Figure
from rose.measure.rig import Rig
from rose.transfer.publish.fp8_scheme import Fp8Scheme
from rose.transfer.publish.publisher import WeightPublisher
from rose.transfer.publish.quantized_source import source_of

LEARNING_RATE = 6.3e-7
NAME, COLUMNS = "model.layers.0.mlp.up_proj.weight", 4096
ELEMENTS, QUICK_ELEMENTS = 64 << 20, 16 << 20
REPEATS, QUICK_REPEATS = 9, 3
RELAY_BYTES = 2 << 30
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_ROWS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
SCHEMES: dict[str, dict[str, Any]] = {
    "tensor": _FP8,
    "row": {"quant_method": "compressed-tensors", "config_groups": {"linear": {"weights": _ROWS}}},
    "block": {**_FP8, "weight_block_size": [128, 128]},
}


@dataclass(slots=True)
class Case:
    """What one kind of scales took."""

    wire_bytes: int
    changed: float
    """The share of the elements that changed."""
    quantize_s: list[float] = field(default_factory=list)


def measure(args: argparse.Namespace) -> list[Figure]:
    torch.set_num_threads(1)
    count, repeats = (QUICK_ELEMENTS, QUICK_REPEATS) if args.quick else (ELEMENTS, REPEATS)
    old, new = (
        torch.from_numpy(bits).view(torch.bfloat16).view(-1, COLUMNS)
        for bits in adam_step(count, LEARNING_RATE, args.seed)
    )
    weights = {NAME: torch.empty_like(old)}
    with TemporaryDirectory() as folder, Rig() as rig:
        _, url = rig.start_relay("relay", kind="embedded", capacity_bytes=RELAY_BYTES)
        likes: dict[str, Path | None] = {"bf16": None}
        likes |= {kind: write_checkpoint(Path(folder, kind), SCHEMES[kind], weights) for kind in SCHEMES}
        cases = {kind: publish(weights, url, kind, like, old, new) for kind, like in likes.items()}
        copies_s = []
        for _ in range(repeats):
            copies_s.append(seconds(lambda: weights[NAME].copy_(new)))
            for kind in SCHEMES:
                cases[kind].quantize_s.append(seconds(source_of(weights, None, likes[kind]).prepare))
    return figures(cases, statistics.median(copies_s))


def publish(
    weights: dict[str, torch.Tensor], url: str, run: str, like: Path | None, old: Any, new: Any
) -> Case:
    """Publishes both versions."""
    with closing(WeightPublisher(weights, url, run, quantized_like=like)) as publisher:
        weights[NAME].copy_(old)
        publisher.publish()
        weights[NAME].copy_(new)
        report = publisher.publish()
    return Case(report.wire_bytes, report.num_changed / report.num_elements)


def figures(cases: dict[str, Case], copy_s: float) -> list[Figure]:
    plain = cases.pop("bf16")
    found = []
    for kind, case in cases.items():
        peers: dict[str, float | None] = {
            "KB": case.wire_bytes / 1e3,
            "KB in bf16": plain.wire_bytes / 1e3,
            "% changed": 100 * case.changed,
            "% changed in bf16": 100 * plain.changed,
        }
        name, share = f"fp8_over_bf16_bytes[{kind}]", case.wire_bytes / plain.wire_bytes
        found.append(Figure(name=name, value=share, unit="ratio", target="<= 0.2", peers=peers))
    for kind, case in cases.items():
        times = [each / copy_s for each in case.quantize_s]
        found.append(median_figure(f"fp8_blocks_over_copy[{kind}]", times, "ratio"))
    return found


def seconds(work: Callable[[], object]) -> float:
    started_s = time.process_time()
    work()
    return time.process_time() - started_s


def write_checkpoint(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    """Writes a checkpoint in fp8 whose numbers are all zero."""
    scheme, tensors = Fp8Scheme.of(config), {}
    for name, weight in weights.items():
        tensors[name] = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn)
        tensors[name + scheme.suffix] = torch.zeros(scheme.scales_of(tuple(weight.shape)))
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__, measure))
