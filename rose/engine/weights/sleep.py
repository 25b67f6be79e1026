"""vLLM's sleep-mode backend ``rose``: a rollout engine's weights are on the device only while it is active.

Owns the device's copy of one rank's weights: dropping it, and making it again from host memory. The host's
copy is never written back from the device, because rollout weights change only by updates: it is the model's
own files until the first update, then the staged file of the last one (weights.py).

On a CPU the worker's anonymous memory stands for device memory: the parameters, and the copies that oneDNN
packs of them where the processor allows it, which no tensor shows. So packed copies are packed again instead
of moved, by the same layerwise reload as in a weight update. Pages of files (the host's copy) and the slab
pool don't count.
"""

from __future__ import annotations

import ctypes
import logging

import torch
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeState
from vllm.platforms import current_platform

from rose.engine.weights.device_weights import device_bytes, storages
from rose.engine.weights.packed import drop_packed_copy
from rose.engine.weights.weights import StagedWeightEngine

logger = logging.getLogger(__name__)


class HostWeightsBackend(SleepModeBackend):
    """One rank's backend. Suspending or resuming twice is harmless."""

    _state: SleepModeState

    def __init__(self) -> None:
        super().__init__()
        self._engine: StagedWeightEngine | None = None
        self._storages: list[tuple[torch.UntypedStorage, int]] = []

    def attach(self, engine: StagedWeightEngine) -> None:
        """Sets the engine whose weights these are, and which loads them again."""
        self._engine = engine

    @property
    def engine(self) -> StagedWeightEngine:
        assert self._engine is not None, "attach() comes first"
        return self._engine

    def suspend(self, level: int = 1) -> None:
        """Frees the device's copy. All levels do the same, because the host's copy always stays."""
        if self._state == "SUSPENDED":
            return
        model = self.engine.model
        before = device_bytes(model)
        self._storages = [(storage, storage.nbytes()) for storage in storages(model)]
        self._free()
        logger.info("weights off the device bytes=%d", before)

    def resume(self, tags: list[str] | None = None) -> None:
        """Makes the device's copy again, of the version that was delivered last.

        Raises whatever reading the weights raises; the device's copy is freed again, so resuming can be
        retried.
        """
        if self._state == "RUNNING" or (tags is not None and "weights" not in tags):
            return
        self._state = "RESUMING"
        try:
            for storage, num_bytes in self._storages:
                storage.resize_(num_bytes)
            self.engine.load()
        except BaseException:
            self._free()
            raise
        _trim()
        self._state, self.engine.is_resident = "RUNNING", True
        logger.info("weights on the device bytes=%d", device_bytes(self.engine.model))

    def _free(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)
        for module in self.engine.model.modules():
            drop_packed_copy(module)
        _trim()
        self._state, self.engine.is_resident = "SUSPENDED", False

    @classmethod
    def is_supported(cls) -> bool:
        return bool(current_platform.is_cpu())

    @classmethod
    def preserves_communicators(cls) -> bool:
        return True


def _trim() -> None:
    """Returns freed chunks to the system: glibc keeps those below its mmap threshold, some of them for
    ever.
    """
    ctypes.CDLL(None).malloc_trim(0)
