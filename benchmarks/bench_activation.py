"""Activation: a rollout engine leaves its GPU and comes back in seconds, and holds little of it meanwhile.

Random models, one rollout engine each in a pool of its own, with requests in flight when it is told to go. On
a CPU the engine core's anonymous memory stands for device memory, and packing the weights for oneDNN for the
copy to the device. The paper's figures (32B on H800) are shown beside, not compared; starting the engine anew
is the peer that was measured here.

    python benchmarks/bench_activation.py --quick --json activation.json
"""

import argparse
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from harness import median_figure, run_benchmark

from rose.config import Settings
from rose.demo.cluster import ENGINE_ENV
from rose.demo.figures import Figure
from rose.memory.daemon import start_daemon
from rose.node import launch
from rose.node.checks import free_port
from rose.node.config import EngineConfig
from rose.node.control import EngineControl
from rose.node.processes import ProcessGroup
from rose.types import Role

POOL = "activation"
NUM_SLABS = 24
HEADROOM_SLABS = 2
NUM_REQUESTS = 6
ANSWER_TOKENS = 16
VOCABULARY = 8192
GB = 1e9
PAPER_S = 5.0
PAPER_IDLE_BYTES = 2e9
PAPER = "paper, 32B on H800"
CYCLES, QUICK_CYCLES = 10, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A Qwen3 with random weights in float32."""

    hidden: int
    layers: int
    slab_bytes: int
    """A power of two that holds one block of 128 tokens of all layers."""


SIZES = {
    "tiny": Size(hidden=256, layers=4, slab_bytes=4 << 20),
    "mid": Size(hidden=1536, layers=6, slab_bytes=8 << 20),
}


@dataclass(slots=True)
class Samples:
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


def _run(size: Size, cycles: int, seed: int) -> Samples:
    with TemporaryDirectory(prefix="rose-bench-") as folder:
        model = _write_model(Path(folder) / "model", size, seed)
        with _engine(model, size, Path(folder)) as (engine, start_s):
            samples = Samples(weights_bytes=engine.status().device_weights_bytes, start_s=start_s)
            rng = Random(seed)
            prompts = [[rng.randrange(VOCABULARY) for _ in range(100)] for _ in range(NUM_REQUESTS)]
            expected = engine.complete(prompts, ANSWER_TOKENS)
            for _ in range(cycles):
                _cycle(engine, prompts, samples)
                samples.answers_equal.append(float(engine.complete(prompts, ANSWER_TOKENS) == expected))
            return samples


def _cycle(engine: EngineControl, prompts: list[list[int]], samples: Samples) -> None:
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


def _figures(name: str, samples: Samples) -> list[Figure]:
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


@contextmanager
def _engine(model: Path, size: Size, folder: Path) -> Iterator[tuple[EngineControl, float]]:
    """A rollout engine in a pool, and how long it took to start; both stopped in any case."""
    runtime_dir = folder / "run"
    runtime_dir.mkdir(mode=0o700)
    daemon = start_daemon(
        POOL,
        num_slabs=NUM_SLABS,
        slab_bytes=size.slab_bytes,
        headroom_slabs=HEADROOM_SLABS,
        runtime_dir=runtime_dir,
    )
    config = EngineConfig(
        model=str(model),
        port=free_port(),
        role=Role.ROLLOUT,
        pool=POOL,
        gate="off",  # nobody serves here
        vllm_args=(
            *("--served-model-name", "policy", "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", "1024", "--max-num-seqs", str(NUM_REQUESTS), "--disable-uvicorn-access-log"),
        ),
    )
    env = {**ENGINE_ENV, "ROSE_RUNTIME_DIR": str(runtime_dir), "ROSE_CACHE_DIR": str(folder / "cache")}
    try:
        with ProcessGroup() as group, closing(EngineControl(config.url, "policy")) as control:
            started_s = time.monotonic()
            server = group.start(launch.engine_process(config, folder / "engine.log", extra_env=env))
            launch.wait_engine_ready(server, config, Settings.from_environment())
            yield control, time.monotonic() - started_s
    finally:
        daemon.stop()


def _write_model(folder: Path, size: Size, seed: int) -> Path:
    # Heavy, and not needed for --help.
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from rose.demo.tokenizer import numbered_words, word_tokenizer

    tokenizer = word_tokenizer(numbered_words(100), VOCABULARY)
    config = Qwen3Config(
        hidden_size=size.hidden,
        intermediate_size=4 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.hidden // 128,
        num_key_value_heads=max(1, size.hidden // 384),
        head_dim=128,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).to(torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure))
