"""Two tiny architectures with random weights, and successive versions of one of them.

The serving model is a Qwen2 in float32 with one KV block per slab, the rollout model a Qwen3 with two, so
that slabs mean different things to the two engines. Float32, which vLLM must be told as it would choose
bfloat16, for greedy comparisons under changing batches: two bfloat16 logits are often equal, and then the
batch decides.
"""

from pathlib import Path
from typing import Any

from rose.demo.tokenizer import numbered_words, word_tokenizer
from rose.messages import WeightUpdate
from rose.transfer.checkpoint import checkpoint_state_hash

SLAB_BYTES = 512 << 10
BLOCK_TOKENS = 128
"""vLLM's KV block on a CPU."""
VOCABULARY = 320
MAX_MODEL_LEN = 1024


def make_serving_model(folder: Path) -> Path:
    """A Qwen2 whose blocks take 384 KiB: one per slab."""
    from transformers import Qwen2Config

    return _write(folder, Qwen2Config(num_hidden_layers=6, **_shape(hidden_size=128)), seed=1)


def make_rollout_model(folder: Path, *, version: int = 0, is_tied: bool = False) -> Path:
    """A Qwen3; in float32 its blocks take 256 KiB: two per slab. Tied: bfloat16, head and embedding shared.

    Every version is its own draw of all weights, so no two have a tensor in common.
    """
    from transformers import Qwen3Config

    config = Qwen3Config(num_hidden_layers=4, tie_word_embeddings=is_tied, **_shape(hidden_size=64))
    return _write(folder, config, seed=100 + version, dtype="bfloat16" if is_tied else "float32")


def make_heavy_model(folder: Path, *, version: int = 0) -> Path:
    """A tied Qwen3 whose weights, 50 MiB in bfloat16, show in the memory of its process."""
    from transformers import Qwen3Config

    config = Qwen3Config(num_hidden_layers=4, tie_word_embeddings=True, **_shape(hidden_size=1024))
    return _write(folder, config, seed=200 + version, dtype="bfloat16")


def staged_update(folder: Path, version: str) -> WeightUpdate:
    """What a subscriber posts once the checkpoint in ``folder`` is staged."""
    (path,) = folder.glob("*.safetensors")
    return WeightUpdate(version=version, path=str(path), state_hash=str(checkpoint_state_hash(path)))


def _shape(hidden_size: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": MAX_MODEL_LEN,
        "initializer_range": 0.2,
        "bos_token_id": None,
    }


def _write(folder: Path, config: Any, *, seed: int, dtype: str = "float32") -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer: Any = word_tokenizer(numbered_words(VOCABULARY // 2), VOCABULARY)
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
