"""Which weights a turn may run on.

Owns: the three modes of versions, as a pure filter of workers; what was the newest of each training run.
Promises: a version that is gone is an error, never an endless wait.
Never does: choose among the workers it admits (policy.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rose.errors import NoWorkerError
from rose.scheduler.rollout.views import Turn, WorkerView
from rose.types import WeightVersion


class VersionGone(NoWorkerError):
    """The version that a session is pinned to is on no registered worker, and versions only grow."""


class VersionMode(StrEnum):
    LATEST = "latest"
    PINNED = "pinned"
    """Every turn of a session on the weights of its first turn."""
    MAX_LAG = "max-lag"


class NewestVersions:
    """The newest version of each training run that any worker has run.

    It outlives the workers: one that starts anew has base weights or an old checkpoint, and while no other is
    left to compare with, nothing else says that these are too old. Numbers of a new run id begin anew.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    @property
    def numbers(self) -> Mapping[str, int]:
        """Run id -> number, as it is from now on; not to be changed."""
        return self._numbers

    def heard(self, version: WeightVersion) -> None:
        """A worker runs this version."""
        known = self._numbers.get(version.run_id, version.number)
        self._numbers[version.run_id] = max(known, version.number)

    def forget(self, run_id: str) -> None:
        """The run has ended, or begins anew under its old id. Raises: KeyError."""
        del self._numbers[run_id]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRule:
    """Which weights a turn may run on. A worker that reports no version has base weights: older than any."""

    mode: VersionMode = VersionMode.LATEST
    max_lag: int = 0
    known: Mapping[str, int] = field(default_factory=dict)
    """Run id -> the newest version that any worker has run, also one that is gone."""

    def admits(self, turn: Turn, workers: Sequence[WorkerView]) -> list[WorkerView]:
        """The live workers whose weights this turn may use.

        "Newest" is per training run, since the run began: numbers of different runs don't compare.

        Raises:
            VersionGone: the pinned version is on no registered worker.
        """
        if self.mode is VersionMode.PINNED and turn.pinned_version is not None:
            holders = [w for w in workers if w.weight_version == turn.pinned_version]
            if not holders:
                held = sorted({str(w.weight_version) for w in workers})
                needs = f"session {turn.session} needs weights {turn.pinned_version}"
                raise VersionGone(f"{needs}, workers hold {held}")
            return [w for w in holders if w.alive]
        alive = [w for w in workers if w.alive]
        if turn.run_id is not None:
            alive = [w for w in alive if w.weight_version is None or w.weight_version.run_id == turn.run_id]
        newest = self._newest_numbers(alive, turn.run_id)
        if not newest:
            return alive  # no trainer has published anything yet
        lag = self.max_lag if self.mode is VersionMode.MAX_LAG else 0
        return [w for w in alive if w.weight_version is not None and _lag(w.weight_version, newest) <= lag]

    def _newest_numbers(self, alive: Iterable[WorkerView], run_id: str | None) -> dict[str, int]:
        newest = {run: number for run, number in self.known.items() if run_id in (None, run)}
        for worker in alive:
            if (version := worker.weight_version) is not None:
                newest[version.run_id] = max(version.number, newest.get(version.run_id, version.number))
        return newest


def _lag(version: WeightVersion, newest: Mapping[str, int]) -> int:
    return newest[version.run_id] - version.number
