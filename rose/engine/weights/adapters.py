"""Whether a LoRA adapter fits the engine's base model: its modules, their shapes, its rank.

Owns the check, which each rank makes by the names and shapes of its own layers. In a pipeline, the ranks of
each stage check that stage's layers. vLLM checks none of this: it skips modules that the model does not have,
and copies a matrix that is too small into a part of its place. Never loads an adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.lora.utils import parse_fine_tuned_lora_name
from vllm.model_executor.models.utils import is_pp_missing_parameter

from rose.transfer.adapters.description import (
    TENSORS_FILE,
    MatrixPair,
    is_target,
    max_rank,
    pairs,
    read_description,
    targets,
)
from rose.transfer.format.checkpoint import read_checkpoint
from rose.transfer.format.manifest import AdapterBody

ModuleShapes = dict[str, tuple[int, int] | None]
"""The base model's modules that an adapter may change: outputs and inputs, None where they are not known."""


def check_fits(manager: Any, config: VllmConfig, folder: Path) -> None:
    """Checks an adapter's folder against the rank's model. ``manager``: vLLM's LoRAModelManager.

    Raises: ValueError with the names and numbers, FrameError, OSError.
    """
    adapter = read_description(folder)
    _check_base(adapter, config)
    assert config.lora_config is not None
    most = config.lora_config.max_lora_rank
    if (rank := max_rank(adapter)) > most:
        raise ValueError(f"it has rank {rank}, the engine takes at most {most}: use --max-lora-rank {rank}")
    found = pairs((spec for spec, _ in read_checkpoint(folder / TENSORS_FILE).values()), adapter)
    _check_modules(_renamed(found, manager.model), manager, adapter)


def _check_base(adapter: AdapterBody, config: VllmConfig) -> None:
    served = config.model_config.served_model_name
    names = [str(config.model_config.model), *([served] if isinstance(served, str) else served or [])]
    if adapter.base not in names:
        served_as = " alias ".join(dict.fromkeys(names))
        raise ValueError(
            f"it was trained on {adapter.base}, and the engine serves {served_as}: publish it with base= one "
            "of these names if that is the same model"
        )


def _renamed(found: Mapping[str, MatrixPair], model: Any) -> dict[str, MatrixPair]:
    """Returns the pairs by the names that modules have in vLLM's model."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    mapper = mapper.get_rename_mapper() if mapper is not None else None
    return {
        parse_fine_tuned_lora_name(f"base_model.model.{module}.lora_A.weight", mapper)[0]: pair
        for module, pair in found.items()
    }


def _shapes(manager: Any) -> ModuleShapes:
    """Returns the modules by their names in the checkpoint, where vLLM has several in one."""
    shapes: ModuleShapes = {}
    for name, module in manager.modules.items():
        shapes.update(_unpacked(name, module.base_layer, manager.packed_modules_mapping))
    return shapes


def _unpacked(name: str, layer: Any, packed: Mapping[str, list[str]]) -> Iterator[tuple[str, Any]]:
    parent, _, own = name.rpartition(".")
    inputs = getattr(layer, "input_size", None)
    if own not in packed or len(packed[own]) == 1:
        outputs = getattr(layer, "output_size", None)
        yield name, (outputs, inputs) if outputs is not None and inputs is not None else None
        return
    sizes = _part_sizes(layer, len(packed[own]))
    for number, part in enumerate(packed[own]):
        known = sizes is not None and inputs is not None
        yield f"{parent}.{part}", (sizes[number], inputs) if sizes is not None and known else None


def _part_sizes(layer: Any, num_parts: int) -> list[int] | None:
    """Returns the outputs of the parts of a packed layer, all ranks together."""
    if hasattr(layer, "total_num_kv_heads"):  # output_sizes counts heads that several ranks hold
        keys = layer.total_num_kv_heads
        sizes = [layer.total_num_heads * layer.head_size, keys * layer.head_size, keys * layer.v_head_size]
    else:
        sizes = list(getattr(layer, "output_sizes", ()))
    return sizes if len(sizes) == num_parts else None


def _check_modules(found: Mapping[str, MatrixPair], manager: Any, adapter: AdapterBody) -> None:
    shapes = _shapes(manager)
    for module, pair in sorted(found.items()):
        if is_pp_missing_parameter(f"{module}.", manager.model):
            continue  # another stage of the pipeline has it
        if module not in shapes:
            raise ValueError(
                f"it changes {module}, which is none of the base model's modules that an adapter may change "
                "here"
            )
        wanted = shapes[module]
        if wanted is not None and (pair.up[0], pair.down[1]) != wanted:
            raise ValueError(
                f"it changes {module} with {pair.up[0]} outputs and {pair.down[1]} inputs; in the base model "
                f"that has {wanted[0]} outputs and {wanted[1]} inputs"
            )
    names = targets(adapter)
    missing = [
        module for module in shapes if module not in found and any(is_target(module, name) for name in names)
    ]
    if missing:
        raise ValueError(
            f"it has no tensors for {missing[0]}, a target of the {len(found)} that it changes"
            f"{f' (and none for {len(missing) - 1} more)' if len(missing) > 1 else ''}"
        )
