"""vLLM's sleep-mode backend for GPUs: how a rollout engine's weights leave a GPU and come back.

Owns the choice of the weights that come back. vLLM's allocator copies the bits into pinned host memory, frees
the GPU's memory and keeps its addresses, so that captured graphs stay valid. When the weights come back, the
host's mirror is loaded over them if it has others by then. Not run on a GPU.
"""

from __future__ import annotations

from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeState

from rose.engine.weights.weights import StagedWeightEngine, on_all_ranks


class PinnedWeightsBackend(CuMemBackend):
    """One rank's backend. Suspending or resuming twice is harmless."""

    _state: SleepModeState

    def __init__(self, engine: StagedWeightEngine) -> None:
        """engine: whose weights these are, and which loads newer ones."""
        super().__init__()
        self._engine = engine
        self._has_whole = True
        """Whether the copy in host memory is of one version."""
        self._state_hash: str | None = None

    def suspend(self, level: int = 1) -> None:
        """Frees the GPU's copy. All levels do the same, because vLLM keeps no weights at a higher one."""
        if self._state == "SUSPENDED":
            return
        self._state_hash = self._engine.state_hash
        try:
            super().suspend(level=1)
        except BaseException:  # without host memory for all of them, they stay on the GPU
            super().resume()
            raise
        self._engine.is_resident = False

    def resume(self, tags: list[str] | None = None) -> None:
        """Brings back the weights of the version that was delivered last. All ranks call it at the same time.

        Raises whatever loading newer weights raises; the GPU's copy is freed again, so resuming can be
        retried.
        """
        if self._state == "RUNNING" or (tags is not None and "weights" not in tags):
            return
        engine = self._engine
        try:
            on_all_ranks(super().resume)
            if engine.is_behind(self._state_hash if self._has_whole else "broken"):
                self._has_whole = False
                engine.load()
        except BaseException:
            super().suspend(level=1)
            raise
        self._has_whole = engine.is_resident = True
