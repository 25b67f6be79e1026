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
