"""Examples as token sequences with their labels, and batches of them.

Promises that a prompt's tokens and padding never enter the loss, and that a completion ends with the model's
end token unless it was cut off.
"""

from collections.abc import Sequence
from typing import Any, TypedDict

import torch

from rose.errors import ConfigError
from rose.node.fine_tune.examples import Example

IGNORED = -100
"""The label that torch's cross entropy leaves out."""


class TokenSequence(TypedDict):
    """One example as tokens, with the labels that count for the loss."""

    input_ids: list[int]
    labels: list[int]


class Sequences(torch.utils.data.Dataset[TokenSequence]):
    """The examples, each cut to ``length`` tokens. Raises: ConfigError if none then has a token to learn."""

    def __init__(self, examples: Sequence[Example], tokenizer: Any, length: int) -> None:
        made = [_tokenized(each, tokenizer, length) for each in examples]
        self._kept = [each for each in made if any(label != IGNORED for label in each["labels"][1:])]
        if not self._kept:
            raise ConfigError(
                f"of {len(examples)} examples none has a token to learn within its first {length} tokens: "
                "shorten the prompts or raise --fine-tune-tokens"
            )
        pad = tokenizer.pad_token_id
        self.pad_id = int(pad if pad is not None else tokenizer.eos_token_id or 0)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest example."""
        return max(len(each["input_ids"]) for each in self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> TokenSequence:
        return self._kept[index]


def padded(batch: Sequence[TokenSequence], pad_id: int) -> dict[str, torch.Tensor]:
    """Makes a batch whose sequences are padded on the right to the length of the longest."""
    longest = max(len(each["input_ids"]) for each in batch)

    def filled(key: str, value: int) -> torch.Tensor:
        rows: list[list[int]] = [each[key] for each in batch]  # type: ignore[literal-required]
        return torch.tensor([[*row, *([value] * (longest - len(row)))] for row in rows])

    lengths = torch.tensor([len(each["input_ids"]) for each in batch])
    return {
        "input_ids": filled("input_ids", pad_id),
        "labels": filled("labels", IGNORED),
        "attention_mask": (torch.arange(longest)[None] < lengths[:, None]).long(),
    }


def _tokenized(example: Example, tokenizer: Any, length: int) -> TokenSequence:
    prompt = tokenizer.encode(example.prompt) if example.prompt else []
    answer = tokenizer.encode(example.completion, add_special_tokens=not prompt)
    end = tokenizer.eos_token_id
    ids = [*prompt, *answer, *([end] if end is not None and answer[-1:] != [end] else [])]
    labels = [*([IGNORED] * len(prompt)), *ids[len(prompt) :]]
    return TokenSequence(input_ids=ids[:length], labels=labels[:length])
