"""Live weights updated in place: only what changed between two staged checkpoints is written.

Owns which models allow this, the comparison of two staged files, and writing the changes into the parameters,
by the device's codec or the processor's (device_delta.py). The difference of an element's old and new bits is
added to it, and the hash of all additions tells whether the elements held their old bits; if one did not,
FrameError is raised and the caller loads the whole file. The comparison touches no weight, so it runs in a
thread beside the engine's steps. Not run on a GPU yet. Never guesses where a tensor goes: that is recorded
from the model's own loader.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rose import _delta
from rose.errors import FrameError
from rose.transfer.format.checkpoint import read_checkpoint
from rose.transfer.format.codec import Bits
from rose.transfer.format.device_delta import TensorDeltas, tensor_deltas
from rose.transfer.format.layout import TensorSpec
from rose.transfer.format.planes import bits_dtype
from rose.transfer.format.shard_plan import ShardPlan, StridedView
from rose.transfer.format.state_hash import StateHash

logger = logging.getLogger(__name__)

MOST_CHANGED = 0.1
"""The share of changed elements above which loading the whole file is about as fast and needs no extra
memory.
"""
_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

Checkpoint = Mapping[str, tuple[TensorSpec, Any]]
"""Specs and raw bytes by name, as rose.transfer.format.checkpoint reads them."""


class InPlaceWriter:
    """One rank's writer, for one model, whose weights are a staged checkpoint's when a comparison begins.

    library: the device's kernels.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, library: Path) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._deltas: TensorDeltas | None = None
        self._plan: ShardPlan | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rose-compare")
        self._comparison: tuple[str, Future[Changes]] | None = None
        problem = why_not_in_place(model, vllm_config.model_config.quantization)
        if problem is None:
            self._deltas = tensor_deltas(next(model.parameters()).device, library)
            problem = "no kernels for this device" if self._deltas is None else None
        if problem is not None:
            logger.info("weight updates load whole files: %s", problem)

    def begin(self, old: Path, new: Path, identity: str) -> bool:
        """Begins to compare beside the steps; returns False when the new file has to be loaded whole.

        identity: the new file's, by which take() recognises it. Raises: OSError, FrameError, ValueError.
        """
        self._comparison = None
        if self._deltas is None:
            return False
        before, after = read_checkpoint(old), read_checkpoint(new)
        if self._plan is None:
            self._plan = self._record_plan([spec for spec, _ in before.values()])
        if self._plan is None:
            return False
        self._comparison = identity, self._thread.submit(compare, before, after, self._plan)
        return True

    def _record_plan(self, specs: list[TensorSpec]) -> ShardPlan | None:
        from rose.engine.weights.shard_recorder import record_shard_plan

        try:
            return record_shard_plan(self._vllm_config, specs)
        except Exception as error:  # a loader may fail in any way, and loading whole files still works
            logger.warning("weight updates load whole files: no plan of this model: %r", error)
            self._deltas = None
            return None

    def is_done(self) -> bool:
        """Whether take() returns at once."""
        return self._comparison is None or self._comparison[1].done()

    def take(self, identity: str) -> Changes | None:
        """Returns what changes towards that file; None when it has to be loaded whole."""
        comparison, self._comparison = self._comparison, None
        if comparison is None or comparison[0] != identity:
            return None
        try:
            return comparison[1].result()
        except Exception as error:  # whatever failed, the other ranks wait for this rank's verdict
            logger.info("weights are loaded whole: %s", error)
            return None

    def write(self, changes: Changes) -> None:
        """Writes the changes. Raises: what Changes.write() raises."""
        assert self._deltas is not None, "take() gives nothing without a codec"
        changes.write(self._model, self._deltas)

    def close(self) -> None:
        """Returns when no comparison is running any more."""
        self._thread.shutdown()


def why_not_in_place(model: torch.nn.Module, quantization: str | None) -> str | None:
    """Returns why this model computes with something else than its parameters; None if it computes with them.

    Only known kinds of layers pass: others may have derived something from their weights when they were
    loaded.
    """
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    if quantization is not None:
        return f"weights are quantized with {quantization}"
    for name, module in model.named_modules():
        if isinstance(module, MLAAttention):
            return f"{name} keeps products of its weights"
        if getattr(module, "cpu_linear", None) not in (None, torch.nn.functional.linear):
            return f"{name} computes with a packed copy"
        if any(True for _ in module.parameters(recurse=False)) and not _computes_with_parameters(module):
            return f"{name} is a {type(module).__name__}"
    return None


def _computes_with_parameters(module: torch.nn.Module) -> bool:
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    if isinstance(module, LinearBase):
        return type(module.quant_method) is UnquantizedLinearMethod
    if isinstance(module, VocabParallelEmbedding):
        return type(module.quant_method) is UnquantizedEmbeddingMethod
    kinds = (RMSNorm, GemmaRMSNorm, torch.nn.Linear, torch.nn.Embedding, torch.nn.LayerNorm)
    return isinstance(module, kinds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """What changes in consecutive elements of one parameter."""

    parameter: str
    begin: int
    size: int
    delta: _delta.Delta
    hash_change: StateHash


class Changes:
    """The changes from one staged checkpoint to another, in what one rank holds."""

    def __init__(self, changes: list[_Change]) -> None:
        self._changes = changes

    @property
    def num_changed(self) -> int:
        return sum(change.delta.num_changed for change in self._changes)

    def write(self, model: torch.nn.Module, deltas: TensorDeltas) -> None:
        """Writes the changes into the model's parameters.

        Raises: FrameError when a parameter is not what the plan says or did not hold the old bits. Some
        parameters are new by then, so the whole file has to be loaded.
        """
        parameters = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        for change in self._changes:
            if change.parameter not in parameters:
                raise FrameError(f"the model has no parameter {change.parameter}")
            parameter = parameters[change.parameter].detach()
            if not parameter.is_contiguous() or parameter.numel() < change.begin + change.size:
                raise FrameError(f"{change.parameter} is not the parameter of the plan")
            flat = parameter.view(-1)[change.begin : change.begin + change.size]
            if flat.element_size() != change.delta.width:
                raise FrameError(f"{change.parameter} has elements of {flat.element_size()} bytes")
            found = StateHash(*deltas.apply(change.delta, flat.view(_VIEWS[change.delta.width]), 0))
            if found != change.hash_change:
                raise FrameError(f"{change.parameter} did not hold the weights of the last update")


def compare(old: Checkpoint, new: Checkpoint, plan: ShardPlan) -> Changes:
    """Returns the changes. Raises: FrameError when the checkpoints can't be compared, or differ in too
    much.
    """
    if plan.whole:
        raise FrameError(f"only the loader can load {', '.join(plan.whole)}")
    changes = Changes(list(_compare(old, new, plan)))
    held = plan.held_elements()
    if changes.num_changed > MOST_CHANGED * held:
        raise FrameError(f"{changes.num_changed} of {held} elements change")
    return changes


def _compare(old: Checkpoint, new: Checkpoint, plan: ShardPlan) -> Iterator[_Change]:
    for copy in plan.copies:
        name = copy.source.name
        if name not in old or name not in new or old[name][0] != new[name][0]:
            raise FrameError(f"tensor {name} is not the same in both checkpoints")
        if not _is_contiguous(copy.target):
            raise FrameError(f"tensor {name} is scattered over {copy.target.name}")
        before, after = (_elements(checkpoint[name], copy.source) for checkpoint in (old, new))
        delta, lanes = _delta.Delta.between(before, [after], 0)
        if delta.num_changed > 0:
            yield _Change(
                parameter=copy.target.name,
                begin=copy.target.offset,
                size=copy.target.num_elements,
                delta=delta,
                hash_change=StateHash(*lanes),
            )


def _elements(tensor: tuple[TensorSpec, Any], source: StridedView) -> Bits:
    """Returns the view's elements in its order; in place where they are contiguous."""
    spec, raw = tensor
    elements: Bits = source.of(raw.view(bits_dtype(spec.dtype))).reshape(-1)
    return elements


def _is_contiguous(view: StridedView) -> bool:
    step = 1
    for size, stride in zip(reversed(view.shape), reversed(view.stride), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True
