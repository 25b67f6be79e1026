"""Where a rollout turn runs: the paper's rule and its two baselines (ROSE §4.3, §6.4).

Owns: the rules of placement, as pure functions of views. The rule with a cost model is in cost.py.
Promises: the same inputs give the same answer; time is an argument; nothing is changed.
Never does: I/O, counting, queueing (dispatch.py holds the turns for which no worker was picked).
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from rose.scheduler.rollout.placing.versions import VersionRule
from rose.scheduler.rollout.placing.views import TurnView, WorkerKind, WorkerView, of_model


def usable(
    turn: TurnView, workers: Sequence[WorkerView], versions: VersionRule, now: float
) -> list[WorkerView]:
    """Workers of the turn's model with room that may take this job's work now."""
    return [
        w
        for w in versions.admits(turn, of_model(turn.model, workers))
        if w.has_room
        and w.not_before <= now
        and turn.avoid_until.get(w.id, now) <= now
        and (w.kind is WorkerKind.DEDICATED or (w.eligible and w.owner in (None, turn.job)))
    ]


def least_loaded(workers: Iterable[WorkerView]) -> str | None:
    """Ties by name; None if there is none."""
    return min(((w.load, w.id) for w in workers), default=(0.0, None))[1]


def constraints(turn: TurnView, now: float) -> Hashable:
    """What decides whether a turn that may go anywhere can be placed at all."""
    avoided = tuple(sorted(worker for worker, until in turn.avoid_until.items() if until > now))
    return (turn.job, turn.model, turn.run_id, turn.pinned_version, avoided)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnwisePolicy:
    """Least-loaded dedicated, else least-loaded eligible serving, else queue; blind to where KV lies.

    Source: ROSE §6.4, "turn-wise routing" without affinity.
    """

    versions: VersionRule = field(default_factory=VersionRule)

    def pick(self, turn: TurnView, workers: Sequence[WorkerView], now: float) -> str | None:
        return prefer_dedicated(usable(turn, workers, self.versions, now))

    def likeness(self, turn: TurnView, now: float) -> Hashable:
        return constraints(turn, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperPolicy:
    """Affine worker, else least-loaded dedicated, else least-loaded eligible serving, else queue.

    Source: ROSE §4.3. Ours beyond it: the version filter, and leaving a worker alone for a moment
    after it failed this turn.
    """

    versions: VersionRule = field(default_factory=VersionRule)

    def pick(self, turn: TurnView, workers: Sequence[WorkerView], now: float) -> str | None:
        return prefer_affine(turn, usable(turn, workers, self.versions, now))

    def likeness(self, turn: TurnView, now: float) -> Hashable:
        return constraints(turn, now)


def prefer_affine(turn: TurnView, found: Sequence[WorkerView]) -> str | None:
    """The paper's order among usable workers."""
    if turn.affine is not None and any(w.id == turn.affine for w in found):
        return turn.affine
    return prefer_dedicated(found)


def prefer_dedicated(found: Sequence[WorkerView]) -> str | None:
    dedicated = least_loaded(w for w in found if w.kind is WorkerKind.DEDICATED)
    return dedicated if dedicated is not None else least_loaded(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedPolicy:
    """The baseline: a trajectory stays on the worker of its first turn, and waits for it when it is full.

    Source: ROSE §6.4. The first turns are spread evenly over all workers, whatever their kind.
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
