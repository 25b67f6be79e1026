"""Where a rollout turn runs: the paper's rule and its two baselines (ROSE §4.3, §6.4).

Owns: the protocol of a policy, and the placement rules as pure functions of a turn and a fleet. cost.py
has the rule with a cost model.
Promises: equal inputs give equal answers; time is an argument; nothing is changed.
Never does: I/O, counting, queueing (turn/dispatch.py holds the turns for which no worker was picked).
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rose.scheduler.rollout.placing.fleet import Cohort, Fleet, is_usable
from rose.scheduler.rollout.placing.versions import VersionRule
from rose.scheduler.rollout.placing.views import TurnView, WorkerKind, WorkerView, of_model


def constraints(turn: TurnView, now: float) -> Hashable:
    """Returns everything that decides whether a turn without affinity can be placed."""
    avoided = tuple(sorted(worker for worker, until in turn.avoid_until.items() if until > now))
    return (turn.job, turn.model, turn.run_id, turn.pinned_version, turn.least_context, avoided)


class PlacementPolicy(Protocol):
    @property
    def versions(self) -> VersionRule: ...

    def pick(self, turn: TurnView, fleet: Fleet, now: float) -> str | None:
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

    def pick(self, turn: TurnView, fleet: Fleet, now: float) -> str | None:
        return prefer_dedicated(turn, self.versions.admits(turn, fleet.cohorts), fleet, now)

    def likeness(self, turn: TurnView, now: float) -> Hashable:
        return constraints(turn, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperPolicy:
    """Affine worker, else least-loaded dedicated one, else least-loaded eligible serving one, else queue.

    Source: ROSE §4.3. The version filter, and avoiding a worker for a moment after it failed the turn, are
    additions.
    """

    versions: VersionRule = field(default_factory=VersionRule)

    def pick(self, turn: TurnView, fleet: Fleet, now: float) -> str | None:
        return prefer_affine(turn, self.versions.admits(turn, fleet.cohorts), fleet, now)

    def likeness(self, turn: TurnView, now: float) -> Hashable:
        return constraints(turn, now)


def is_usable_in(
    cohorts: Sequence[Cohort], worker: WorkerView, turn: TurnView, fleet: Fleet, now: float
) -> bool:
    """Returns whether the worker is in one of these cohorts and may take the turn now."""
    return is_usable(worker, turn, now) and fleet.is_in(worker.id, cohorts)


def prefer_affine(turn: TurnView, cohorts: Sequence[Cohort], fleet: Fleet, now: float) -> str | None:
    """Picks the affine worker if it is usable, else as prefer_dedicated."""
    affine = fleet.find(turn.affine)
    if affine is not None and is_usable_in(cohorts, affine, turn, fleet, now):
        return affine.id
    return prefer_dedicated(turn, cohorts, fleet, now)


def prefer_dedicated(turn: TurnView, cohorts: Sequence[Cohort], fleet: Fleet, now: float) -> str | None:
    """Picks the least-loaded dedicated worker, else the least-loaded one."""
    for kind in (WorkerKind.DEDICATED, WorkerKind.SERVING):
        if (load := fleet.least_loaded(turn, kind, cohorts, now)) is not None:
            return load[1]
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedPolicy:
    """The baseline: a trajectory stays on the worker of its first turn, as long as it fits into that one's
    context, and waits when it is full.

    Source: ROSE §6.4. First turns are spread evenly over all workers, whatever their kind.
    """

    versions: VersionRule = field(default_factory=VersionRule)

    def pick(self, turn: TurnView, fleet: Fleet, now: float) -> str | None:
        cohorts, first = self.versions.admits(turn, fleet.cohorts), fleet.find(turn.affine)
        if first is not None and first.alive and of_model(turn.model, [first]) and turn.fits(first.contexts):
            return first.id if is_usable_in(cohorts, first, turn, fleet, now) else None
        loads = [fleet.least_loaded(turn, kind, cohorts, now) for kind in WorkerKind]
        return min((load for load in loads if load is not None), default=(0.0, None))[1]

    def likeness(self, turn: TurnView, now: float) -> Hashable:
        return (constraints(turn, now), turn.affine)
