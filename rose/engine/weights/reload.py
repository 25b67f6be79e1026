"""Loads all tensors of a checkpoint into a live model, through vLLM's layerwise reload.

Owns what that reload leaves out: layers that were half loaded, and what a model computes with beside the
tensors of its checkpoint.
"""

from collections.abc import Iterable
from typing import Any

import torch


def reload_whole(
    model: torch.nn.Module, model_config: Any, tensors: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Brings a live model to these weights. Raises: whatever loading raises, with some layers loaded."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    _pack_experts_anew(model)
    initialize_layerwise_reload(model)
    try:
        load_weights: Any = model.load_weights
        load_weights(tensors)
    except BaseException:
        _forget_half_loaded(model)
        raise
    finally:
        finalize_layerwise_reload(model, model_config)
    _repack_heads(model)


def _pack_experts_anew(model: torch.nn.Module) -> None:
    """Has each layer of experts build its kernel again, which on a CPU packs the new weights.

    vLLM packs them only where there is no kernel yet, and copies weights as they are loaded into the packed
    storage otherwise.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def _forget_half_loaded(model: torch.nn.Module) -> None:
    """Resets layers whose loading broke off.

    vLLM's finalize then restores the layers that are not done, and the next reload finds no tensors that
    still wait for the rest of theirs.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for module in model.modules():
        info = get_layerwise_info(module)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights.clear()


def _repack_heads(model: torch.nn.Module) -> None:
    """Rebuilds each output head's packed copy from its weight.

    A head tied to the embedding has no tensor of its own in the checkpoint, so layerwise reload skips it, and
    on a CPU it would keep computing with the old weights (seen as equal tokens with logprobs of mixed
    weights).
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
