"""What a LoRA adapter is: its configuration as PEFT writes it, and the tensors that belong to it.

Owns the checks that need no base model: the trainer makes them before it publishes, and each engine before it
loads. Whether an adapter fits a base model is the engine's to say (rose/engine/weights/adapters.py). Pure: no
torch, no PEFT.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from rose.transfer.format.layout import TensorSpec
from rose.transfer.format.manifest import AdapterBody

CONFIG_FILE = "adapter_config.json"
TENSORS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.([^.]+))?\.weight")
_REFUSED = (
    *("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "layer_replication"),
    *("alora_invocation_tokens", "use_qalora", "use_bdlora"),
)
"""Parts of PEFT's LoRA that vLLM does not compute."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")
"""Ways to initialize that also change the base model's weights, which engines don't get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixPair:
    """The two matrices that are added to one module of the base model, by their shapes."""

    down: tuple[int, ...]
    """lora_A: (rank, inputs)."""
    up: tuple[int, ...]
    """lora_B: (outputs, rank)."""


def describe(config: Mapping[str, Any], base: str | None = None) -> AdapterBody:
    """Returns the description of an adapter.

    config: adapter_config.json, or `peft_config.to_dict()`. base: the base model's name as engines serve it;
    None: the one in the configuration. Raises: ValueError naming the key.
    """
    plain = {str(key): _plain(value) for key, value in config.items()}
    if base is not None:
        plain["base_model_name_or_path"] = base
    if (kind := str(plain.get("peft_type", "LORA")).upper()) != "LORA":
        raise ValueError(f"peft_type {kind}: only LORA adapters can be published")
    if not plain.get("base_model_name_or_path"):
        raise ValueError("base_model_name_or_path is not set: pass base=NAME, the model that engines serve")
    rank, alpha = plain.get("r"), plain.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1:
        raise ValueError(f"r is {rank!r}: the adapter's rank has to be a whole number from 1 on")
    if not isinstance(alpha, int | float):
        raise ValueError(f"lora_alpha is {alpha!r}: it has to be a number")
    if not plain.get("target_modules"):
        raise ValueError("target_modules is not set: name the modules that the adapter changes")
    if (bias := plain.get("bias", "none")) != "none":
        raise ValueError(f"bias is {bias!r}: vLLM takes adapters without biases alone; set bias='none'")
    if wrong := [key for key in _REFUSED if plain.get(key)]:
        raise ValueError(f"{wrong[0]} is {plain[wrong[0]]!r}: vLLM takes no such adapter; leave it out")
    if (begun := str(plain.get("init_lora_weights", ""))).startswith(_CHANGES_BASE):
        raise ValueError(
            f"init_lora_weights is {begun!r}: it changes the base model, which engines don't get"
        )
    plain["peft_type"] = "LORA"
    if "inference_mode" in plain:
        plain["inference_mode"] = True  # as PEFT saves it
    return AdapterBody(config=plain)


def published_name(name: str) -> str | None:
    """Returns the name under which PEFT would save a tensor of a live model; None if it is no adapter's."""
    found = _TENSOR.fullmatch(name)
    if found is None:
        return None
    return f"{_PREFIX}{found[1]}.lora_{found[2]}.weight"


def adapter_name(name: str) -> str | None:
    """Returns the name of the adapter that a tensor of a live PEFT model belongs to, such as "default"."""
    found = _TENSOR.fullmatch(name)
    return found[3] if found is not None else None


def pairs(tensors: Iterable[TensorSpec], adapter: AdapterBody) -> dict[str, MatrixPair]:
    """Returns the adapter's matrices by the module of the base model that they change.

    Raises: ValueError that names each tensor that is missing, too many or of another rank, with the shapes.
    """
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    problems = []
    for tensor in tensors:
        match = _TENSOR.fullmatch(tensor.name)
        if match is None or match[3] is not None:
            problems.append(f"{tensor.name} is no lora_A.weight or lora_B.weight")
            continue
        found.setdefault(match[1], {})[match[2]] = tensor.shape
    for module, sides in sorted(found.items()):
        problems += _side_problems(module, sides, rank_of(module, adapter))
    problems += _target_problems(found, adapter)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(f"{problems[0]}{more}")
    return {module: MatrixPair(down=sides["A"], up=sides["B"]) for module, sides in found.items()}


def rank_of(module: str, adapter: AdapterBody) -> int:
    """Returns the rank that the configuration gives a module, by PEFT's rule."""
    own = adapter.config.get("rank_pattern")
    for pattern, rank in (own if isinstance(own, dict) else {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return int(str(rank))
    return adapter.rank


def max_rank(adapter: AdapterBody) -> int:
    """Returns the largest rank of any module."""
    own = adapter.config.get("rank_pattern")
    return max([adapter.rank, *(int(str(each)) for each in (own if isinstance(own, dict) else {}).values())])


def targets(adapter: AdapterBody) -> list[str]:
    """Returns the module names that the adapter changes in every layer; none where that is not told by names
    alone.
    """
    names = adapter.config["target_modules"]
    limits = ("layers_to_transform", "layers_pattern", "exclude_modules")
    if not isinstance(names, list) or any(adapter.config.get(key) for key in limits):
        return []
    return [str(name) for name in names]


def is_target(module: str, name: str) -> bool:
    """Returns whether PEFT takes a module for one that this name means."""
    return module == name or module.endswith(f".{name}")


def read_description(folder: Path) -> AdapterBody:
    """Reads a folder's adapter_config.json. Raises: ValueError, OSError."""
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: no JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path}: no JSON object")
    return describe(config)


def _side_problems(module: str, sides: Mapping[str, tuple[int, ...]], rank: int) -> list[str]:
    for side, other in (("A", "B"), ("B", "A")):
        if side not in sides:
            return [f"{module}.lora_{side}.weight is missing, and lora_{other} is there"]
    problems = []
    if len(sides["A"]) != 2 or sides["A"][0] != rank:
        problems.append(f"{module}.lora_A.weight has shape {sides['A']}, rank {rank} needs ({rank}, inputs)")
    if len(sides["B"]) != 2 or sides["B"][1] != rank:
        problems.append(f"{module}.lora_B.weight has shape {sides['B']}, rank {rank} needs (outputs, {rank})")
    return problems


def _target_problems(modules: Iterable[str], adapter: AdapterBody) -> list[str]:
    named = list(modules)
    return [
        f"target_modules has {target!r}, and none of the {len(named)} adapted modules is one"
        for target in targets(adapter)
        if not any(is_target(module, target) for module in named)
    ]


def _plain(value: Any) -> Any:
    """Returns a value of PEFT's configuration as JSON has it."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, set | frozenset):
        return sorted(_plain(each) for each in value)
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value)
