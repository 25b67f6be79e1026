"""A board's page, and a model that trains within a second."""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose._shm import Words


@pytest.fixture
def words(tmp_path: Path) -> Iterator[Words]:
    path = tmp_path / "page"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file:
        yield Words(mmap.mmap(file.fileno(), 4096))


@pytest.fixture
def model() -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=128,
        )
    )
