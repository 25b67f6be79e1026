"""LoRA adapters of tiny models, with random matrices that change every answer."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from real_engine import RealEngine
from safetensors.numpy import save_file

from rose.messages import AdapterUpdate
from rose.transfer.adapters.description import CONFIG_FILE, TENSORS_FILE
from rose.transfer.format.checkpoint import checkpoint_state_hash

RANK = 8
LAYERS = 4
MODULES = {
    "self_attn.q_proj": (128, 64),
    "self_attn.v_proj": (64, 64),
    "self_attn.o_proj": (64, 128),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}
"""The outputs and inputs of the rollout model's modules that the adapters change."""
Modules = Mapping[str, tuple[int, int]]
Tensors = dict[str, NDArray[np.float32]]


def adapter_config(base: str, rank: int = RANK, modules: Modules = MODULES) -> dict[str, Any]:
    """PEFT's adapter_config.json."""
    return {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(name.partition(".")[2] for name in modules),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }


def adapter_tensors(seed: int, rank: int = RANK, layers: int = LAYERS, modules: Modules = MODULES) -> Tensors:
    """An adapter's matrices by PEFT's names; each seed has its own, in every element."""
    draw = np.random.default_rng(seed)
    tensors: Tensors = {}
    for layer in range(layers):
        for module, (outputs, inputs) in modules.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = draw.normal(0, 0.2, (rank, inputs)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = draw.normal(0, 0.2, (outputs, rank)).astype(np.float32)
    return tensors


def misfits() -> dict[str, tuple[Tensors, dict[str, Any], str]]:
    """Returns adapters that the rollout model refuses: the tensors, the configuration, and what the refusal
    says."""
    tensors = adapter_tensors(7)
    dropped = "base_model.model.model.layers.2.mlp.up_proj"
    return {
        "rank": (
            adapter_tensors(7, rank=16),
            adapter_config("tiny", rank=16),
            "it has rank 16, the engine takes at most 8: use --max-lora-rank 16",
        ),
        "base": (tensors, adapter_config("other"), "it was trained on other, and the engine serves"),
        "side": (
            {name: each for name, each in tensors.items() if name != f"{dropped}.lora_B.weight"},
            adapter_config("tiny"),
            "model.layers.2.mlp.up_proj.lora_B.weight is missing, and lora_A is there",
        ),
        "module": (
            {name: each for name, each in tensors.items() if not name.startswith(dropped)},
            adapter_config("tiny"),
            "it has no tensors for model.layers.2.mlp.up_proj, a target of the 19 that it changes",
        ),
        "layer": (
            adapter_tensors(7, layers=5),
            adapter_config("tiny"),
            "it changes model.layers.4.mlp.down_proj, which is none of the base model's modules",
        ),
        "shape": (
            {**tensors, f"{dropped}.lora_A.weight": tensors[f"{dropped}.lora_A.weight"][:, :32].copy()},
            adapter_config("tiny"),
            "it changes model.layers.2.mlp.up_proj with 128 outputs and 32 inputs; in the base model that "
            "has 128 outputs and 64 inputs",
        ),
    }


def save_adapter(folder: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    """Saves an adapter as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    save_file(tensors, folder / TENSORS_FILE)
    return folder


def load_missing(engine: RealEngine, folder: Path, versions: Iterable[str], seeds: Mapping[str, int]) -> None:
    """Delivers versions to an engine that has not got them from an earlier test, as it was started again."""
    for version in sorted(set(versions).difference(engine.status().adapters or ())):
        saved = save_adapter(
            folder / version.replace("/", "@"), adapter_tensors(seeds[version]), adapter_config("tiny")
        )
        engine.post("adapters", adapter_update(saved, version).model_dump()).raise_for_status()


def adapter_update(folder: Path, version: str) -> AdapterUpdate:
    """What a subscriber posts once the folder is staged."""
    state_hash = checkpoint_state_hash(folder / TENSORS_FILE)
    return AdapterUpdate(version=version, path=str(folder), state_hash=str(state_hash))
