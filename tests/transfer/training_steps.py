"""The transfer tests train weights with this step."""

import torch

Weights = dict[str, torch.Tensor]
"""A trainer's tensors by name."""


def step(weights: Weights) -> None:
    """Moves every weight a little, in place; in bf16 only some of them change."""
    for tensor in weights.values():
        tensor += 1e-4 * torch.randn_like(tensor)
