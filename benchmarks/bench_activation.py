"""Activation: a rollout engine leaves its GPU and comes back in seconds, and holds little of it meanwhile.

Each random model has one rollout engine in a pool of its own, with requests in flight when it is told to go.
On a CPU the engine core's anonymous memory stands for device memory, and packing the weights for oneDNN
stands for the copy to the device. The paper's figures (32B on H800) are only shown beside; the peer that is
measured here is a new start of the engine.

    python benchmarks/bench_activation.py --quick --json activation.json
"""

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from lib.engines.lone import VOCABULARY, LoneModel, lone_engine, write_model
from lib.harness import median_figure, run_benchmark

from rose.measure.figures import Figure
from rose.node.control import EngineControl

NUM_REQUESTS = 6
ANSWER_TOKENS = 16
GB = 1e9
PAPER_S = 5.0
PAPER_IDLE_BYTES = 2e9
PAPER = "paper, 32B on H800"
CYCLES, QUICK_CYCLES = 10, 3


SIZES = {
    "tiny": LoneModel(hidden=256, layers=4, slab_bytes=4 << 20),
    "mid": LoneModel(hidden=1536, layers=6, slab_bytes=8 << 20),
}


@dataclass(slots=True)
class ActivationSamples:
    """What one model's cycles took."""

    weights_bytes: int
    start_s: float
    activate_s: list[float] = field(default_factory=list)
    deactivate_s: list[float] = field(default_factory=list)
    idle_bytes: list[float] = field(default_factory=list)
    answers_equal: list[float] = field(default_factory=list)


def measure(args: argparse.Namespace) -> list[Figure]:
    """Both models, one after the other."""
    figures = []
    for name, size in SIZES.items():
        cycles = QUICK_CYCLES if args.quick else CYCLES
        figures += _figures(name, _run(size, cycles, args.seed))
    return figures


def _run(size: LoneModel, cycles: int, seed: int) -> ActivationSamples:
    with TemporaryDirectory(prefix="rose-bench-") as folder:
        model = write_model(Path(folder) / "model", size, seed)
        with lone_engine(model, size.slab_bytes, NUM_REQUESTS) as (engine, start_s):
            samples = ActivationSamples(weights_bytes=engine.status().device_weights_bytes, start_s=start_s)
            rng = Random(seed)
            prompts = [[rng.randrange(VOCABULARY) for _ in range(100)] for _ in range(NUM_REQUESTS)]
            expected = engine.complete(prompts, ANSWER_TOKENS)
            for _ in range(cycles):
                _cycle(engine, prompts, samples)
                samples.answers_equal.append(float(engine.complete(prompts, ANSWER_TOKENS) == expected))
            return samples


def _cycle(engine: EngineControl, prompts: list[list[int]], samples: ActivationSamples) -> None:
    tokens = engine.status().generated_tokens
    with ThreadPoolExecutor(1) as background:
        # Cut short by the deactivation, which is what a turn sees that a phase's end catches.
        background.submit(engine.complete, prompts, 800)
        while engine.status().generated_tokens < tokens + 2 * NUM_REQUESTS:
            time.sleep(0.01)
        started_s = time.monotonic()
        engine.deactivate()
        samples.deactivate_s.append(time.monotonic() - started_s)
    idle = engine.status()
    samples.idle_bytes.append(idle.device_weights_bytes + idle.device_kv_bytes + idle.device_fixed_bytes)
    started_s = time.monotonic()
    engine.activate()
    samples.activate_s.append(time.monotonic() - started_s)


def _figures(name: str, samples: ActivationSamples) -> list[Figure]:
    gigabytes = samples.weights_bytes / GB
    weights: dict[str, float | None] = {"weights bytes": samples.weights_bytes}
    restart: dict[str, float | None] = {"start anew": samples.start_s, PAPER: PAPER_S}
    figures = [
        median_figure(f"activate_s[{name}]", samples.activate_s, "s", peers={**restart, **weights}),
        median_figure(f"deactivate_s[{name}]", samples.deactivate_s, "s", peers=weights),
        median_figure(
            f"idle_footprint_bytes[{name}]", samples.idle_bytes, "bytes", peers={PAPER: PAPER_IDLE_BYTES}
        ),
        median_figure(f"activation_answers_equal[{name}]", samples.answers_equal, "share", target=">= 1"),
    ]
    if name == "mid":  # a tiny model's times are those of the calls, not of its bytes
        for what, values in (("activate", samples.activate_s), ("deactivate", samples.deactivate_s)):
            per_gb = [value / gigabytes for value in values]
            figures.append(median_figure(f"{what}_s_per_gb[{name}]", per_gb, "s/GB"))
    return figures


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure))
