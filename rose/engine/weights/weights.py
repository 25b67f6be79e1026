"""vLLM's weight-transfer backend ``rose``: loads a checkpoint that the subscriber staged in shared memory.

Owns the step from a staged file to live weights, whole or in place (in_place.py), and where the weights come
from when they are needed again (sleep.py). Fetching and decoding happen in the subscriber's process. The
file's content is checked against the expected state hash *before* the first parameter changes, so a bad file
leaves the old weights in use; check_staged() does that in the API server, ahead of the engine's pause.
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
    """Empty, because nothing has to be set up: weights arrive in a file."""


@dataclass
class StagedUpdate(WeightTransferUpdateInfo):
    """The path of the staged checkpoint (a .safetensors file) and the state hash that it must have.

    checked: what check_staged() returned. A rank that finds the same file does not hash it again.
    """

    path: str
    state_hash: str
    checked: str | None = None


class StagedWeightEngine(WeightTransferEngine[StagedInit, StagedUpdate]):
    """Applies one staged checkpoint per update.

    Writes in place what changed since the last update where the model computes with its parameters; otherwise
    loads all of it through vLLM's layerwise reload. The CPU backend replaces linear weights by prepacked
    copies: writing to its parameters would report success and change nothing.
    """

    init_info_cls = StagedInit
    update_info_cls = StagedUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_resident = True
        """Whether the device holds the weights now; sleep.py sets it."""
        self._staged: _StagedFile | None = None
        self._in_place: InPlaceWriter | None = None

    def init_transfer_engine(self, init_info: StagedInit) -> None:
        """Does nothing, because no rendezvous is needed."""

    def start_weight_update(self) -> None:
        """Does nothing: :meth:`receive_weights` starts the reload once the file is known to be good."""

    def begin_comparison(self, path: str) -> bool:
        """Begins to find out, beside the engine's steps, what the staged checkpoint changes.

        Returns False when this rank can't compare it, so that it has to be loaded whole.
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
        """Checks, then loads, every tensor of the staged checkpoint; an inactive engine loads it later.

        Raises: FrameError when some rank found another state hash than the announced one, with nothing
        changed; whatever loading raises, for example for a good file of another model, with the old weights
        loaded again.
        """
        staged = _checked_by_all_ranks(update_info)
        try:
            if self.is_resident and not self._write_in_place(staged):
                _on_all_ranks(lambda: self._load(staged.tensors()))
        except Exception:
            staged.close()
            self.load()  # the layers before the one that failed already have new weights
            raise
        self._forget_staged()
        self._staged = staged

    def _write_in_place(self, staged: _StagedFile) -> bool:
        """Writes the changes towards the file, on all ranks or on none.

        Returns False when the file is to be loaded whole, which also replaces what a rank has written by
        then.
        """
        changes = self._in_place.take(staged.identity) if self._in_place is not None else None
        if any(_gather(None if changes is not None else "has no changes")):
            return False
        assert self._in_place is not None and changes is not None
        try:
            _on_all_ranks(partial(self._in_place.write, changes))
        except Exception as error:  # some rank failed, so this is raised on all ranks
            logger.warning("weights are loaded whole, they can't be changed in place: %s", error)
            return False
        logger.info("weights changed in place elements=%d", changes.num_changed)
        return True

    def load(self) -> None:
        """Loads the last update again, or the model's own files where there was no update."""
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
        """Does nothing: :meth:`receive_weights` finalizes."""

    def shutdown(self) -> None:
        if self._in_place is not None:
            self._in_place.close()
        self._forget_staged()

    def _forget_staged(self) -> None:
        if self._staged is not None:
            self._staged.close()
            self._staged = None


class _StagedFile:
    """A staged checkpoint, kept open, so that it stays readable when the subscriber has removed its name."""

    def __init__(self, path: str) -> None:
        """Raises: OSError."""
        self._name = path
        self._fd = os.open(path, os.O_RDONLY)
        self.path = Path(f"/proc/self/fd/{self._fd}")
        """The path to the open file, valid until close()."""

    @property
    def identity(self) -> str:
        """A name that is the same in all processes of this host until the file is replaced or written to."""
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
    """Checks that the file's content has this state hash; returns a name by which ranks recognise the file.

    Hashing takes about as long as copying the weights, and no engine has to pause for it. Raises: FrameError,
    OSError.
    """
    staged = _StagedFile(path)
    try:
        staged.check(state_hash)
        return staged.identity
    finally:
        staged.close()


def _checked_by_all_ranks(update: StagedUpdate) -> _StagedFile:
    """Opens and checks a staged checkpoint on all ranks.

    No rank loads a file that another one has refused; otherwise the engine would compute with two versions at
    once. Raises: what _on_all_ranks() raises.
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
    """Calls `act` and fails on all ranks if it fails on any.

    Raises: what was raised here, or FrameError when only another rank failed.
    """
    problem: Exception | None = None
    try:
        act()
    except Exception as error:  # whatever failed, the other ranks wait for this rank's verdict
        problem = error
    verdicts = _gather(str(problem) if problem is not None else None)
    if problem is not None:
        raise problem
    wrong = [f"rank {rank}: {verdict}" for rank, verdict in enumerate(verdicts) if verdict is not None]
    if wrong:
        raise FrameError("; ".join(wrong))


def _gather(verdict: str | None) -> list[str | None]:
    """Returns every tensor-parallel rank's verdict, in order."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    verdicts: list[str | None] = [verdict] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(verdicts, verdict, group=group.cpu_group)
    return verdicts


def _forget_half_loaded(model: torch.nn.Module) -> None:
    """Resets layers whose loading broke off.

    vLLM's finalize then restores the layers that are not done, and the next reload finds no tensors that
    still wait for the rest of theirs.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for module in model.modules():
        info = get_layerwise_info(module)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights.clear()


def _repack_heads(model: torch.nn.Module) -> None:
    """Rebuilds each output head's packed copy from its weight.

    A head tied to the embedding has no tensor of its own in the checkpoint, so layerwise reload skips it, and
    on a CPU it would keep computing with the old weights (seen as equal tokens with logprobs of mixed
    weights).
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
