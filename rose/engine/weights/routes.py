"""How each parameter of a live model takes a change: element by element, or with its whole layer.

Owns the choice. Only parameters with which their layer computes as they were loaded take elements: those of
known kinds of layers that have the shape and the type of the recorded ones. All other layers are loaded again
by vLLM's own layerwise reload: packed and quantized ones, experts, state-space layers. Touches no weight.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from rose.engine.weights.packed import unwrapped
from rose.engine.weights.reload import LiveModel
from rose.engine.weights.shard_recorder import RecordedLoading
from rose.errors import FrameError
from rose.transfer.format.element_routes import ElementRoutes, whole_targets


@dataclass(frozen=True, slots=True)
class Reloading:
    """Layers to load again, and the names of all tensors from which something goes into them."""

    layers: list[torch.nn.Module] = field(default_factory=list)
    tensors: frozenset[str] = frozenset()


class LiveRoutes:
    """The ways from a checkpoint's tensors to one rank's live model."""

    def __init__(
        self, model: LiveModel, loading: RecordedLoading, shared: Set[torch.nn.Module] = frozenset()
    ) -> None:
        """shared: layers that belong to another model and take their changes there."""
        self.model = model
        self._modules = {unwrapped(name): module for name, module in model.module.named_modules()}
        self._targets = {source: set(names) for source, names in loading.computed.items()}
        for copy in loading.plan.copies:
            self._targets.setdefault(copy.source.name, set()).add(copy.target.name)
        for source, names in self._targets.items():
            self._targets[source] = {name for name in names if self.owner(name) not in shared}
        plan = loading.plan
        only_loaded = whole_targets(plan.copies).union(*loading.computed.values())
        self._unclear = set(plan.whole) - set(loading.computed)
        named = {name for names in self._targets.values() for name in names}
        recorded = loading.parameters
        self._with_elements = {
            each for each in named - only_loaded if self._takes_elements(each, recorded[each])
        }
        copies = [copy for copy in plan.copies if copy.target.name in self._with_elements]
        self.elements = ElementRoutes(copies)

    def reloading(self, changed: Collection[str]) -> Reloading:
        """Returns the layers that changes of these tensors have to be loaded into.

        Raises: FrameError where a tensor is read by the loader in a way that leads to no parameter.
        """
        unclear = self._unclear.intersection(changed)
        if unclear:
            raise FrameError(f"only the loader can load {', '.join(sorted(unclear))}")
        tensors, layers = frozenset(changed), dict[torch.nn.Module, None]()
        while True:
            owners = {self.owner(name): None for tensor in tensors for name in self._loaded_whole(tensor)}
            if owners.keys() <= layers.keys():
                return Reloading(list(layers), tensors)
            layers |= owners
            inside = {module for layer in layers for module in layer.modules()}
            tensors = frozenset(
                source
                for source, names in self._targets.items()
                if any(self.owner(name) in inside for name in names)
            )

    @property
    def takes_any(self) -> bool:
        """Whether any tensor goes into a parameter that is the model's own and no other model's."""
        return any(self._targets.values())

    def owner(self, parameter: str) -> torch.nn.Module:
        """Returns the module whose own parameter this is. Raises: FrameError where the model has none."""
        name = parameter.rpartition(".")[0]
        if name not in self._modules:
            raise FrameError(f"the model has no module {name}")
        return self._modules[name]

    def _loaded_whole(self, tensor: str) -> set[str]:
        return {name for name in self._targets.get(tensor, ()) if name not in self._with_elements}

    def live(self, parameter: str) -> torch.Tensor:
        """Returns a parameter as it is now. Raises: FrameError where the model has none of the name."""
        live = getattr(self.owner(parameter), parameter.rpartition(".")[2], None)
        if not isinstance(live, torch.Tensor):
            raise FrameError(f"the model has no parameter {parameter}")
        return live.detach()

    def _takes_elements(self, name: str, recorded: torch.Tensor) -> bool:
        owner = self.owner(name)
        live = getattr(owner, name.rpartition(".")[2], None)
        if not isinstance(live, torch.Tensor) or not _computes_with_parameters(owner):
            return False
        is_as_recorded = live.shape == recorded.shape and live.dtype == recorded.dtype
        return is_as_recorded and live.ndim <= 2 and live.is_contiguous()


def _computes_with_parameters(module: torch.nn.Module) -> bool:
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    method: Any = getattr(module, "quant_method", None)
    if isinstance(module, LinearBase):
        return type(method) is UnquantizedLinearMethod
    if isinstance(module, VocabParallelEmbedding):
        return type(method) is UnquantizedEmbeddingMethod
    kinds = (RMSNorm, GemmaRMSNorm, torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm)
    return isinstance(module, kinds)
