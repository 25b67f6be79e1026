"""A tiny model that says what its script says, so that agents with tools have something to read.

Owns: the scripts, and a checkpoint in which each piece of text is one token and follows one other token. A
chat's last word chooses what comes. Promises: if a grammar forbids that, the model takes its second choice,
which depends on all that was said. So it also makes forced tool calls, schemas and expressions. Never trains,
never serves. ``python -m rose.measure.scripted FOLDER`` makes one.
"""

import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

END = "<|end|>"
THINK, THOUGHT = "<think>", "</think>"
CALL, CALLED = "<tool_call>", "</tool_call>"
SCRIPTS = {
    "[plain]": [" The", " answer", " is", "n", "a", "Ã", "¯", "v", "e", ",", " of", " course", ".", END],
    "[think]": [THINK, " let", " me", " see", THOUGHT, "\n\n", "Done", ", then", "!", END],
    "[call]": [
        *(CALL, '\n{"name": ', '"add"', ', "arguments": ', '{"a": ', "1", ', "b": ', "22", "}}\n"),
        *(CALLED, END),
    ],
    "[json]": ["<|python_tag|>", '{"name": "add"', ', "parameters": ', '{"a": 1', ', "b": 2', "2}}", END],
    "[python]": ["[add", "(a=", "1,", " b", "=22", ")]", END],
    "[granite]": [
        *("Here is", " my thought", " process:", " first", " things", " go first."),
        *("\nHere is", " my response:", " Finally", " settled", END),
    ],
    "[count]": [*(" one", " two", " three", " four", " five", " six", " seven", " eight", " nine"), END],
}
"""What is said after each word. A single character that isn't ASCII stands for a byte, as in GPT-2."""
HIDDEN = 128
CONTEXT_TOKENS = 16384


def make_scripted_model(folder: Path) -> Path:
    """Writes the checkpoint, about 1 MB."""
    tokenizer = _tokenizer()
    _write_weights(folder, tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] if m['content'] else '' }}{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    pieces = [piece for script in SCRIPTS.values() for piece in script if piece not in (*alphabet, END)]
    roles = [f"<|{role}|>" for role in ("system", "user", "assistant", "tool", "developer")]
    added = [*SCRIPTS, *pieces, *roles]
    raw.add_tokens([AddedToken(text, normalized=False) for text in dict.fromkeys(added)])
    wrap: Any = PreTrainedTokenizerFast
    return wrap(tokenizer_object=raw, eos_token=END, clean_up_tokenization_spaces=False)


def _write_weights(folder: Path, tokenizer: Any) -> None:
    """The head knows the embedding of each token's predecessor; random layers add a little of the context."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    make: Any = Qwen3ForCausalLM
    model = make(config)
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight.normal_()
        head = model.lm_head.weight.normal_(std=0.05)
        for first, script in SCRIPTS.items():
            ids = [tokenizer.convert_tokens_to_ids(piece) for piece in (first, *script)]
            for before, after in pairwise(ids):
                head[after] += 0.2 * embeddings[before]
    model.to(dtype=torch.float32).save_pretrained(folder)


if __name__ == "__main__":
    make_scripted_model(Path(sys.argv[1]))
