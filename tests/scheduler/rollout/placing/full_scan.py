"""The policies as a look at every worker, for comparison with the fleet's order."""

import math
from collections.abc import Sequence
from dataclasses import replace

from rose.scheduler.rollout.placing.cost import CostPolicy, cost_s
from rose.scheduler.rollout.placing.policy import PinnedPolicy, PlacementPolicy, TurnwisePolicy
from rose.scheduler.rollout.placing.versions import VersionGone, VersionMode, VersionRule
from rose.scheduler.rollout.placing.views import NO_RUN, TurnView, WorkerKind, WorkerView, of_model
from rose.types import WeightVersion


def picked(policy: PlacementPolicy, turn: TurnView, workers: Sequence[WorkerView], now: float) -> str | None:
    """Returns what the policy should pick. Raises: VersionGone."""
    found = usable(turn, workers, policy.versions, now)
    if isinstance(policy, TurnwisePolicy):
        return _prefer_dedicated(found)
    if isinstance(policy, PinnedPolicy):
        able = of_model(turn.model, workers)
        if turn.affine is not None and any(
            w.id == turn.affine and w.alive and _context(turn, w) >= (turn.least_context or 0) for w in able
        ):
            found = [w for w in found if w.id == turn.affine]
        return _least_loaded(found)
    if isinstance(policy, CostPolicy) and found:
        known = [w.speed for w in of_model(turn.model, workers) if w.speed is not None]
        slowest = max(known, key=lambda speed: (speed.decode_s(1), speed.prefill_s_per_token), default=None)
        if slowest is not None and all(w.share is not None and now < w.share_until for w in found):
            costs = [(cost_s(turn, w, w.speed if w.speed is not None else slowest), w.id) for w in found]
            return min(costs)[1]
    if turn.affine is not None and any(w.id == turn.affine for w in found):
        return turn.affine
    return _prefer_dedicated(found)


def usable(
    turn: TurnView, workers: Sequence[WorkerView], versions: VersionRule, now: float
) -> list[WorkerView]:
    as_answered = [replace(w, weight_version=_version(turn, w)) for w in of_model(turn.model, workers)]
    return [
        w
        for w in _admitted(turn, as_answered, versions)
        if w.has_room
        and w.not_before <= now
        and turn.avoid_until.get(w.id, now) <= now
        and (w.kind is WorkerKind.DEDICATED or (w.eligible and w.owner in (None, turn.job)))
    ]


def _version(turn: TurnView, worker: WorkerView) -> WeightVersion | None:
    adapter = worker.adapters.get(turn.model) if turn.model is not None else None
    return adapter if adapter is not None else worker.weight_version


def _admitted(turn: TurnView, workers: Sequence[WorkerView], rule: VersionRule) -> list[WorkerView]:
    pinned = turn.pinned_version
    if rule.mode is VersionMode.PINNED and pinned is not None and turn.run_id in (None, pinned.run_id):
        holders = [w for w in workers if w.weight_version == pinned]
        if not holders:
            raise VersionGone
        return [w for w in _long_enough(turn, holders, holders) if w.alive]
    return _long_enough(turn, _new_enough(turn, workers, rule), workers)


def _long_enough(
    turn: TurnView, able: Sequence[WorkerView], workers: Sequence[WorkerView]
) -> list[WorkerView]:
    longest = max((_context(turn, w) for w in workers), default=0)
    return [w for w in able if _context(turn, w) >= min(turn.least_context or 0, longest)]


def _context(turn: TurnView, worker: WorkerView) -> float:
    known = worker.contexts.get(turn.model) if turn.model is not None else None
    return known if known is not None else math.inf


def _new_enough(turn: TurnView, workers: Sequence[WorkerView], rule: VersionRule) -> list[WorkerView]:
    alive = [w for w in workers if w.alive]
    if turn.run_id is not None:
        runs = {w.id: w.weight_version.run_id if w.weight_version is not None else None for w in alive}
        alive = [w for w in alive if runs[w.id] in (None, turn.run_id)]
        if turn.run_id != NO_RUN:
            alive = [w for w in alive if runs[w.id] is not None or not w.awaits_weights]
    known = rule.known.of(turn.model)
    newest = {run: number for run, number in known.items() if turn.run_id in (None, run)}
    for worker in alive:
        if (version := worker.weight_version) is not None:
            number = rule.known.shown_by(version)
            newest[version.run_id] = max(number, newest.get(version.run_id, number))
    if turn.run_id is not None and (awaited := rule.known.awaited(turn.run_id)) is not None:
        newest[turn.run_id] = awaited
    if not newest:
        return alive
    lag = rule.max_lag if rule.mode is VersionMode.MAX_LAG else 0
    versioned = [(w, w.weight_version) for w in alive if w.weight_version is not None]
    return [w for w, version in versioned if newest[version.run_id] - version.number <= lag]


def _least_loaded(workers: Sequence[WorkerView]) -> str | None:
    return min(((w.load, w.id) for w in workers), default=(0.0, None))[1]


def _prefer_dedicated(found: Sequence[WorkerView]) -> str | None:
    dedicated = _least_loaded([w for w in found if w.kind is WorkerKind.DEDICATED])
    return dedicated if dedicated is not None else _least_loaded(found)
