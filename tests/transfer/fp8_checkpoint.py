"""The tensors of a small model, and checkpoints of it in fp8 whose numbers are all zero."""

import json
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

QUANTIZED = ("layers.0.up_proj.weight", "layers.0.down_proj.weight")
TENSOR = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCK = {**TENSOR, "weight_block_size": [128, 128], "fmt": "e4m3", "modules_to_not_convert": ["lm_head"]}
_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
_INPUTS = {**_WEIGHTS, "strategy": "token", "dynamic": True}
CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {"linear": {"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": _INPUTS}},
}
SCHEMES: dict[str, dict[str, Any]] = {"tensor": TENSOR, "channel": CHANNEL, "block": BLOCK}
"""Each `quantization_config` by what has a scale of its own."""


def model_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """Sizes that are no multiples of a block's."""
    draws = torch.Generator().manual_seed(seed)
    sizes = {"embed.weight": (64, 200), QUANTIZED[0]: (450, 200), QUANTIZED[1]: (200, 450)}
    made = {name: 0.02 * torch.randn(size, generator=draws) for name, size in sizes.items()}
    made["norm.weight"] = torch.ones(200)
    return {name: each.bfloat16() for name, each in made.items()}


def scales_name(name: str, config: dict[str, Any]) -> str:
    return f"{name}_scale_inv" if "weight_block_size" in config else f"{name}_scale"


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """Writes a checkpoint with this `quantization_config`; the shapes are those of a model's tensors."""
    kind = next((kind for kind, known in SCHEMES.items() if known == config), "tensor")
    zeros = {}
    for name, tensor in tensors.items():
        rows, columns = tensor.shape if tensor.ndim == 2 else (1, 1)
        zeros[name] = torch.zeros(tensor.shape, dtype=torch.bfloat16)
        if name.endswith("proj.weight"):
            zeros[name] = torch.zeros(tensor.shape, dtype=torch.float8_e4m3fn)
            shapes = {"tensor": (1,), "channel": (rows, 1), "block": (-(-rows // 128), -(-columns // 128))}
            zeros[scales_name(name, config)] = torch.zeros(shapes[kind])
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(zeros, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    return folder
