"""Where a rollout turn runs: the paper's rule and its two baselines (ROSE §4.3, §6.4).

Owns: the protocol of a policy, and the placement rules as pure functions of views. cost.py has the rule with
a cost model.
Promises: equal inputs give equal answers; time is an argument; nothing is changed.
Never does: I/O, counting, queueing (turn/dispatch.py holds the turns for which no worker was picked).
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rose.scheduler.rollout.placing.versions import VersionRule
from rose.scheduler.rollout.placing.views import TurnView, WorkerKind, WorkerView, of_model


def usable(
    turn: TurnView, workers: Sequence[WorkerView], versions: VersionRule, now: float
) -> list[WorkerView]:
    """Returns the workers of the turn's model that have room and may take the job's work now."""
    return [
        w
        for w in versions.admits(turn, of_model(turn.model, workers))
        if w.has_room
        and w.not_before <= now
        and turn.avoid_until.get(w.id, now) <= now
        and (w.kind is WorkerKind.DEDICATED or (w.eligible and w.owner in (None, turn.job)))
    ]


def least_loaded(workers: Iterable[WorkerView]) -> str | None:
    """Returns the worker with the least load, the first by name among equals; None if there is none."""
    return min(((w.load, w.id) for w in workers), default=(0.0, None))[1]


def constraints(turn: TurnView, now: float) -> Hashable:
    """Returns everything that decides whether a turn without affinity can be placed."""
    avoided = tuple(sorted(worker for worker, until in turn.avoid_until.items() if until > now))
    return (turn.job, turn.model, turn.run_id, turn.pinned_version, avoided)


class Policy(Protocol):
    @property
    def versions(self) -> VersionRule: ...

    def pick(self, turn: TurnView, workers: Sequence[WorkerView], now: float) -> str | None:
        """Returns the id of a worker for this turn; None if the turn has to wait.

        Raises:
            VersionGone: no registered worker can ever take the turn.
        """

    def likeness(self, turn: TurnView, now: float) -> Hashable:
        """Returns a key; if one turn can't be placed, no other turn with the same key can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnwisePolicy:
    """Least-loaded dedicated worker, else least-loaded eligible serving one, else queue. It ignores cached
    KV.

    Source: ROSE §6.4, "turn-wise routing" without affinity.
    """

    versions: VersionRule = field(default_factory=VersionRule)

    def pick(self, turn: TurnView, workers: Sequence[WorkerView], now: float) -> str | None:
        return prefer_dedicated(usable(turn, workers, self.versions, now))

    def likeness(self, turn: TurnView, now: float) -> Hashable:
        return constraints(turn, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperPolicy:
    """Affine worker, else least-loaded dedicated one, else least-loaded eligible serving one, else queue.

    Source: ROSE §4.3. The version filter, and avoiding a worker for a moment after it failed the turn, are
    additions.
    """

    versions: VersionRule = field(default_factory=VersionRule)

    def pick(self, turn: TurnView, workers: Sequence[WorkerView], now: float) -> str | None:
        return prefer_affine(turn, usable(turn, workers, self.versions, now))

    def likeness(self, turn: TurnView, now: float) -> Hashable:
        return constraints(turn, now)


def prefer_affine(turn: TurnView, found: Sequence[WorkerView]) -> str | None:
    """Picks the affine worker if it is usable, else as prefer_dedicated."""
    if turn.affine is not None and any(w.id == turn.affine for w in found):
        return turn.affine
    return prefer_dedicated(found)


def prefer_dedicated(found: Sequence[WorkerView]) -> str | None:
    """Picks the least-loaded dedicated worker, else the least-loaded one."""
    dedicated = least_loaded(w for w in found if w.kind is WorkerKind.DEDICATED)
    return dedicated if dedicated is not None else least_loaded(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedPolicy:
    """The baseline: a trajectory stays on the worker of its first turn, and waits when that is full.

    Source: ROSE §6.4. First turns are spread evenly over all workers, whatever their kind.
    """

    versions: VersionRule = field(default_factory=VersionRule)

    def pick(self, turn: TurnView, workers: Sequence[WorkerView], now: float) -> str | None:
        found = usable(turn, workers, self.versions, now)
        able = of_model(turn.model, workers)
        if turn.affine is not None and any(w.id == turn.affine and w.alive for w in able):
            found = [w for w in found if w.id == turn.affine]
        return least_loaded(found)

    def likeness(self, turn: TurnView, now: float) -> Hashable:
        return (constraints(turn, now), turn.affine)
