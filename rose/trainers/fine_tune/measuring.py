"""Measures the pieces of a model's passes before it trains, on random tokens, without changing its weights.

Promises that the model's gradients and torch's random state are the same afterwards. If the model has the
hooks of PassBorders, each piece runs under a grant. Source: LeMix §IV-A.
"""

from collections.abc import Sequence
from typing import Any

import torch

REPEATS = 6
"""The passes at each length. PieceTimes leaves out the first measurement of a piece."""


def measure_pieces(model: Any, lengths: Sequence[int], repeats: int = REPEATS) -> int:
    """Runs forward and backward passes of single sequences.

    Returns how many bytes a token keeps from its forward to its backward pass.
    """
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    was_training = model.training
    model.train()
    token_bytes = 0
    with torch.random.fork_rng(devices=devices):
        for length in lengths:
            for _ in range(repeats):
                tokens = torch.randint(0, model.config.vocab_size, (1, length), device=device)
                kept = _KeptBytes(model)
                with torch.autograd.graph.saved_tensors_hooks(kept.save, lambda tensor: tensor):
                    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
                loss.backward()
                model.zero_grad(set_to_none=True)
                token_bytes = max(token_bytes, kept.num_bytes // length)
    model.train(was_training)
    return token_bytes


class _KeptBytes:
    """The tensors that autograd keeps of a forward pass, except weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
        self._kept: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        return sum(self._kept.values())

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self._kept[storage.data_ptr()] = storage.nbytes()
        return tensor
