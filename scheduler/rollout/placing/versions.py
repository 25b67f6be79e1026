"""Which weights a turn may run on.

Owns: the three modes of versions, as a pure filter of workers; what was the newest of each training run.
Promises: a version that is gone is an error, never an endless wait.
Never does: choose among the workers it admits (policy.py).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from rose.errors import NoWorkerError
from rose.scheduler.rollout.placing.views import TurnView, WorkerView
from rose.types import WeightVersion


class VersionGone(NoWorkerError):
    """The version that a session is pinned to is on no registered worker, and versions only grow."""


class VersionMode(StrEnum):
    LATEST = "latest"
    PINNED = "pinned"
    """Every turn of a session on the weights of its first turn."""
    MAX_LAG = "max-lag"


class NewestVersions:
    """The newest version of each training run that any worker has run, in all and for each model.

    It outlives the workers: one that starts anew has base weights or an old checkpoint, and while no other is
    left to compare with, nothing else says that these are too old. Numbers of a new run id begin anew. By
    model, because a model that nobody trains would otherwise wait for another's weights.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._by_model: dict[str, dict[str, int]] = {}
        self._unnamed: dict[str, int] = {}
        """Of workers that don't say what they serve: it may be any model, so `_by_model` has these, too."""

    @property
    def numbers(self) -> Mapping[str, int]:
        """Run id -> number, as it is from now on; not to be changed."""
        return self._numbers

    def of(self, model: str | None) -> Mapping[str, int]:
        """The same of the workers that serve a model; None: of all."""
        return self._numbers if model is None else self._by_model.get(model, self._unnamed)

    def heard(self, version: WeightVersion, models: Iterable[str] | None = None) -> None:
        """A worker runs this version; `models`: what it serves, None if it doesn't say."""
        _grow(self._numbers, version)
        if models is None:
            for numbers in (self._unnamed, *self._by_model.values()):
                _grow(numbers, version)
        else:
            for model in models:
                _grow(self._by_model.setdefault(model, dict(self._unnamed)), version)

    def forget(self, run_id: str) -> None:
        """The run has ended, or begins anew under its old id. Raises: KeyError."""
        del self._numbers[run_id]
        for numbers in (self._unnamed, *self._by_model.values()):
            numbers.pop(run_id, None)


def _grow(numbers: dict[str, int], version: WeightVersion) -> None:
    known = numbers.get(version.run_id, version.number)
    numbers[version.run_id] = max(known, version.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRule:
    """Which weights a turn may run on. A worker that reports no version has base weights: older than any."""

    mode: VersionMode = VersionMode.LATEST
    max_lag: int = 0
    known: NewestVersions = field(default_factory=NewestVersions)
    """What any worker has run, also one that is gone."""

    def admits(self, turn: TurnView, workers: Sequence[WorkerView]) -> list[WorkerView]:
        """The live ones among the workers of its model whose weights this turn may use.

        "Newest" is per model and training run, since the run began: numbers of different runs don't compare.

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
        newest = self._newest_numbers(alive, turn)
        if not newest:
            return alive  # no trainer has published anything yet
        lag = self.max_lag if self.mode is VersionMode.MAX_LAG else 0
        return [w for w in alive if w.weight_version is not None and _lag(w.weight_version, newest) <= lag]

    def _newest_numbers(self, alive: Iterable[WorkerView], turn: TurnView) -> dict[str, int]:
        known = self.known.of(turn.model)
        newest = {run: number for run, number in known.items() if turn.run_id in (None, run)}
        for worker in alive:
            if (version := worker.weight_version) is not None:
                newest[version.run_id] = max(version.number, newest.get(version.run_id, version.number))
        return newest


def _lag(version: WeightVersion, newest: Mapping[str, int]) -> int:
    return newest[version.run_id] - version.number
