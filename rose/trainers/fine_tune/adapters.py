"""Low-rank adapters (LoRA), and the merged weights that go live.

Owns the adapters, and a buffer for each merged weight. Promises that the model's own weights don't change
before ``merge_for_good``, and that merged weights are published under the checkpoint's names. An adapter is a
torch parametrization, so the model's code doesn't know of it.
Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models (2021), with alpha = 2 * rank.
"""

import math
from typing import Any

import torch
from torch.nn.utils import parametrize

from rose.errors import ConfigError
from rose.trainers.fine_tune.borders import decoder_layers
from rose.transfer.publish.file_names import as_in_files
from rose.transfer.publish.published_dtypes import PublishedDtypes
from rose.transfer.publish.publisher import WeightPublisher

_SCALE = 2.0
"""alpha / rank."""


class LowRank(torch.nn.Module):
    """Adds a trained product of two thin matrices to a frozen weight. The product is zero at first."""

    def __init__(self, weight: torch.Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.down = torch.nn.Parameter(torch.empty(rank, columns, device=weight.device))
        self.up = torch.nn.Parameter(torch.zeros(rows, rank, device=weight.device))
        torch.nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Returns the sum."""
        return weight + _SCALE * (self.up @ self.down)


class Adapters:
    """The adapters of all linear layers in a model's decoder. Nothing else in the model is trained."""

    def __init__(self, model: torch.nn.Module, rank: int) -> None:
        """Raises: ConfigError if the decoder has no linear layer, or only ones too narrow for the rank."""
        self.model = model
        self.weights: dict[str, Any] = dict(model.state_dict(keep_vars=True))
        """The whole weights, by the names that the model had for them. They are up to date after ``merge``.
        """
        model.requires_grad_(False)
        in_layers = {id(part) for layer in decoder_layers(model) for part in layer.modules()}
        self._merged: list[tuple[torch.nn.Linear, torch.Tensor]] = []
        for name, part in list(model.named_modules()):
            if isinstance(part, torch.nn.Linear) and id(part) in in_layers and rank < min(part.weight.shape):
                buffer = part.weight.detach().clone()
                self.weights[f"{name}.weight"] = buffer
                parametrize.register_parametrization(part, "weight", LowRank(part.weight, rank))
                self._merged.append((part, buffer))
        if not self._merged:
            raise ConfigError(f"--fine-tune-lora-rank {rank}: the model has no linear layer wider than that")

    def merge(self) -> None:
        """Copies the weights with which the model computes now into ``weights``."""
        with torch.no_grad():
            for part, buffer in self._merged:
                buffer.copy_(part.weight)


def merge_for_good(model: torch.nn.Module) -> None:
    """Adds the adapters to the model's own weights, and removes the adapters."""
    for part in list(model.modules()):
        if parametrize.is_parametrized(part, "weight"):
            parametrize.remove_parametrizations(part, "weight")


class MergingPublisher(WeightPublisher):
    """Publishes a model with adapters as whole weights."""

    def __init__(self, adapters: Adapters, relay_url: str, run_id: str, dtypes: PublishedDtypes) -> None:
        super().__init__(as_in_files(adapters.model, adapters.weights), relay_url, run_id, dtypes)
        self._adapters = adapters

    def _begin(self) -> None:
        self._behind.settle()  # it may still read what is merged before
        self._adapters.merge()
        super()._begin()
