"""Which weights a turn may run on.

Owns: the three version modes, as a pure filter of cohorts; the newest version of each training run.
Promises: a version that no worker holds any more is an error, never an endless wait. Once a run's publisher
has announced a version, no turn of the run begins on base weights, or on weights that are too old beside it.
Never does: choose among the workers that it admits (policy.py).
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rose.errors import NoWorkerError
from rose.scheduler.rollout.placing.fleet import Cohort
from rose.scheduler.rollout.placing.views import NO_RUN, TurnView, Wants, of_model
from rose.types import WeightVersion

logger = logging.getLogger(__name__)

_ANNOUNCED_S = 600.0
"""What was announced longer ago bounds nothing once a worker has newer weights: the trainer has published
them without a word."""


class VersionGone(NoWorkerError):
    """No registered worker holds the version that a session is pinned to, and versions only grow."""


class VersionMode(StrEnum):
    LATEST = "latest"
    PINNED = "pinned"
    """Every turn of a session runs on the weights of its first turn."""
    MAX_LAG = "max-lag"


class NewestVersions:
    """The newest version of each training run: what its publisher announced last, or else what any worker has
    held, overall and for each model.

    It outlives the workers, because a restarted worker has base weights or an old checkpoint, and without
    other workers nothing else shows that these are too old. It is kept by model, because turns for a model
    that is not trained would otherwise wait for another model's weights.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._whole: dict[str, int] = {}
        """Those of them that are no LoRA adapters."""
        self._adapters: set[str] = set()
        self._by_model: dict[str, dict[str, int]] = {}
        self._announced: dict[str, int] = {}
        self._announced_at: dict[str, float] = {}
        self.num_changes = 0
        """Grows when a run is announced for the first time, or forgotten."""
        self._unnamed: dict[str, int] = {}
        """The versions of workers that don't say what they serve. `_by_model` holds these as well."""

    @property
    def numbers(self) -> Mapping[str, int]:
        """Run id -> newest number, as a live mapping that callers must not change."""
        return self._numbers

    def of(self, model: str | None) -> Mapping[str, int]:
        """Returns the newest numbers among the workers that serve a model; None: among all workers, without
        LoRA adapters."""
        return self._whole if model is None else self._by_model.get(model, self._unnamed)

    def by_model(self) -> list[tuple[str | None, Mapping[str, int]]]:
        """Returns each model with its numbers; None stands for workers that don't say what they serve."""
        return [(None, self._unnamed), *self._by_model.items()]

    def heard(self, version: WeightVersion, models: Iterable[str] | None = None, *, now: float) -> None:
        """Notes a worker's version. `models`: what the worker serves; None if it does not say."""
        self._drop_old_bound(version, now)
        version = WeightVersion(run_id=version.run_id, number=self.shown_by(version))
        _grow(self._numbers, version)
        _grow(self._whole, version)
        if models is None:
            for numbers in (self._unnamed, *self._by_model.values()):
                _grow(numbers, version)
        else:
            for model in models:
                _grow(self._by_model.setdefault(model, dict(self._unnamed)), version)

    def heard_adapter(self, version: WeightVersion, *, now: float) -> None:
        """Notes the version of a LoRA adapter that a worker holds, whose model name is the run's."""
        self._adapters.add(version.run_id)
        self._drop_old_bound(version, now)
        version = WeightVersion(run_id=version.run_id, number=self.shown_by(version))
        _grow(self._numbers, version)
        _grow(self._by_model.setdefault(version.run_id, {}), version)

    def is_adapter(self, model: str | None) -> bool:
        """Returns whether a worker has held a LoRA adapter of this name."""
        return model in self._adapters

    def announced(self, version: WeightVersion, now: float) -> None:
        """Notes what the run's publisher has published: the run's newest version, whatever workers have."""
        run_id = version.run_id
        self.num_changes += run_id not in self._announced
        self._announced[run_id], self._announced_at[run_id] = version.number, now
        for numbers in (self._numbers, self._whole, self._unnamed, *self._by_model.values()):
            if run_id in numbers:
                numbers[run_id] = version.number

    def bound(self, run_id: str) -> int:
        """Returns the number that was announced last; 0 if none was."""
        return self._announced.get(run_id, 0)

    def _drop_old_bound(self, version: WeightVersion, now: float) -> None:
        run_id, bound = version.run_id, self._announced.get(version.run_id)
        if bound is None or version.number <= bound or now - self._announced_at[run_id] <= _ANNOUNCED_S:
            return
        del self._announced[run_id]
        logger.warning(
            "run %s: version %d was announced more than %g s ago, and a worker has %s. From now on workers'"
            " versions count; pass router_announcer what is published, or leave it out",
            *(run_id, bound, _ANNOUNCED_S, version),
        )

    def shown_by(self, version: WeightVersion) -> int:
        """Returns the newest number that a worker's version shows of its run: what was announced, or else its
        own."""
        return self._announced.get(version.run_id, version.number)

    def awaited(self, run_id: str | None) -> int | None:
        """Returns the number that was announced of a run of which no worker has held any version, so that
        nothing tells for which model it is; None if there is none."""
        return self._announced.get(run_id) if run_id is not None and run_id not in self._numbers else None

    def forget(self, run_id: str) -> None:
        """Forgets a run that has ended or starts again under its old id. Raises: KeyError."""
        if self._announced.pop(run_id, None) is None or run_id in self._numbers:
            del self._numbers[run_id]
        self.num_changes += 1
        self._adapters.discard(run_id)
        for numbers in (self._whole, self._unnamed, *self._by_model.values()):
            numbers.pop(run_id, None)


def _grow(numbers: dict[str, int], version: WeightVersion) -> None:
    known = numbers.get(version.run_id, version.number)
    numbers[version.run_id] = max(known, version.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRule:
    """A version mode. A worker without a version has base weights, which are older than any version."""

    mode: VersionMode = VersionMode.LATEST
    max_lag: int = 0
    known: NewestVersions = field(default_factory=NewestVersions)
    """The versions that publishers have announced, or any worker has held, including workers that are
    gone."""

    def are_held(self, wants: Wants, cohorts: Iterable[Cohort]) -> bool:
        """Returns whether any worker, lost ones included, has weights that a new session's turn may use."""
        turn = TurnView(session="", model=wants.model, run_id=wants.run_id)
        return bool(self._new_enough(turn, of_model(wants.model, list(cohorts))))

    def outrun(self, wants: Wants, cohorts: Iterable[Cohort]) -> list[tuple[WeightVersion, WeightVersion]]:
        """Returns the newest version of each run that a new session's turn may want, beside the newest that
        workers have, where all of them have older ones."""
        turn = TurnView(session="", model=wants.model, run_id=wants.run_id)
        held = dict[str, int]()
        for cohort in of_model(wants.model, list(cohorts)):
            if (version := cohort.version_for(wants.model)) is not None:
                _grow(held, version)
        newest = self._newest_numbers((), turn)
        return [
            (WeightVersion(run_id=run, number=newest[run]), WeightVersion(run_id=run, number=number))
            for run, number in held.items()
            if number < newest.get(run, 0)
        ]

    def is_base_too_old(self, wants: Wants) -> bool:
        """Returns whether no turn that wants this begins on base weights, because a version is known."""
        turn = TurnView(session="", model=wants.model, run_id=wants.run_id)
        return bool(self._newest_numbers((), turn))

    def admits(self, turn: TurnView, cohorts: Sequence[Cohort]) -> list[Cohort]:
        """Returns the cohorts with live workers of the turn's model, whose weights the turn may use, and
        into whose contexts it fits.

        The newest version is that of a model and training run; numbers of different runs can't be compared.

        Raises:
            VersionGone: no registered worker holds the pinned version.
        """
        cohorts = of_model(turn.model, cohorts)
        pinned = turn.pinned_version if self.mode is VersionMode.PINNED else None
        if pinned is not None and turn.run_id in (None, pinned.run_id):
            holders = [cohort for cohort in cohorts if cohort.version_for(turn.model) == pinned]
            if not holders:
                held = sorted({str(cohort.version_for(turn.model)) for cohort in cohorts})
                needs = f"session {turn.session} needs weights {pinned}"
                raise VersionGone(f"{needs}, but workers hold {held}; begin a new session")
            return _long_enough(turn, holders, holders)
        alive = [cohort for cohort in cohorts if cohort.num_alive]
        return _long_enough(turn, self._new_enough(turn, alive), cohorts)

    def _new_enough(self, turn: TurnView, cohorts: Sequence[Cohort]) -> list[Cohort]:
        versions = [(cohort, cohort.version_for(turn.model)) for cohort in cohorts]
        found = [
            (cohort, version)
            for cohort, version in versions
            if turn.run_id is None
            or (
                version.run_id == turn.run_id
                if version is not None
                else not (cohort.awaits_weights and turn.run_id != NO_RUN)
            )
        ]
        newest = self._newest_numbers((version for _, version in found), turn)
        if not newest:
            return [cohort for cohort, _ in found]  # nothing has been published yet
        lag = self.max_lag if self.mode is VersionMode.MAX_LAG else 0
        return [c for c, version in found if version is not None and _lag(version, newest) <= lag]

    def _newest_numbers(self, held: Iterable[WeightVersion | None], turn: TurnView) -> dict[str, int]:
        known = self.known.of(turn.model)
        newest = {run: number for run, number in known.items() if turn.run_id in (None, run)}
        for version in held:
            if version is not None:
                number = self.known.shown_by(version)
                newest[version.run_id] = max(number, newest.get(version.run_id, number))
        if turn.run_id is not None and (number_due := self.known.awaited(turn.run_id)) is not None:
            newest[turn.run_id] = number_due
        return newest


def _long_enough(turn: TurnView, able: list[Cohort], cohorts: Iterable[Cohort]) -> list[Cohort]:
    """Returns those of `able` that have the turn's least context, or the longest of all `cohorts`, lost ones
    included, if none of these has it: the turn does not wait for what is not there, and the worker says why
    it does not fit."""
    if turn.least_context is None or turn.model is None:
        return able
    if not any(turn.fits(cohort.contexts) for cohort in cohorts):
        longest = max((cohort.contexts[turn.model] or 0 for cohort in cohorts), default=0)
        turn = replace(turn, least_context=longest)
    return [cohort for cohort in able if turn.fits(cohort.contexts)]


def _lag(version: WeightVersion, newest: Mapping[str, int]) -> int:
    return newest[version.run_id] - version.number
