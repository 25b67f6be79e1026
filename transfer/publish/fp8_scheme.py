"""How the weights of a checkpoint in fp8 are quantized, read from its config.json and its tensors' headers.

Never reads a weight, and never imports torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rose.transfer.format.checkpoint import read_checkpoint
from rose.transfer.format.layout import TensorSpec

FP8 = "F8_E4M3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Scheme:
    """group: the rows and columns of a weight that have a scale in common; 0 stands for all of them. suffix:
    what follows the name of a weight in the name of its scales.
    """

    kind: Literal["tensor", "channel", "block"]
    group: tuple[int, int]
    suffix: str

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Fp8Scheme":
        """Reads a `quantization_config`. Raises: ValueError on what a trainer's weights can't be quantized to
        here.
        """
        method = config.get("quant_method")
        if method == "fp8":
            return cls._of_fp8(config)
        if method == "compressed-tensors":
            return cls._of_compressed_tensors(config)
        raise ValueError(f"quant_method is {method!r}, expected 'fp8' or 'compressed-tensors'")

    @classmethod
    def _of_fp8(cls, config: Mapping[str, Any]) -> "Fp8Scheme":
        _require(config, "activation_scheme", "dynamic")
        _require(config, "fmt", "e4m3", None)
        _require(config, "scale_fmt", None)
        _require(config, "store_dtype", None)
        if (block := config.get("weight_block_size")) is None:
            return cls(kind="tensor", group=(0, 0), suffix="_scale")
        return cls(kind="block", group=_block("weight_block_size", block), suffix="_scale_inv")

    @classmethod
    def _of_compressed_tensors(cls, config: Mapping[str, Any]) -> "Fp8Scheme":
        groups = list((config.get("config_groups") or {}).values())
        ways = {json.dumps(group.get("weights"), sort_keys=True) for group in groups}
        if len(ways) != 1:
            raise ValueError(f"config_groups quantize weights in {len(ways)} ways, expected 1")
        for group in groups:
            if (inputs := group.get("input_activations")) is not None:
                _require(inputs, "dynamic", True)
        weights = groups[0].get("weights") or {}
        _require(weights, "num_bits", 8)
        _require(weights, "type", "float")
        _require(weights, "symmetric", True)
        _require(weights, "dynamic", False)
        _require(weights, "strategy", "tensor", "channel", "block")
        kind = weights["strategy"]
        if kind == "block":
            group = _block("block_structure", weights.get("block_structure"))
        else:
            group = (0, 0) if kind == "tensor" else (1, 0)
        return cls(kind=kind, group=group, suffix="_scale")

    def group_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the rows and columns of a weight of this shape that have a scale in common."""
        rows, columns = self.group
        return rows if rows else shape[0], columns if columns else shape[1]

    def scales_of(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the numbers of scales along the rows and the columns of a weight of this shape."""
        rows, columns = self.group_of(shape)
        return -(-shape[0] // rows), -(-shape[1] // columns)


class Fp8Checkpoint:
    """What a checkpoint in fp8 says of its tensors.

    Raises: ValueError where its weights are not in fp8, or not in a form that is known; FrameError on a
    damaged file; OSError.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = json.loads((folder / "config.json").read_text()).get("quantization_config")
        if config is None:
            raise ValueError(f"{folder}/config.json has no quantization_config")
        try:
            self.scheme = Fp8Scheme.of(config)
        except ValueError as error:
            raise ValueError(
                f"{folder}: weights can't be quantized as this checkpoint's are: {error}"
            ) from error
        self._specs = {name: spec for name, (spec, _) in read_checkpoint(folder).items()}
        if not any(spec.dtype == FP8 for spec in self._specs.values()):
            raise ValueError(f"{folder}: none of {len(self._specs)} tensors is {FP8}")

    @property
    def quantized_names(self) -> tuple[str, ...]:
        return tuple(sorted(name for name, spec in self._specs.items() if spec.dtype == FP8))

    def scales_of(self, name: str, shape: tuple[int, ...]) -> TensorSpec | None:
        """Returns the scales of a trainer's tensor; None if it is not quantized. Raises: ValueError where the
        checkpoint has no such tensor, or not its scales.

        They are float32, which engines compute with, whatever the checkpoint has.
        """
        spec = self._specs.get(name)
        if spec is None or spec.shape != shape:
            found = f"has it as {spec}" if spec is not None else "has none of this name"
            raise ValueError(f"tensor {name} has shape {list(shape)}, and {self.folder} {found}")
        if spec.dtype != FP8:
            return None
        if len(shape) != 2:
            raise ValueError(f"tensor {name} has {len(shape)} dimensions, only matrices can be quantized")
        scales = self._specs.get(name + self.scheme.suffix)
        if scales is None:
            raise ValueError(f"{self.folder}: {name} is {FP8}, and {name}{self.scheme.suffix} is missing")
        expected = self.scheme.scales_of(shape)
        if scales.shape != expected and not (self.scheme.kind == "tensor" and scales.shape in ((), (1,))):
            raise ValueError(
                f"{self.folder}: {scales.name} has shape {list(scales.shape)}, expected {list(expected)}"
            )
        return TensorSpec(name=scales.name, dtype="F32", shape=scales.shape)


def _require(config: Mapping[str, Any], key: str, *allowed: object) -> None:
    if config.get(key) not in allowed:
        names = " or ".join(repr(each) for each in allowed)
        raise ValueError(f"{key} is {config.get(key)!r}, expected {names}")


def _block(key: str, block: Any) -> tuple[int, int]:
    is_block = (
        isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
    )
    if not is_block:
        raise ValueError(f"{key} is {block!r}, expected two numbers above 0")
    return block[0], block[1]
