"""Loads layers of a live model from tensors of a checkpoint, through vLLM's layerwise reload.

Owns what that reload leaves out: layers that were half loaded, and layers that compute with something made
from another layer's weights. Layers that are not named keep their weights.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from rose.engine.weights.packed import is_packed

DRAFTER_PREFIX = "drafter."
"""So begin the names of a run's tensors that are a drafter's, ahead of those of its own checkpoint."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LiveModel:
    """A model that an engine computes with, and vLLM's ModelConfig of it.

    is_drafter: whether it is a drafter from a checkpoint of its own.
    """

    module: torch.nn.Module
    config: Any
    is_drafter: bool = False

    def owns(self, name: str) -> bool:
        """Returns whether a tensor of this name in a run is one of the model's checkpoint."""
        return name.startswith(DRAFTER_PREFIX) == self.is_drafter

    def own(self, tensors: Iterable[tuple[str, T]]) -> Iterator[tuple[str, T]]:
        """Yields the model's tensors of a run by the names of its own checkpoint."""
        return ((name.removeprefix(DRAFTER_PREFIX), each) for name, each in tensors if self.owns(name))


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
    with set_default_torch_dtype(model.config.dtype), _convolutions_noted(model.module, modules):
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
    them to where the old ones lie and frees them. The kernel would then read freed memory, and the engine
    would only answer token 0. Seen with vLLM 0.32.
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


@contextmanager
def _convolutions_noted(model: torch.nn.Module, modules: Set[torch.nn.Module]) -> Iterator[None]:
    """A context in which Mamba2 layers get the weights of their convolutions as these are loaded.

    Why: such a layer computes with a view of the weights that it made at the start. On a CPU vLLM packs the
    loaded weights and drops them, and its reload leaves the view as it was: answers are of mixed weights.
    vLLM 0.32.
    """
    noted: list[Any] = []
    layers: Iterable[Any] = model.modules()
    for layer in layers:
        view = layer._buffers.get("conv_weights")
        if view is not None and layer.conv1d in modules:
            method = layer.conv1d.quant_method
            method.process_weights_after_loading = partial(
                _note_convolution, method.process_weights_after_loading, view
            )
            noted.append(method)
    try:
        yield
    finally:
        for method in noted:
            del method.process_weights_after_loading  # and the class has it again


def _note_convolution(process: Callable[[Any], None], view: torch.Tensor, convolution: Any) -> None:
    with torch.no_grad():
        view.copy_(convolution.weight.view(view.shape))
    process(convolution)


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
