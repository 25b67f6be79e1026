"""Two models and their tokenizers: random weights, made locally, small enough for one CPU core.

Owns: their shapes, and writing them as Hugging Face checkpoints with a tokenizer beside them. Promises: the
same spec and seed give the same bits; no hub access; KV geometry that fits the slab pool. Never trains,
never serves. ``python -m rose.measure.models FOLDER WORD...`` makes both; the rollout model speaks the words.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

PAD, END, UNKNOWN = "<pad>", "<end>", "<unk>"
SPECIAL_WORDS = (PAD, END, UNKNOWN)
CPU_BLOCK_TOKENS = 128
"""vLLM's KV block on a CPU."""
KV_ELEMENT_BYTES = 4
"""Engines compute in float32: in bfloat16 a row's rounding depends on who shares its batch, and a
random model's best two tokens are close enough for that to show (seen: 2 of 96 greedy answers differed from
stock vLLM's)."""
DEFAULT_SLAB_BYTES = 2 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shape of a decoder-only model; sizes in elements, positions in tokens."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads != 0:
            raise ValueError(f"{self.num_heads} heads can't share {self.num_kv_heads} KV heads evenly")

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one layer's KV (keys and values) for one CPU block."""
        return 2 * CPU_BLOCK_TOKENS * self.num_kv_heads * self.head_dim * KV_ELEMENT_BYTES

    def check_fits_slab(self, slab_bytes: int = DEFAULT_SLAB_BYTES) -> None:
        """Raises ValueError unless one block of all layers packs into a slab of ``slab_bytes``."""
        block_bytes = self.layer_block_bytes
        if slab_bytes % block_bytes != 0 or self.num_layers * block_bytes > slab_bytes:
            raise ValueError(
                f"{self.num_layers} layers x {block_bytes} bytes per block don't pack into a slab of "
                f"{slab_bytes} bytes"
            )


SERVING_SPEC = ModelSpec(
    hidden_size=512,
    intermediate_size=2048,
    num_layers=6,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=8192,
    max_positions=4096,
)
"""Qwen2: a decode step took 12 ms for 1 sequence, 20 ms for 16, on one otherwise idle EPYC core."""

ROLLOUT_SPEC = ModelSpec(
    hidden_size=128,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    vocab_size=64,
    max_positions=1024,
)
"""Qwen3: one optimizer step over a batch of trajectories takes about a second on one core. Its vocabulary is
small, so that a random model often says a word that means something."""


def make_serving_model(directory: Path, spec: ModelSpec = SERVING_SPEC, seed: int = 0) -> Path:
    """Writes a random Qwen2 checkpoint (bfloat16) and its tokenizer; returns ``directory``."""
    from transformers import Qwen2Config

    config = Qwen2Config(**_shared_settings(spec))
    words = numbered_words(spec.vocab_size // 2)
    return _write(directory, spec, config, word_tokenizer(words, spec.vocab_size), seed)


def make_rollout_model(
    directory: Path, spec: ModelSpec = ROLLOUT_SPEC, seed: int = 0, words: Sequence[str] = ()
) -> Path:
    """Writes a random Qwen3 checkpoint (bfloat16) that speaks ``words``; returns ``directory``.

    The trainer keeps its own float32 master copy and publishes bfloat16, so a worker that starts from this
    checkpoint starts bit-equal to the trainer's first published version.
    """
    from transformers import Qwen3Config

    config = Qwen3Config(head_dim=spec.head_dim, **_shared_settings(spec))
    return _write(directory, spec, config, word_tokenizer(words, spec.vocab_size), seed)


def word_tokenizer(words: Sequence[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """A tokenizer of one token per whitespace-separated word, padded with fillers up to ``vocab_size`` ids.

    Fillers exist so that every id a model of ``vocab_size`` can sample decodes to something.

    Raises:
        ValueError: a word repeats, contains whitespace, or the words don't fit.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    listed = [*SPECIAL_WORDS, *words]
    if len(set(listed)) != len(listed):
        raise ValueError("words repeat, or collide with the special words")
    if any(word.split() != [word] for word in listed):
        raise ValueError("a word must be non-empty and hold no whitespace")
    if len(listed) > vocab_size:
        raise ValueError(f"{len(listed)} words don't fit into a vocabulary of {vocab_size}")
    listed += [f"<extra{index}>" for index in range(vocab_size - len(listed))]
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(listed)}, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def numbered_words(count: int) -> list[str]:
    """``count`` meaningless words, for a model whose text nobody reads (the serving side's)."""
    return [f"w{index}" for index in range(count)]


def _shared_settings(spec: ModelSpec) -> dict[str, object]:
    return {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "initializer_range": spec.init_std,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
    }


def _write(
    directory: Path,
    spec: ModelSpec,
    config: "PreTrainedConfig",
    tokenizer: "PreTrainedTokenizerFast",
    seed: int,
) -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    spec.check_fits_slab()
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    directory.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


if __name__ == "__main__":
    _folder = Path(sys.argv[1])
    make_serving_model(_folder / "serving")
    make_rollout_model(_folder / "rollout", words=sys.argv[2:])
