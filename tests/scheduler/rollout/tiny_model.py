"""A tiny random Qwen3 checkpoint with a word-level tokenizer, made locally."""

from pathlib import Path
from typing import Any

VOCABULARY = 320


def make_tiny_qwen3(folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint (about 1 MB) into `folder` and return it."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    model: Any = Qwen3ForCausalLM
    model(config).to(dtype=torch.bfloat16).save_pretrained(folder)
    words = {"<bos>": 0, "<eos>": 1, "<unk>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrap: Any = PreTrainedTokenizerFast
    tokenizer = wrap(
        tokenizer_object=raw,
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = "{% for m in messages %}w3 {{ m['content'] }} {% endfor %}w4"
    tokenizer.save_pretrained(folder)
    return folder
