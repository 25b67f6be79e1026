"""Loads layers of a live model from tensors of a checkpoint, through vLLM's layerwise reload.

Owns what that reload leaves out: layers that were half loaded, and layers that compute with something made of
the weights of another. Layers that are not named keep what they have.
"""

from collections.abc import Collection, Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Any

import torch

from rose.engine.weights.packed import is_packed


@dataclass(frozen=True, slots=True)
class LiveModel:
    """A model that an engine computes with, and vLLM's ModelConfig of it."""

    module: torch.nn.Module
    config: Any


def load_layers(
    model: LiveModel, layers: Collection[torch.nn.Module], tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Loads these layers, with all modules inside them; ``[model.module]`` loads all of a model.

    tensors: all from which something goes into one of the layers. What goes from them into another layer is
    loaded there, too. Raises: whatever loading raises, with some layers loaded.
    """
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )
    from vllm.utils.torch_utils import set_default_torch_dtype

    modules = {module for layer in layers for module in layer.modules()}
    keep_onednn_scales()
    _pack_experts_anew(modules)
    # vLLM makes some kernels for the default type of the moment.
    with set_default_torch_dtype(model.config.dtype):
        for layer in layers:
            initialize_layerwise_reload(layer)
        try:
            load_weights: Any = model.module.load_weights
            load_weights(tensors)
        except BaseException:
            _forget_half_loaded(modules)
            raise
        finally:
            for layer in layers:
                finalize_layerwise_reload(layer, model.config)
        process_dependants(model, modules)


def process_dependants(model: LiveModel, changed: Set[torch.nn.Module]) -> None:
    """Has each layer whose own parameters may be as they were, but which computes with something made of a
    changed layer's, make that again.
    """
    for layer in dependants(model.module, changed):
        if is_packed(layer):
            method: Any = layer.quant_method
            method.process_weights_after_loading(layer)
        else:
            process: Any = layer.process_weights_after_loading
            process(model.config.dtype)


def dependants(model: torch.nn.Module, changed: Set[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """Yields what process_dependants() processes: layers that keep a weight beside its packed copy, as an
    output head does on a CPU, tied or not; attention that keeps products of weights of layers inside it.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    own = (each for module in changed for each in module.parameters(recurse=False) if each.numel() > 0)
    storages = {each.untyped_storage()._cdata for each in own}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if is_packed(module):
            is_dependant = weight is not None and weight.untyped_storage()._cdata in storages
        else:
            is_done = module in changed or not is_deferred_attention_layer(module)
            is_dependant = not is_done and not changed.isdisjoint(module.modules())
        if is_dependant:
            yield module


def keep_onednn_scales() -> None:
    """Lets a kernel of oneDNN for int8 keep the scales that it was made with. Calling it twice is harmless.

    Why: the kernel has their address alone. The layerwise reload makes a kernel for the new scales, copies
    them to where the old ones lie and frees them, so the kernel would read memory of something else: the
    engine answers token 0 for ever. vLLM 0.32.
    """
    from vllm import _custom_ops as ops

    make: Any = ops.create_onednn_scaled_mm
    if hasattr(make, "_rose_made_of"):
        return

    def create_onednn_scaled_mm(weight: torch.Tensor, weight_scales: torch.Tensor, *args: Any) -> Any:
        handler = make(weight, weight_scales, *args)
        handler.rose_scales = weight_scales
        return handler

    create_onednn_scaled_mm._rose_made_of = make  # type: ignore[attr-defined]
    ops.create_onednn_scaled_mm = create_onednn_scaled_mm


def _pack_experts_anew(modules: Iterable[torch.nn.Module]) -> None:
    """Has each layer of experts build its kernel again, which on a CPU packs the new weights.

    vLLM packs them only where there is no kernel yet, and copies weights as they are loaded into the packed
    storage otherwise.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in modules:
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def _forget_half_loaded(modules: Iterable[torch.nn.Module]) -> None:
    """Resets layers whose loading broke off.

    vLLM's finalize then restores the layers that are not done, and the next reload finds no tensors that
    still wait for the rest of theirs.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for module in modules:
        info = get_layerwise_info(module)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights.clear()
