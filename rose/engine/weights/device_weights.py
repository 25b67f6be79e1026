"""The memory that a model's weights take on the device, and the storages that they lie in.

On a CPU a layer may have a packed copy beside its parameters. A storage that several of them share counts
once. Never changes the model.
"""

from __future__ import annotations

import torch

from rose.engine.weights.packed import packed_copy


def device_bytes(model: torch.nn.Module) -> int:
    """Returns the bytes that the model's weights take on the device: parameters, and on a CPU their packed
    copies.

    Not every layer that vLLM dispatches on a CPU has such a copy: without AVX-512, oneDNN accepts no bfloat16
    matrix, and the layer computes with its parameter.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    held = {storage._cdata: storage for storage in storages(model)}
    in_library_bytes = 0
    for module in model.modules():
        kept = packed_copy(module)
        tensors = [each for each in kept if isinstance(each, torch.Tensor)]
        held |= {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
        if kept and not tensors:  # a handle of oneDNN, which does not tell the size of its copy
            parameters, _ = get_layerwise_info(module).restore_metadata
            in_library_bytes += parameters["weight"].nbytes
    return in_library_bytes + sum(storage.nbytes() for storage in held.values())


def storages(model: torch.nn.Module) -> list[torch.UntypedStorage]:
    """Returns the storages of all parameters, each once: a head tied to the embedding shares its storage."""
    # A parameter is on the meta device where a reload failed half-way.
    found = (each.untyped_storage() for each in model.parameters() if not each.is_meta)
    return list({storage._cdata: storage for storage in found}.values())
