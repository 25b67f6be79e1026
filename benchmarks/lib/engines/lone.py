"""One rollout engine in a pool of its own, with a random model: for benchmarks of weights and activation.

Owns the engine, its pool and the model's files. Promises that everything is stopped with the context.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rose.measure.rig import Rig
from rose.node.control import EngineControl
from rose.types import GateMode, Role

NUM_SLABS = 24
HEADROOM_SLABS = 2
VOCABULARY = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class LoneModel:
    """A Qwen3 with random weights in float32."""

    hidden: int
    layers: int
    slab_bytes: int
    """A power of two that holds one block of 128 tokens of all layers."""


@contextmanager
def lone_engine(model: Path, slab_bytes: int, num_requests: int) -> Iterator[tuple[EngineControl, float]]:
    """Yields a rollout engine in a pool of its own, and the seconds that its start took."""
    with Rig() as rig:
        pool = f"lone-{os.getpid()}"
        rig.pool(pool, num_slabs=NUM_SLABS, slab_bytes=slab_bytes, headroom_slabs=HEADROOM_SLABS)
        started_s = time.monotonic()
        rig.start_engine(
            "lone",
            Role.ROLLOUT,
            model=model,
            pool=pool,
            gate=GateMode.OFF,  # nobody serves here
            vllm_args=("--max-num-seqs", str(num_requests)),
        )
        yield rig.wait_engine("lone"), time.monotonic() - started_s


def write_model(folder: Path, size: LoneModel, seed: int) -> Path:
    """A checkpoint with a tokenizer."""
    # Heavy, and not needed for --help.
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from rose.measure.models import numbered_words, word_tokenizer

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
