"""Where a rollout turn runs.

Owns: the rules of placement (ROSE §4.3) and of weight versions, as pure functions of views.
Promises: the same inputs give the same answer; time is an argument; nothing is changed.
Never does: I/O, counting, queueing (dispatch.py holds the turns for which no worker was picked).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from rose.errors import NoWorkerError
from rose.types import WeightVersion


class WorkerKind(StrEnum):
    DEDICATED = "dedicated"
    """A GPU that only runs rollouts."""
    SERVING = "serving"
    """The rollout engine on a GPU that serves traffic first."""


class VersionGone(NoWorkerError):
    """The version that a session is pinned to is on no registered worker, and versions only grow."""


class VersionMode(StrEnum):
    LATEST = "latest"
    PINNED = "pinned"
    """Every turn of a session on the weights of its first turn."""
    MAX_LAG = "max-lag"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request for generation within a trajectory."""

    session: str
    affine: str | None = None
    """The worker that ran the session's previous turn and most likely still holds its prefix KV."""
    run_id: str | None = None
    """Only weights of this training run; None: of any."""
    pinned_version: WeightVersion | None = None
    avoid_until: Mapping[str, float] = field(default_factory=dict)
    """Workers that just failed, stalled or aborted this very turn: none of them before the given time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """What the policy may know about a worker."""

    id: str
    kind: WorkerKind
    alive: bool
    in_flight: int
    cap: int
    eligible: bool = True
    """Serving GPUs: the SLO gate admits rollout work and no memory pressure is on."""
    weight_version: WeightVersion | None = None
    load: float = 0.0
    not_before: float = 0.0
    """It failed or stalled a turn: none for it before this time."""

    @property
    def has_room(self) -> bool:
        return self.alive and self.in_flight < self.cap


class Policy(Protocol):
    def pick(self, turn: Turn, workers: Sequence[WorkerView], now: float) -> str | None:
        """The worker for this turn; None: queue it.

        Raises:
            VersionGone: no registered worker can ever take it.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRule:
    """Which weights a turn may run on. A worker that reports no version has base weights: older than any."""

    mode: VersionMode = VersionMode.LATEST
    max_lag: int = 0

    def admits(self, turn: Turn, workers: Sequence[WorkerView]) -> list[WorkerView]:
        """The live workers whose weights this turn may use.

        "Newest" is per training run, among live workers: numbers of different runs don't compare.

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
        newest = _newest_numbers(alive)
        if not newest:
            return alive
        lag = self.max_lag if self.mode is VersionMode.MAX_LAG else 0
        return [w for w in alive if w.weight_version is not None and _lag(w.weight_version, newest) <= lag]


def _newest_numbers(workers: Iterable[WorkerView]) -> dict[str, int]:
    newest: dict[str, int] = {}
    for worker in workers:
        if (version := worker.weight_version) is not None:
            newest[version.run_id] = max(version.number, newest.get(version.run_id, version.number))
    return newest


def _lag(version: WeightVersion, newest: Mapping[str, int]) -> int:
    return newest[version.run_id] - version.number


def _usable(turn: Turn, workers: Iterable[WorkerView], now: float) -> list[WorkerView]:
    """Workers with room that may take rollout work now, least loaded first, ties by name."""
    usable = [
        w
        for w in workers
        if w.has_room
        and w.not_before <= now
        and turn.avoid_until.get(w.id, now) <= now
        and (w.kind is WorkerKind.DEDICATED or w.eligible)
    ]
    return sorted(usable, key=lambda w: (w.load, w.id))


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperPolicy:
    """Affine worker, else least-loaded dedicated, else least-loaded eligible serving, else queue.

    Source: ROSE §4.3. Ours beyond it: the version filter, and leaving a worker alone for a moment
    after it failed this turn.
    """

    versions: VersionRule = field(default_factory=VersionRule)

    def pick(self, turn: Turn, workers: Sequence[WorkerView], now: float) -> str | None:
        usable = _usable(turn, self.versions.admits(turn, workers), now)
        by_preference = (
            [w for w in usable if w.id == turn.affine],
            [w for w in usable if w.kind is WorkerKind.DEDICATED],
            usable,
        )
        return next((group[0].id for group in by_preference if group), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedPolicy:
    """The baseline: a trajectory stays on the worker of its first turn, and waits for it when it is full."""

    versions: VersionRule = field(default_factory=VersionRule)

    def pick(self, turn: Turn, workers: Sequence[WorkerView], now: float) -> str | None:
        usable = _usable(turn, self.versions.admits(turn, workers), now)
        if turn.affine is not None and any(w.id == turn.affine and w.alive for w in workers):
            usable = [w for w in usable if w.id == turn.affine]
        return usable[0].id if usable else None
