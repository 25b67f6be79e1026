"""The packed copies with which layers compute on a CPU, and names of parameters.

Owns the knowledge of where vLLM's CPU backend keeps a packed weight: an unquantized layer's ``cpu_linear``
closes over it. A linear layer then drops its weight, while an output head and an embedding keep theirs.
"""

from __future__ import annotations

from typing import Any

import torch


def unwrapped(name: str) -> str:
    """Returns the name that a module or parameter has in a model without wrappers for LoRA adapters."""
    return f"{name}.".replace(".base_layer.", ".")[:-1]


def packed_copy(module: torch.nn.Module) -> list[Any]:
    """Returns what a layer's ``cpu_linear`` keeps: vLLM stores packed weights nowhere else.

    The wrapper of a layer that may have a LoRA adapter hands on all of the layer's attributes, and has none.
    """
    function: Any = vars(module).get("cpu_linear")
    return [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]


def is_packed(module: torch.nn.Module) -> bool:
    """Whether a layer computes with a packed copy, which may be freed while the weights are off the
    device."""
    return bool(packed_copy(module)) or vars(module).get("cpu_linear", module) is None
