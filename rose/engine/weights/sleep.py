"""vLLM's sleep-mode backend ``rose``: a rollout engine's weights are on the device only while it is active.

Owns the device's copy of one rank's weights: dropping it, and making it again from host memory. The host's
copy needs no way back from the device, as rollout weights change only by updates: it is the model's own
files until the first update, then the staged file of the last one (weights.py).

On a CPU the worker's anonymous memory stands for device memory: parameters, and the copies that oneDNN packs
of them where the processor lets it, which no tensor shows. So packed copies are not moved but packed again,
by the same layerwise reload that a weight update takes. Pages of files (the host's copy) and the slab pool
don't count.
"""

from __future__ import annotations

import ctypes
import logging

import torch
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeState
from vllm.platforms import current_platform

from rose.engine.weights.device_weights import device_bytes, storages
from rose.engine.weights.weights import StagedWeightEngine

logger = logging.getLogger(__name__)


class HostWeightsBackend(SleepModeBackend):
    """One rank's. Suspending and resuming twice is harmless."""

    _state: SleepModeState

    def __init__(self) -> None:
        super().__init__()
        self._engine: StagedWeightEngine | None = None
        self._storages: list[tuple[torch.UntypedStorage, int]] = []

    def attach(self, engine: StagedWeightEngine) -> None:
        """Whose weights these are, and where they come from again."""
        self._engine = engine

    @property
    def engine(self) -> StagedWeightEngine:
        assert self._engine is not None, "attach() comes first"
        return self._engine

    def suspend(self, level: int = 1) -> None:
        """Free the device's copy; levels are alike, as the host's copy always stays."""
        if self._state == "SUSPENDED":
            return
        model = self.engine.model
        before = device_bytes(model)
        self._storages = [(storage, storage.nbytes()) for storage in storages(model)]
        self._free()
        logger.info("weights off the device bytes=%d", before)

    def resume(self, tags: list[str] | None = None) -> None:
        """Make the device's copy again, of the version that was last delivered.

        Raises:
            whatever reading the weights raises; the device's copy is freed again, so resuming can be retried.
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
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = None  # held the packed copy, if there is one
        _trim()
        self._state, self.engine.is_resident = "SUSPENDED", False

    @classmethod
    def is_supported(cls) -> bool:
        return bool(current_platform.is_cpu())

    @classmethod
    def preserves_communicators(cls) -> bool:
        return True


def _trim() -> None:
    """Give freed chunks back to the system: glibc keeps those below its mmap threshold, some for good."""
    ctypes.CDLL(None).malloc_trim(0)
