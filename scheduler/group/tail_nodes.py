"""Moving a tail onto fewer whole nodes: which ones it keeps, and whether that is predicted to pay.

Owns the prediction for one job of a running group: a replay of its past iterations with and without the move,
through the production permit book and pace. A move needs a predicted gain of at least `MIN_PREDICTED_GAIN`
for the whole group, must leave room for another job, and must not be able to break the certificate. Pure.
Here a worker of tail.py is a whole rollout node. A freed node is empty, so the next job needs no room beside
a guest. A choice takes about 0.06 s with two jobs and 0.13 s with five, once per rollout of a job whose tail
may move.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rose.scheduler.group.certificate import Certificate
from rose.scheduler.group.model import Group, Phase
from rose.scheduler.group.permits import Permit
from rose.scheduler.group.replay import PhaseTimes, replay
from rose.scheduler.group.tail import MIN_PREDICTED_GAIN, THRESHOLDS, RolloutSpeed, play_rollout, workers_kept

NUM_PASSES = 4
"""The passes that are replayed; as many past iterations are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTail:
    """A job's rollouts: how fast its nodes are, and the response lengths of its last iterations."""

    speed: RolloutSpeed
    past: Sequence[Sequence[int]]


def kept_nodes(group: Group, job: str, num_kept: int) -> tuple[int, ...] | None:
    """Returns the nodes that the fewest others use. None: no other job fits on those that would be freed."""
    own = next(member.rollout_nodes for member in group.members if member.job.name == job)
    others = [set(member.rollout_nodes) for member in group.members if member.job.name != job]
    by_use = sorted(own, key=lambda node: (sum(node in each for each in others), node))
    kept, freed = by_use[:num_kept], set(by_use[num_kept:])
    has_use = any(each & freed and not each & set(kept) for each in others)
    return tuple(sorted(kept)) if has_use else None


def choose_threshold(
    group: Group,
    certificate: Certificate,
    job: str,
    tails: Mapping[str, NodeTail],
    thresholds: Mapping[str, float | None],
) -> float | None:
    """Returns the share of finished responses at which the job's tail should move; None: leave it.

    `group`: its members that are there. `tails`: of all those of which something is known; the others' phases
    count as longest. `thresholds`: what the other members do.
    """
    present = {member.job.name for member in group.members}
    leaves_s = {name: 0.0 for name in certificate.bounds if name not in present}

    def pass_s(threshold: float | None) -> float:
        past = _Past(group, certificate, tails, {**thresholds, job: threshold})
        history = replay(certificate, past.times_of, NUM_PASSES, leaves_s=leaves_s)
        return sum(ends[-1] for ends in history.ends_s.values() if ends)

    off_s = pass_s(None)
    best_s, best = min(((pass_s(each), each) for each in THRESHOLDS), key=lambda found: found[0])
    return best if off_s >= best_s * MIN_PREDICTED_GAIN else None


def kept_now(
    group: Group, job: str, speed: RolloutSpeed, *, num_left: int, reached_tokens: int, left_s: float
) -> tuple[int, ...] | None:
    """Returns the nodes onto which the tail may move now and still end within `left_s` at worst; None: it may
    not."""
    num_kept = workers_kept(
        speed,
        num_left=num_left,
        reached_tokens=reached_tokens,
        left_s=left_s,
        num_workers=speed.num_workers,
    )
    return kept_nodes(group, job, num_kept) if num_kept is not None else None


class _Past:
    """Past iterations once more."""

    def __init__(
        self,
        group: Group,
        certificate: Certificate,
        tails: Mapping[str, NodeTail],
        thresholds: Mapping[str, float | None],
    ) -> None:
        self._group = group
        self._certificate = certificate
        self._tails = tails
        self._thresholds = thresholds

    def times_of(self, permit: Permit, iteration: int) -> PhaseTimes:
        worst_s = self._certificate.durations_s[permit.step_number % len(self._certificate.order.steps)]
        known = self._tails.get(permit.job)
        if permit.kind is Phase.TRAIN or known is None:
            return PhaseTimes(done_s=worst_s)
        lengths = known.past[iteration % len(known.past)]
        tail = play_rollout(lengths, known.speed, self._thresholds.get(permit.job))
        kept = kept_nodes(self._group, permit.job, tail.num_workers) if tail.num_workers else None
        if kept is None or tail.freed_s >= min(tail.done_s, worst_s):
            tail = play_rollout(lengths, known.speed, None)
            return PhaseTimes(done_s=min(tail.done_s, worst_s))
        freed = tuple(node for node in permit.resources if node not in kept)
        return PhaseTimes(done_s=min(tail.done_s, worst_s), freed_s=tail.freed_s, freed=freed)
