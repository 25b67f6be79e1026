"""Live weights updated in place: only what the changes files of an update name is written.

Owns finding the changed elements in one rank's parameters, and writing them. The checksum of each changed
bucket is checked, and the elements' places are found, beside the engine's steps. In the pause, one pass
compares each element with its old bits and writes the new ones. If a parameter holds other bits, everything
that was written is taken back from the changes files, which have old and new bits. Layers that take no single
elements (routes.py) are then loaded from the mirror. Never guesses where a tensor goes: that is recorded from
the model's own loader.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rose import _delta
from rose.engine.weights.reload import LiveModel, load_layers, process_dependants
from rose.engine.weights.routes import LiveRoutes, Reloading
from rose.engine.weights.staged_file import tensors_of
from rose.errors import FrameError
from rose.transfer.format.changes import ChangesFile
from rose.transfer.format.codec import Bits
from rose.transfer.format.element_routes import Index, ParameterChange, changed_pieces
from rose.transfer.format.layout import Layout
from rose.transfer.format.shared_planes import PlanesFile

logger = logging.getLogger(__name__)

_VIEWS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_CHUNK = 1 << 22
"""Elements that are on their way to a device at once, where other work may need the memory."""


class _Exchange:
    """The elements of one parameter that an update changes."""

    def __init__(self, parameter: torch.Tensor, change: ParameterChange) -> None:
        """Raises: FrameError where they don't fit the parameter."""
        name, width = change.parameter, change.old.itemsize
        if not parameter.is_contiguous() or parameter.element_size() != width:
            raise FrameError(f"{name} is not the parameter of the plan")
        last = int(change.places[-1]) + change.shift
        if parameter.numel() <= last:
            raise FrameError(f"{name} has {parameter.numel()} elements, element {last} changes")
        self.parameter = name
        self.num_changed = change.num_changed
        self._target = parameter.view(-1).view(_VIEWS[width])
        self._change = change

    def write(self) -> bool:
        """Replaces the old bits by the new ones; False, with nothing written, where others are found."""
        return self._replace(self._change.old, self._change.new)

    def take_back(self) -> bool:
        """Undoes write()."""
        return self._replace(self._change.new, self._change.old)

    def _replace(self, old: Bits, new: Bits) -> bool:
        places, shift = self._change.places, self._change.shift
        if self._target.device.type != "cpu":
            return replace_on_device(self._target, places, shift, old, new)
        if self._target.untyped_storage().nbytes() == 0:
            raise FrameError(f"{self.parameter} has no memory: the engine is inactive")
        # After numpy(), an engine could not free the memory any more when it becomes inactive (sleep.py).
        memory = (ctypes.c_char * self._target.nbytes).from_address(self._target.data_ptr())
        return _delta.exchange(np.frombuffer(memoryview(memory), old.dtype), places, shift, old, new)


def replace_on_device(
    target: torch.Tensor, places: NDArray[np.int32] | Index, shift: int, old: Bits, new: Bits
) -> bool:
    """Does what _delta.exchange() does, with torch, on any device.

    target: the flat bits, as integers of their width. Raises: whatever the device fails with, and then some
    elements may be written.
    """
    on_host = torch.from_numpy(places)

    def chunks(values: Bits) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        bits = torch.from_numpy(values).view(target.dtype)
        for index, some in zip(torch.split(on_host, _CHUNK), torch.split(bits, _CHUNK), strict=True):
            yield index.to(target.device, torch.int64) + shift, some.to(target.device)

    if not all(torch.equal(target.index_select(0, index), some) for index, some in chunks(old)):
        return False
    for index, some in chunks(new):
        target.scatter_(0, index, some)  # twice as fast as an assignment
    return True


@dataclass(frozen=True, slots=True)
class _ModelChanges:
    """What else than elements changes in one model."""

    model: LiveModel
    written: set[torch.nn.Module]
    """The layers whose parameters are written."""
    reloading: Reloading


class PreparedChanges:
    """Changes whose places in the live parameters are known.

    Call write(), and if any rank's has failed, take_back(); then finish().
    """

    def __init__(self, exchanges: list[_Exchange], models: list[_ModelChanges]) -> None:
        self._exchanges = exchanges
        self._begun: list[_Exchange] = []
        self._models = models
        self.num_changed = sum(exchange.num_changed for exchange in exchanges)
        self.num_loaded = sum(len(each.reloading.layers) for each in models)

    def write(self) -> None:
        """Writes all of them. Raises: FrameError where a parameter does not hold the old bits."""
        for exchange in self._exchanges:
            self._begun.append(exchange)
            if not exchange.write():
                self._begun.pop()
                raise FrameError(f"{exchange.parameter} does not hold the weights of the last update")
        _finish_on_device()

    def take_back(self) -> str | None:
        """Undoes write(), or as much of it as was done; returns why that can't be, or None."""
        try:
            while self._begun:
                exchange = self._begun.pop()
                if not exchange.take_back():  # a device has failed within it
                    return f"{exchange.parameter} holds a part of an update"
            _finish_on_device()
        except Exception as error:  # whatever failed, the other ranks wait for this rank's answer
            return repr(error)
        return None

    def finish(self, planes: PlanesFile | None) -> None:
        """Loads the layers that take no single elements, and renews what other layers have computed from the
        written ones.

        planes: the mirror at the version of the changes, under its lock; needed where num_loaded is not 0.
        Raises: whatever loading raises, with some layers loaded.
        """
        for each in self._models:
            process_dependants(each.model, each.written)
            if each.reloading.layers:
                assert planes is not None
                tensors = tensors_of(planes, each.reloading.tensors)
                load_layers(each.model, each.reloading.layers, each.model.own(tensors))


def _finish_on_device() -> None:
    """Waits for the device: whoever is told that weights were written may read them."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class InPlaceWriter:
    """One rank's writer, for its model and the speculative heads and drafters that follow with it."""

    def __init__(self, models: Sequence[LiveModel], vllm_config: Any) -> None:
        """models: a head may share layers with the models ahead of it."""
        self._models = models
        self._vllm_config = vllm_config
        self._routes: list[LiveRoutes] = []
        self._problem = ""
        self._recorded: str | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rose-changes")
        self._coming: Future[PreparedChanges] | None = None
        self.stale: list[LiveModel] = []
        """The heads and drafters of which tensors are missing, after record(). They take no changes."""

    def begin(self, planes: PlanesFile, paths: Sequence[str], base_hash: str, state_hash: str) -> None:
        """Begins to prepare beside the steps what leads from one state of the weights to the other.

        Raises: FrameError, OSError where the checkpoint has to be loaded whole.
        """
        self._coming = None
        files = [ChangesFile(Path(path)) for path in paths]
        hashes = [base_hash, *(file.head.state_hash for file in files)]
        if [file.head.base_hash for file in files] != hashes[:-1] or hashes[-1] != state_hash:
            raise FrameError("the changes don't lead from the weights in use to the new ones")
        self.record(planes.layout)
        if not self._routes:
            raise FrameError(f"no plan of this model: {self._problem}")
        self._coming = self._thread.submit(self._prepare, planes.layout, files)

    def record(self, layout: Layout) -> None:
        """Records the ways from a run's tensors to the models, unless that was done."""
        if self._recorded == layout.digest:
            return
        self._recorded, self._routes = None, []
        names = [spec.name for spec in layout.tensors]
        self.stale = [model for model in self._models[1:] if not any(map(model.owns, names))]
        routes = self._routes_of(layout)
        self.stale += [each.model for each in routes[1:] if not each.takes_any]
        self._routes = [each for each in routes if each.model not in self.stale]
        self._recorded = layout.digest

    def _routes_of(self, layout: Layout) -> list[LiveRoutes]:
        """Returns the ways to each model that owns tensors; none where a loader can't be recorded."""
        from rose.engine.weights.shard_recorder import record_loading

        routes: list[LiveRoutes] = []
        try:
            for model in self._models:
                if model in self.stale:
                    continue
                loading = record_loading(self._vllm_config, layout.tensors, model)
                shared = {module for each in routes for module in each.model.module.modules()}
                routes.append(LiveRoutes(model, loading, shared))
        except Exception as error:  # a loader may fail in any way, and loading whole checkpoints still works
            self._problem = repr(error)
            return []
        return routes

    def result(self) -> tuple[bool, str | None]:
        """Returns whether the preparation has ended, and why the checkpoint has to be loaded whole."""
        if self._coming is None:
            return True, "nothing was prepared"
        if not self._coming.done():
            return False, None
        error = self._coming.exception()
        return True, str(error) if error is not None else None

    def take(self) -> PreparedChanges | None:
        """Returns what was prepared, once; None where there is nothing. Nothing is kept, because the changes
        files stay in memory as long as they are.
        """
        coming, self._coming = self._coming, None
        is_good = coming is not None and coming.done() and coming.exception() is None
        return coming.result() if coming is not None and is_good else None

    def close(self) -> None:
        """Returns when nothing is being prepared any more."""
        self._thread.shutdown()

    def _prepare(self, layout: Layout, files: Sequence[ChangesFile]) -> PreparedChanges:
        """Raises: FrameError on a bad changes file, and on one that does not fit the parameters."""
        found: list[dict[str, list[ParameterChange]]] = [{} for _ in self._routes]
        changed: set[str] = set()
        for file in files:  # a parameter's changes stay in the order of the versions
            for bucket, elements in file.buckets(layout):
                for piece, mine in changed_pieces(layout, bucket, elements):
                    changed.add(piece.tensor.name)
                    for routes, by_name in zip(self._routes, found, strict=True):
                        for change in routes.elements.changes(piece, mine):
                            by_name.setdefault(change.parameter, []).append(change)
        exchanges, models = [], []
        for routes, by_name in zip(self._routes, found, strict=True):
            for name, changes in by_name.items():
                exchanges += [_Exchange(routes.live(name), change) for change in changes]
            written = {routes.owner(name) for name in by_name}
            models.append(_ModelChanges(routes.model, written, routes.reloading(changed)))
        return PreparedChanges(exchanges, models)
