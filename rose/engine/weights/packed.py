"""The packed copies with which layers compute on a CPU, and names of parameters.

Owns the knowledge of where vLLM's CPU backend keeps a packed weight: an unquantized layer's ``cpu_linear``
closes over it, and the kernel of an int8 layer has a handle of oneDNN. A linear layer then drops its weight,
while an output head and an embedding keep theirs.
"""

from __future__ import annotations

from typing import Any

import torch

_HANDLE = "dnnl_handler"


def unwrapped(name: str) -> str:
    """Returns the name that a module or parameter has in a model without wrappers for LoRA adapters."""
    return f"{name}.".replace(".base_layer.", ".")[:-1]


def packed_copy(module: torch.nn.Module) -> list[Any]:
    """Returns what a layer keeps beside its parameters: what its ``cpu_linear`` closes over, and the handle
    of an int8 kernel.

    The wrapper of a layer that may have a LoRA adapter hands on all of the layer's attributes, and has none.
    """
    function: Any = vars(module).get("cpu_linear")
    kept = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    handle = getattr(_int8_kernel(module), _HANDLE, None)
    return kept if handle is None else [*kept, handle]


def drop_packed_copy(module: torch.nn.Module) -> None:
    """Frees what packed_copy() returns. The layer computes again once its weights have been loaded again."""
    layer: Any = module
    if "cpu_linear" in vars(layer):
        layer.cpu_linear = None
    kernel = _int8_kernel(layer)
    if hasattr(kernel, _HANDLE):
        setattr(kernel, _HANDLE, None)


def _int8_kernel(module: torch.nn.Module) -> Any:
    return getattr(vars(module).get("scheme"), "kernel", None)


def is_packed(module: torch.nn.Module) -> bool:
    """Returns whether a layer computes with a packed copy, which may be freed while the weights are off the
    device."""
    return bool(packed_copy(module)) or vars(module).get("cpu_linear", module) is None
