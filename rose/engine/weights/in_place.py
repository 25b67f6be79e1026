"""Live weights updated in place: only what the changes files of an update name is written.

Owns which models allow this, finding the changed elements in one rank's parameters, and writing them. All
checks come before the first write and beside the engine's steps: the checksum of each changed bucket, and
that the parameters hold the old bits. Where vLLM's CPU backend computes with a packed copy of a parameter,
the changed ones are packed anew from the mirror (packed.py). Never guesses where a tensor goes: that is
recorded from the model's own loader.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rose.engine.weights.packed import PackedLayer, packed_layers
from rose.errors import FrameError
from rose.transfer.format.changes import Changes
from rose.transfer.format.element_routes import ElementRoutes, ParameterChange
from rose.transfer.format.layout import Layout
from rose.transfer.format.shard_plan import ShardPlan
from rose.transfer.format.shared_planes import PlanesFile

logger = logging.getLogger(__name__)

_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


_CHUNK = 1 << 22
"""Elements that are on their way to the device at once: the step that runs meanwhile needs the memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    """The elements of one parameter; index and new are on the host."""

    target: torch.Tensor
    index: torch.Tensor
    new: torch.Tensor

    def write(self) -> None:
        device = self.target.device
        for index, new in zip(torch.split(self.index, _CHUNK), torch.split(self.new, _CHUNK), strict=True):
            # Twice as fast as an assignment.
            self.target.scatter_(0, index.to(device), new.to(device))


class PreparedChanges:
    """Changes that were checked against the live parameters, ready to be written."""

    def __init__(self, writes: list[_Write], layers: list[PackedLayer], num_changed: int) -> None:
        self._writes = writes
        self._layers = layers
        self.num_changed = num_changed
        self.num_packed = len(layers)

    def write(self, planes: PlanesFile, plan: ShardPlan) -> None:
        """Writes all of them. planes: the mirror at the version that the changes lead to, under its lock."""
        for write in self._writes:
            write.write()
        for layer in self._layers:
            layer.pack(planes, plan)
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the answer says that it is done, and the next preparation reads it


class InPlaceWriter:
    """One rank's writer, for one model."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self.plan: ShardPlan | None = None
        self._routes: ElementRoutes | None = None
        self._layout: str | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rose-changes")
        self._coming: Future[PreparedChanges] | None = None
        self.problem = why_not_in_place(model, vllm_config.model_config.quantization)

    def begin(self, layout: Layout, paths: Sequence[str], base_hash: str, state_hash: str) -> None:
        """Begins to prepare beside the steps what leads from one state of the weights to the other.

        Raises: FrameError, OSError where the checkpoint has to be loaded whole.
        """
        self._coming = None
        if self.problem is not None:
            raise FrameError(self.problem)
        files = [Changes(Path(path)) for path in paths]
        hashes = [base_hash, *(file.head.state_hash for file in files)]
        if [file.head.base_hash for file in files] != hashes[:-1] or hashes[-1] != state_hash:
            raise FrameError("the changes don't lead from the weights in use to the new ones")
        if self._layout != layout.digest:
            self.plan = self._record_plan(layout)
            self._routes, self._layout = ElementRoutes(layout, self.plan), layout.digest
        self._coming = self._thread.submit(self._prepare, layout, files)

    def _record_plan(self, layout: Layout) -> ShardPlan:
        from rose.engine.weights.shard_recorder import record_shard_plan

        try:
            return record_shard_plan(self._vllm_config, layout.tensors)
        except Exception as error:  # a loader may fail in any way, and loading whole checkpoints still works
            self.problem = f"no plan of this model: {error!r}"
            raise FrameError(self.problem) from error

    def result(self) -> tuple[bool, str | None]:
        """Returns whether the preparation has ended, and why the checkpoint has to be loaded whole."""
        if self._coming is None:
            return True, "nothing was prepared"
        if not self._coming.done():
            return False, None
        error = self._coming.exception()
        return True, str(error) if error is not None else None

    def take(self) -> PreparedChanges | None:
        """Returns what was prepared, once; None where there is nothing."""
        coming, self._coming = self._coming, None
        is_good = coming is not None and coming.done() and coming.exception() is None
        return coming.result() if coming is not None and is_good else None

    def close(self) -> None:
        """Returns when nothing is being prepared any more."""
        self._thread.shutdown()

    def _prepare(self, layout: Layout, files: Sequence[Changes]) -> PreparedChanges:
        """Raises: FrameError when the parameters don't hold the old bits."""
        assert self._routes is not None
        found: dict[str, list[ParameterChange]] = {}
        for file in files:
            for bucket, elements in file.buckets(layout):
                for change in self._routes.changes(bucket, elements):
                    found.setdefault(change.parameter, []).append(change)
        parameters = {**dict(self._model.named_buffers()), **dict(self._model.named_parameters())}
        packed = packed_layers(self._model)
        writes, layers = [], []
        for name, changes in found.items():
            if name not in parameters:
                raise FrameError(f"the model has no parameter {name}")
            layers += [layer for layer in packed if layer.computes_with(name, parameters[name])]
            if parameters[name].numel() > 0:
                each_once = changes if len(files) == 1 else [_joined(changes)]
                writes += [_checked(name, parameters[name].detach(), change) for change in each_once]
            elif not layers or layers[-1].parameter != name:
                raise FrameError(f"{name} is empty, and nothing computes with a packed copy of it")
        num_changed = sum(change.index.size for changes in found.values() for change in changes)
        return PreparedChanges(writes, layers, num_changed)


def _joined(changes: Sequence[ParameterChange]) -> ParameterChange:
    """Joins changes of one parameter; an element that changes twice keeps its first old and last new bits.

    Raises: FrameError where one change does not begin with what the one before it left.
    """
    index = np.concatenate([change.index for change in changes])
    old = np.concatenate([change.old for change in changes])
    new = np.concatenate([change.new for change in changes])
    if np.any(index[1:] <= index[:-1]):
        order = np.argsort(index, kind="stable")
        index, old, new = index[order], old[order], new[order]
        follows = index[1:] == index[:-1]
        if np.any(old[1:][follows] != new[:-1][follows]):
            raise FrameError(f"changes of {changes[0].parameter} don't follow each other")
        is_first, is_last = np.append(True, ~follows), np.append(~follows, True)
        index, old, new = index[is_first], old[is_first], new[is_last]
    return ParameterChange(parameter=changes[0].parameter, index=index, old=old, new=new)


def _checked(name: str, parameter: torch.Tensor, change: ParameterChange) -> _Write:
    """Raises: FrameError unless the parameter holds the change's old bits."""
    width = change.old.itemsize
    if not parameter.is_contiguous() or parameter.element_size() != width:
        raise FrameError(f"{name} is not the parameter of the plan")
    if parameter.numel() <= change.index[-1]:
        raise FrameError(f"{name} has {parameter.numel()} elements, element {change.index[-1]} changes")
    target = parameter.view(-1).view(_VIEWS[width])
    index = torch.from_numpy(change.index)
    old, new = (torch.from_numpy(bits).view(_VIEWS[width]) for bits in (change.old, change.new))
    for some, bits in zip(torch.split(index, _CHUNK), torch.split(old, _CHUNK), strict=True):
        if not torch.equal(target.index_select(0, some.to(target.device)), bits.to(target.device)):
            raise FrameError(f"{name} does not hold the weights of the last update")
    return _Write(target=target, index=index, new=new)


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
