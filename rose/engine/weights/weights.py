"""vLLM's weight-transfer backend ``rose``: brings an engine's live weights to a version of the mirror.

Owns the step from a host's files to live weights, in place (in_place.py) or whole, and where the weights come
from when they are needed again (sleep.py). Fetching and decoding happen in the subscriber's process. Bad
input leaves the old weights in use: files are checked before the engine's pause, and the changes that were
written are taken back if a parameter does not hold the bits that they start from.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rose.engine.weights.completeness import require_complete
from rose.engine.weights.in_place import InPlaceWriter, PreparedChanges
from rose.engine.weights.reload import DRAFTER_PREFIX, LiveModel, load_layers
from rose.engine.weights.staged_file import StagedFile
from rose.errors import FrameError
from rose.transfer.format.layout import Layout

logger = logging.getLogger(__name__)


@dataclass
class StagedInit(WeightTransferInitInfo):
    """Empty, because nothing has to be set up: weights arrive in files."""


@dataclass
class StagedUpdate(WeightTransferUpdateInfo):
    """The path of the checkpoint (a .safetensors file) and the state hash that it must have.

    checked: what check_staged() returned. A rank that finds the same file does not hash it again.
    is_prepared: whether all ranks have prepared the changes that lead to it.
    """

    path: str
    state_hash: str
    checked: str | None = None
    is_prepared: bool = False


class StagedWeightEngine(WeightTransferEngine[StagedInit, StagedUpdate]):
    """Brings one rank to one version per update.

    Writes in place what changed where that was prepared; otherwise loads all of the checkpoint through vLLM's
    layerwise reload.
    """

    init_info_cls = StagedInit
    update_info_cls = StagedUpdate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_resident = True
        """Whether the device holds the weights now; sleep.py sets it."""
        self.version: str | None = None
        """The version that was loaded whole since the last update began, where its file tells it."""
        self.why_whole: str | None = None
        """Why the last prepared update was loaded whole all the same."""
        self.is_mixed = False
        """Whether the weights are of no version, because changing them broke off. No step may use them."""
        self.stale_drafter: str | None = None
        """Why the drafter was not updated with the model."""
        self._staged: StagedFile | None = None
        self.state_hash: str | None = None
        """The hash of the weights in use; None before the first update."""
        self._in_place: InPlaceWriter | None = None
        self._complete: str | None = None
        """The digest of the last layout that fills the whole model."""
        self._models = [LiveModel(self.model, self.model_config)]

    def add_head(self, head: torch.nn.Module, config: Any) -> None:
        """Has a speculative head follow with the model: with tensors of the model's own checkpoint, or with
        those of a drafter if it has another checkpoint.
        """
        is_drafter = config.model != self.model_config.model
        self._models.append(LiveModel(head, config, is_drafter=is_drafter))

    def init_transfer_engine(self, init_info: StagedInit) -> None:
        """Does nothing, because no rendezvous is needed."""

    def start_weight_update(self) -> None:
        """Does nothing: :meth:`receive_weights` starts the reload once the file is known to be good."""

    def begin_changes(self, paths: list[str], state_hash: str) -> str | None:
        """Begins to prepare, beside the engine's steps, the changes to the weights of that state hash.

        Returns why this rank has to load the checkpoint whole, or None.
        """
        staged = self._staged
        if not self.is_resident:
            return "the weights are not on the device"
        if staged is None or staged.planes is None or self.state_hash is None:
            return "the weights in use do not come from the mirror"
        try:
            self._writer.begin(staged.planes, paths, self.state_hash, state_hash)
        except (OSError, FrameError) as error:
            return str(error)
        return None

    @property
    def _writer(self) -> InPlaceWriter:
        if self._in_place is None:
            self._in_place = InPlaceWriter(self._models, self.vllm_config)
        return self._in_place

    def changes_result(self) -> tuple[bool, str | None]:
        """Returns whether the preparation has ended, and why the checkpoint has to be loaded whole."""
        return self._in_place.result() if self._in_place is not None else (True, "nothing was prepared")

    def receive_weights(self, update_info: StagedUpdate) -> None:
        """Brings the live weights to the update; an inactive engine loads it later.

        Raises: FrameError if a rank found another state hash than the announced one; nothing is changed then.
        Whatever loading raises, for example for a good file of another model. The old weights are then loaded
        again, or the mirror's if the old ones came from it; `version` tells which.
        """
        self.version = self.why_whole = None
        prepared = self._in_place.take() if self._in_place is not None else None
        with ExitStack() as reading:
            if update_info.is_prepared and self._write_in_place(prepared, update_info.state_hash, reading):
                self.state_hash = update_info.state_hash
                self._follow(update_info.path)
                return
            try:
                self._load_whole(update_info)
            except Exception:
                if any(_gather("mixed" if self.is_mixed else None)):
                    self.load()
                raise

    def _load_whole(self, update: StagedUpdate) -> None:
        staged = self._checked_by_all_ranks(update)
        try:
            with ExitStack() as reading:
                on_all_ranks(lambda: reading.enter_context(staged.reading(update.state_hash)))
                if self.is_resident:
                    self._load_instead(staged)
        except BaseException:
            staged.close()
            raise
        self._forget_staged()
        self._staged, self.state_hash = staged, update.state_hash

    def _follow(self, path: str) -> None:
        """Opens the mirror again where a later subscriber has made another file of it."""
        assert self._staged is not None
        try:
            staged = StagedFile(path)
        except (OSError, FrameError) as error:
            logger.warning("the mirror can't be opened, the one before stays in memory: %s", error)
            return
        if staged.inode == self._staged.inode:
            staged.close()
        else:
            self._forget_staged()
            self._staged = staged

    def _write_in_place(self, prepared: PreparedChanges | None, state_hash: str, reading: ExitStack) -> bool:
        """Writes the prepared changes, on all ranks or on none.

        reading: gets the mirror's lock, because layers are loaded from the mirror, and all weights if writing
        fails. Returns False when the checkpoint is to be loaded whole; the old weights are then in use again,
        unless is_mixed. Raises: FrameError where the mirror has moved on, with nothing changed.
        """
        if any(_gather(None if prepared is not None else "has no changes")):
            self.why_whole = "some rank has no changes"
            return False
        assert prepared is not None and self._staged is not None
        staged = self._staged
        on_all_ranks(lambda: reading.enter_context(staged.reading(state_hash)))
        self.is_mixed = True
        began_s = time.monotonic()
        try:
            on_all_ranks(prepared.write)
        except Exception as error:  # some rank failed, so this is raised on all ranks
            self.why_whole = str(error)
            self.is_mixed = any(_gather(prepared.take_back()))
            return False
        written_s = time.monotonic()
        try:
            on_all_ranks(partial(prepared.finish, staged.planes))
        except Exception as error:  # on all ranks too
            self.why_whole = str(error)
            return False
        self.is_mixed = False
        logger.info(
            "weights changed in place elements=%d write_s=%.4f layers_loaded=%d load_s=%.4f",
            prepared.num_changed,
            written_s - began_s,
            prepared.num_loaded,
            time.monotonic() - written_s,
        )
        return True

    def _load_instead(self, staged: StagedFile) -> None:
        """Loads all tensors; where that fails, the old weights again."""
        load = partial(self._load_from, staged)
        try:
            on_all_ranks(load)
        except Exception as error:
            logger.warning("weights not loaded, loading again: %r", error)
            if self._staged is None or self._staged.inode != staged.inode:
                self.load()  # the layers before the one that failed already have new weights
                raise
            on_all_ranks(load)  # the mirror has moved on: the old weights are nowhere any more

    def is_behind(self, state_hash: str | None) -> bool:
        """Returns whether load() would load other weights than those of this hash on any rank. None is the
        hash of the model's own files. All ranks call it at the same time.

        Raises: FrameError where the mirror holds half a version.
        """
        newest: list[str | None] = []
        on_all_ranks(lambda: newest.append(self._newest_hash()))
        return any(_gather("behind" if newest != [state_hash] else None))

    def _newest_hash(self) -> str | None:
        if self._staged is None:
            return None
        with self._staged.reading() as state:
            return state[1] if state is not None else self.state_hash

    def load(self) -> None:
        """Loads the weights again: the mirror's newest, the last update's, or the model's own files.

        All ranks call it at the same time. Raises: FrameError where the mirror holds half a version.
        """
        staged = self._staged
        if staged is not None:
            with ExitStack() as reading:
                on_all_ranks(lambda: reading.enter_context(staged.reading()))
                self._load_from(staged)
            return
        from vllm.model_executor.model_loader import get_model_loader

        loader: Any = get_model_loader(self.vllm_config.load_config)
        models = [model for model in self._models if not model.is_drafter]  # a drafter's stay on the device
        self._load_all(models, lambda model: loader.get_all_weights(model.config, model.module))

    def _load_from(self, staged: StagedFile) -> None:
        with staged.reading() as state:
            stale = self._stale_in(staged)
            models = [model for model in self._models if model not in stale]
            self._load_all(models, lambda model: model.own(staged.tensors()))
        self._note_stale(stale)
        self.version = state[0] if state is not None else None
        self.state_hash = state[1] if state is not None else self.state_hash

    def _stale_in(self, staged: StagedFile) -> list[LiveModel]:
        """Returns the speculative heads and drafters of which the file lacks tensors."""
        if len(self._models) == 1:
            return []
        self._writer.record(staged.layout())
        return self._writer.stale

    def _load_all(
        self,
        models: Sequence[LiveModel],
        tensors: Callable[[LiveModel], Iterable[tuple[str, torch.Tensor]]],
    ) -> None:
        self.is_mixed = True
        for model in reversed(models):  # layers that a drafter shares with the main model get the main one's
            load_layers(model, [model.module], tensors(model))
        self.is_mixed = False

    def _note_stale(self, heads: Sequence[LiveModel]) -> None:
        was_stale, self.stale_drafter = self.stale_drafter, None
        for head in heads:
            if head.is_drafter:
                what = f"the drafter {head.config.model}"
                fix = f"publish them under their names behind {DRAFTER_PREFIX!r}"
            else:
                what = "the speculative head"
                fix = "publish them too"
            self.stale_drafter = f"{what} keeps the weights that it has: the run has no tensors for it; {fix}"
            if was_stale is None:
                logger.warning("drafter not updated: %s", self.stale_drafter)

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

    def _require_complete(self, layout: Layout) -> None:
        """Raises: FrameError where a run of this layout leaves a part of the model as it is."""
        if layout.digest != self._complete:
            require_complete(self.vllm_config, self._models[0], layout.tensors)
            self._complete = layout.digest

    def _checked_by_all_ranks(self, update: StagedUpdate) -> StagedFile:
        """Opens and checks a checkpoint on all ranks.

        No rank loads a file that another one has refused; otherwise the engine would compute with two
        versions at once. Raises: what on_all_ranks() raises.
        """
        opened: list[StagedFile] = []

        def check() -> None:
            opened.append(StagedFile(update.path))
            is_needed = self.is_resident or opened[0].planes is None
            if is_needed and update.checked != opened[0].identity:
                opened[0].check(update.state_hash)
            self._stale_in(opened[0])
            self._require_complete(opened[0].layout())

        try:
            on_all_ranks(check)
        except Exception:
            for staged in opened:
                staged.close()
            raise
        return opened[0]


def check_staged(path: str, state_hash: str, *, is_active: bool) -> str:
    """Checks that the file's content has this state hash; returns a name by which ranks recognise the file.

    Hashing takes about as long as copying the weights, and no engine has to pause for it. An inactive engine
    does not read the mirror's bits, which will have moved on when it does. Raises: FrameError, OSError.
    """
    staged = StagedFile(path)
    try:
        if is_active or staged.planes is None:
            staged.check(state_hash)
        with staged.reading(state_hash):
            return staged.identity
    finally:
        staged.close()


def on_all_ranks(act: Callable[[], object]) -> None:
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
    """Returns every rank's verdict, in order."""
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    verdicts: list[str | None] = [verdict] * group.world_size
    if group.world_size > 1:
        torch.distributed.all_gather_object(verdicts, verdict, group=group.cpu_group)
    return verdicts
