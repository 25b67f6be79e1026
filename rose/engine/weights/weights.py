"""vLLM's weight-transfer backend ``rose``: loads a checkpoint that the subscriber staged in shared memory.

Owns the step from a staged file to live weights, whole or in place (in_place.py), and where the weights come
from when they are needed again (sleep.py). Fetching and decoding happen in the subscriber's process, off the
engine's path. Promises that the file's content is checked against the expected state hash *before* the first
parameter changes, so a bad file leaves the old weights serving; check_staged() does that in the API server,
ahead of the engine's pause.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rose.config import Settings
from rose.engine.weights.in_place import InPlaceWriter
from rose.errors import FrameError
from rose.transfer.format.checkpoint import checkpoint_state_hash

logger = logging.getLogger(__name__)


@dataclass
class StagedInit(WeightTransferInitInfo):
    """Nothing to set up: the data plane is a file."""


@dataclass
class StagedUpdate(WeightTransferUpdateInfo):
    """Where the staged checkpoint lies (a .safetensors file) and the state hash it must have.

    checked: what check_staged() returned. A rank that finds that very file there does not hash it again.
    """

    path: str
    state_hash: str
    checked: str | None = None


class StagedWeightEngine(WeightTransferEngine[StagedInit, StagedUpdate]):
    """Applies one staged checkpoint per update: in place what changed since the last one, where the model
    computes with its parameters, else all of it through vLLM's layerwise reload.

    The CPU backend replaces linear weights by prepacked copies: patching the live parameters would answer
    success and change nothing (notes: transfer).
    """

    init_info_cls = StagedInit
    update_info_cls = StagedUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_resident = True
        """Whether the device holds the weights now; set by sleep.py."""
        self._staged: _StagedFile | None = None
        self._in_place: InPlaceWriter | None = None

    def init_transfer_engine(self, init_info: StagedInit) -> None:
        """No rendezvous is needed."""

    def start_weight_update(self) -> None:
        """Layerwise reload starts in :meth:`receive_weights`, once the file is known to be good."""

    def begin_comparison(self, path: str) -> bool:
        """Begins to find out what the staged checkpoint changes, beside the engine's steps.

        False: it has to be loaded whole, by this rank's account.
        """
        if self._staged is None or not self.is_resident:
            return False
        if self._in_place is None:
            library = Settings.from_environment().delta_library
            self._in_place = InPlaceWriter(self.model, self.vllm_config, library)
        try:
            coming = _StagedFile(path)
            try:
                return self._in_place.begin(self._staged.path, coming.path, coming.identity)
            finally:
                coming.close()
        except (OSError, FrameError, ValueError) as error:
            logger.warning("can't compare %s with the weights in use: %s", path, error)
            return False

    def has_compared(self) -> bool:
        """Whether receive_weights() would not have to wait for a comparison."""
        return self._in_place is None or self._in_place.is_done()

    def receive_weights(self, update_info: StagedUpdate) -> None:
        """Check, then load, every tensor of the staged checkpoint; an inactive engine loads it later.

        Raises:
            FrameError: some rank found another state hash than the announced one; nothing was changed.
            whatever loading raises, e.g. for a good file of another model; the old weights were loaded again.
        """
        staged = _checked_by_all_ranks(update_info)
        try:
            if self.is_resident and not self._write_in_place(staged):
                _on_all_ranks(lambda: self._load(staged.tensors()))
        except Exception:
            staged.close()
            self.load()  # the layers before the one that failed are new already
            raise
        self._forget_staged()
        self._staged = staged

    def _write_in_place(self, staged: _StagedFile) -> bool:
        """Writes what changes towards the file, on all ranks or none; False: it is to be loaded whole, which
        also mends what a rank has written by then."""
        changes = self._in_place.take(staged.identity) if self._in_place is not None else None
        if any(_gather(None if changes is not None else "has no changes")):
            return False
        assert self._in_place is not None and changes is not None
        try:
            _on_all_ranks(partial(self._in_place.write, changes))
        except Exception as error:  # raised on all ranks, each as it failed
            logger.warning("weights are loaded whole, they can't be changed in place: %s", error)
            return False
        logger.info("weights changed in place elements=%d", changes.num_changed)
        return True

    def load(self) -> None:
        """Load the last update again, or the model's own files where there was none."""
        if self._staged is not None:
            self._load(self._staged.tensors())
            return
        from vllm.model_executor.model_loader import get_model_loader

        loader: Any = get_model_loader(self.vllm_config.load_config)
        self._load(loader.get_all_weights(self.model_config, self.model))

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(tensors)
        except BaseException:
            _forget_half_loaded(self.model)
            raise
        finally:
            finalize_layerwise_reload(self.model, self.model_config)
        _repack_heads(self.model)

    def finish_weight_update(self) -> None:
        """Nothing is left to do: :meth:`receive_weights` finalizes."""

    def shutdown(self) -> None:
        if self._in_place is not None:
            self._in_place.close()
        self._forget_staged()

    def _forget_staged(self) -> None:
        if self._staged is not None:
            self._staged.close()
            self._staged = None


class _StagedFile:
    """A staged checkpoint, kept open: it stays readable when the subscriber has removed its name."""

    def __init__(self, path: str) -> None:
        """Raises: OSError."""
        self._name = path
        self._fd = os.open(path, os.O_RDONLY)
        self.path = Path(f"/proc/self/fd/{self._fd}")
        """As long as it is open."""

    @property
    def identity(self) -> str:
        """The same for all processes of this host, until the file is replaced or written to."""
        stat = os.fstat(self._fd)
        return f"{stat.st_dev}:{stat.st_ino}:{stat.st_size}:{stat.st_mtime_ns}"

    def check(self, state_hash: str) -> None:
        """Raises: FrameError."""
        found = str(checkpoint_state_hash(self.path))
        if found != state_hash:
            raise FrameError(f"{self._name}: state hash {found}, expected {state_hash}; weights kept")

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        with safe_open(self.path, framework="pt", device="cpu") as checkpoint:
            for name in checkpoint.keys():  # noqa: SIM118 - safe_open is no mapping
                yield name, checkpoint.get_tensor(name)

    def close(self) -> None:
        os.close(self._fd)


def check_staged(path: str, state_hash: str) -> str:
    """Returns by what ranks recognise the file, whose content has that state hash.

    Hashing takes about as long as copying the weights, for which no engine has to pause. Raises: FrameError,
    OSError.
    """
    staged = _StagedFile(path)
    try:
        staged.check(state_hash)
        return staged.identity
    finally:
        staged.close()


def _checked_by_all_ranks(update: StagedUpdate) -> _StagedFile:
    """Opens and checks a staged checkpoint; no rank loads what another one has refused, or the engine would
    compute with two versions at once.

    Raises: as _on_all_ranks.
    """
    opened: list[_StagedFile] = []

    def check() -> None:
        opened.append(_StagedFile(update.path))
        if update.checked != opened[0].identity:
            opened[0].check(update.state_hash)

    try:
        _on_all_ranks(check)
    except Exception:
        for staged in opened:
            staged.close()
        raise
    return opened[0]


def _on_all_ranks(act: Callable[[], None]) -> None:
    """Fails on all ranks where it fails on any. Raises: what was raised here, or FrameError for another's."""
    problem: Exception | None = None
    try:
        act()
    except Exception as error:  # whatever it is, the other ranks wait to hear of it
        problem = error
    verdicts = _gather(str(problem) if problem is not None else None)
    if problem is not None:
        raise problem
    wrong = [f"rank {rank}: {verdict}" for rank, verdict in enumerate(verdicts) if verdict is not None]
    if wrong:
        raise FrameError("; ".join(wrong))


def _gather(verdict: str | None) -> list[str | None]:
    """Every tensor-parallel rank's verdict, in order."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    verdicts: list[str | None] = [verdict] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(verdicts, verdict, group=group.cpu_group)
    return verdicts


def _forget_half_loaded(model: torch.nn.Module) -> None:
    """Where loading broke off: vLLM's finalize then puts the layers that are not done back as they were, and
    the next reload does not find tensors that wait for the rest of theirs."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for module in model.modules():
        info = get_layerwise_info(module)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights.clear()


def _repack_heads(model: torch.nn.Module) -> None:
    """Rebuild each output head's packed copy from its weight.

    A head tied to the embedding has no tensor of its own in the checkpoint, so layerwise reload skips it, and
    on CPU it would keep computing with the old weights (seen: tokens equal, logprobs of mixed weights).
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
