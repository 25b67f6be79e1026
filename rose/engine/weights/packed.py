"""Layers of which vLLM's CPU backend computes with a packed copy, and packing one of them anew.

Owns the knowledge of how vLLM packs an unquantized layer: its ``cpu_linear`` closes over the copy, and a
linear layer then drops its weight, while an output head keeps it. A head that is tied to the embedding keeps
the copy and the weight in one module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rose.transfer.format.shard_plan import ShardPlan
from rose.transfer.format.shared_planes import PlanesFile


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayer:
    """One layer with a packed copy of its weight."""

    parameter: str
    """The weight's name in the model."""
    module: torch.nn.Module

    @property
    def keeps_weight(self) -> bool:
        return _weight_of(self.module).numel() > 0

    def computes_with(self, name: str, parameter: torch.Tensor) -> bool:
        """Whether its weight is this parameter; tied ones share their memory under different names."""
        if not self.keeps_weight or parameter.numel() == 0:
            return name == self.parameter
        return _weight_of(self.module).data_ptr() == parameter.data_ptr()

    def pack(self, planes: PlanesFile, plan: ShardPlan) -> None:
        """Packs the weight again: the layer's own where it keeps it, else the mirror's."""
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        module: Any = self.module
        keeps_weight = self.keeps_weight
        if not keeps_weight:
            module.weight = torch.nn.Parameter(self._assembled(planes, plan), requires_grad=False)
        dispatch_cpu_unquantized_gemm(module, remove_weight=not keeps_weight)

    def _assembled(self, planes: PlanesFile, plan: ShardPlan) -> torch.Tensor:
        """Returns the weight as the loader would make it."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        parameters, _ = get_layerwise_info(self.module).restore_metadata
        meta = parameters["weight"]
        weight = torch.zeros(meta.shape, dtype=meta.dtype)
        width: Any = {1: np.uint8, 2: np.uint16, 4: np.uint32}[weight.element_size()]
        flat = weight.view(-1).view(torch.uint8).numpy().view(width)
        specs = {spec.name: spec for spec in planes.layout.tensors}
        for copy in plan.copies:
            if copy.target.name == self.parameter:
                source = planes.tensor(specs[copy.source.name]).reshape(-1)
                target = copy.target.of(flat)
                target[...] = copy.source.of(source).reshape(target.shape)
        return weight


def packed_layers(model: torch.nn.Module) -> list[PackedLayer]:
    """Returns the layers that compute with a packed copy."""
    return [
        PackedLayer(parameter=unwrapped(f"{name}.weight"), module=module)
        for name, module in model.named_modules()
        if packed_copy(module) and getattr(module, "weight", None) is not None
    ]


def unwrapped(name: str) -> str:
    """Returns a parameter's name as it is in a model without wrappers for LoRA adapters."""
    return name.replace(".base_layer.", ".")


def packed_copy(module: torch.nn.Module) -> list[Any]:
    """Returns what a layer's ``cpu_linear`` keeps: vLLM stores packed weights nowhere else.

    The wrapper of a layer that may have a LoRA adapter hands on all of the layer's attributes, and has none.
    """
    function: Any = vars(module).get("cpu_linear")
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def _weight_of(module: torch.nn.Module) -> torch.Tensor:
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    return weight
