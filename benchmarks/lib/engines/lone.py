"""One rollout engine in a pool of its own, with a random model: for benchmarks of weights and activation.

Owns the engine, its pool and the model's files. Promises that everything is stopped with the context.
"""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rose.config import Settings
from rose.demo.processes import ENGINE_ENV
from rose.memory.daemon.daemon import start_daemon
from rose.node import launch
from rose.node.checks import free_port
from rose.node.control import EngineControl
from rose.node.node_config import EngineConfig
from rose.node.processes import ProcessGroup
from rose.types import Role

POOL = "lone"
NUM_SLABS = 24
HEADROOM_SLABS = 2
VOCABULARY = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A Qwen3 with random weights in float32."""

    hidden: int
    layers: int
    slab_bytes: int
    """A power of two that holds one block of 128 tokens of all layers."""


@contextmanager
def lone_engine(
    model: Path, slab_bytes: int, folder: Path, num_requests: int
) -> Iterator[tuple[EngineControl, float]]:
    """A rollout engine in a pool, and how long it took to start; both stopped in any case."""
    runtime_dir = folder / "run"
    runtime_dir.mkdir(mode=0o700)
    daemon = start_daemon(
        POOL,
        num_slabs=NUM_SLABS,
        slab_bytes=slab_bytes,
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
            *("--max-model-len", "1024", "--max-num-seqs", str(num_requests), "--disable-uvicorn-access-log"),
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


def write_model(folder: Path, size: Size, seed: int) -> Path:
    """A checkpoint with a tokenizer."""
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
