"""Measures the pieces of a model's passes before it trains, on random tokens, without changing its weights.

Promises that the model's gradients and torch's random state are the same afterwards. If the model has the
hooks of PassBorders, each piece runs under a grant. Source: LeMix §IV-A.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
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
                with kept.watching():
                    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
                loss.backward()
                model.zero_grad(set_to_none=True)
                token_bytes = max(token_bytes, kept.num_bytes // length)
    model.train(was_training)
    return token_bytes


class _KeptBytes:
    """The tensors that autograd keeps of a forward pass, except weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._weights = _storages(model.parameters())
        """Where weights lie. Those that FSDP shards are whole only while their module computes."""
        self._kept: dict[int, int] = {}

    @property
    def num_bytes(self) -> int:
        return sum(self._kept.values())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Counts what is kept of the passes meanwhile."""
        with ExitStack() as stack:
            for part in self._model.modules():
                if any(_is_shard(weight) for weight in part.parameters(recurse=False)):
                    stack.callback(part.register_forward_pre_hook(self._begin).remove)
                    stack.callback(part.register_forward_hook(self._end).remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor))
            yield

    def _begin(self, part: torch.nn.Module, *_: object) -> None:
        self._weights |= _storages(part.parameters(recurse=False))

    def _end(self, part: torch.nn.Module, *_: object) -> None:
        self._weights -= _storages(part.parameters(recurse=False))

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._weights:
            self._kept[storage.data_ptr()] = storage.nbytes()
        return tensor


def _storages(weights: Iterable[torch.Tensor]) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in weights if not _is_shard(each)}


def _is_shard(weight: torch.Tensor) -> bool:
    return hasattr(weight, "to_local")  # a DTensor has no storage of its own
