"""Chooses the cyclic order of a group: round-robin first, multi-rate where that is better or the only way.

Owns: which orders are tried. Promises: what it returns is certified; among the certified orders tried it is
the one with the most progress, a round-robin one at a tie; the same group gives the same order. Never:
promises that no better order exists (benchmarks/bench_certificate.py compares with an exact solver).
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from rose.scheduler.cluster.model import Group
from rose.scheduler.group.certificate import (
    SLO_TOLERANCE,
    Certificate,
    CertificateError,
    certify,
    limit_s,
)
from rose.scheduler.group.order import order_of

MAX_EXHAUSTIVE = 5
"""Members of which every round-robin order is tried: 24 cyclic orders."""
MAX_REPEATS = 6
MAX_TURNS = 16
"""Iterations of one job, and of all, in a pass: more adds little and costs milliseconds to decide."""
MIN_GAIN = 1.001
"""Multi-rate passes are longer, hence slower to change: not for nothing."""


def best_certificate(group: Group, *, multi_rate: bool = True) -> Certificate:
    """The certified order with the most progress among those tried.

    Raises: CertificateError, of the round-robin order that came closest, if none can be certified.
    """
    best: Certificate | None = None
    refusals: list[CertificateError] = []
    for iterations in _round_robins(group):
        best = _better(group, iterations, best, 1.0, refusals)
        if best is not None and best.cycle_s <= group.round_robin_s * (1 + 1e-9):
            break  # no round-robin cycle is shorter
    if multi_rate:
        closest = list(refusals)
        for iterations in _multi_rates(group, best.progress * MIN_GAIN if best is not None else 0.0):
            best = _better(group, iterations, best, MIN_GAIN, refusals)
        refusals = closest if closest else refusals
    if best is None:
        raise min(refusals, key=lambda error: error.bound_s / error.limit_s)
    return best


def best_round_robin(group: Group) -> Certificate:
    """The certified round-robin order with the shortest cycle. Raises: CertificateError."""
    return best_certificate(group, multi_rate=False)


def _better(
    group: Group,
    iterations: Sequence[int],
    best: Certificate | None,
    gain: float,
    refusals: list[CertificateError],
) -> Certificate | None:
    try:
        found = certify(group, order_of(group, iterations))
    except CertificateError as refusal:
        refusals.append(refusal)
        return best
    return found if best is None or found.progress > best.progress * gain else best


def _round_robins(group: Group) -> Iterator[Sequence[int]]:
    """The group's own order, then others; one that differs by where the circle begins is the same."""
    own = range(len(group.members))
    yield own
    if all(len(member.rollout_nodes) == 1 for member in group.members):
        return  # every order reaches the bound (WEAVE Theorem 1)
    if len(own) <= MAX_EXHAUSTIVE:
        yield from ((0, *rest) for rest in itertools.permutations(own[1:]) if (0, *rest) != tuple(own))
        return
    by_width = sorted(own, key=lambda index: (-len(group.members[index].rollout_nodes), index))
    yield by_width
    yield from _swapped(by_width)


def _swapped(order: Sequence[int]) -> Iterator[Sequence[int]]:
    for first, second in itertools.combinations(range(len(order)), 2):
        swapped = list(order)
        swapped[first], swapped[second] = swapped[second], swapped[first]
        yield swapped


def _multi_rates(group: Group, least_progress: float) -> Iterator[Sequence[int]]:
    """Orders in which short jobs run several times while the longest runs once, if they can be worth it."""
    for counts in _repeats(group):
        pass_s = _least_pass_s(group, counts)
        jobs = [member.job for member in group.members]
        progress = sum(count * group.solo_s(job) for count, job in zip(counts, jobs, strict=True)) / pass_s
        is_slow = any(
            pass_s > count * limit_s(job) * (1 + SLO_TOLERANCE)
            for count, job in zip(counts, jobs, strict=True)
        )
        if progress > least_progress and not is_slow:
            yield _evenly(counts)
            yield _as_they_start(group, counts)


def _repeats(group: Group) -> Iterator[tuple[int, ...]]:
    """Iterations of every member in a pass.

    A pass is planned as long as each member's iteration alone, or as its SLO allows it, and holds as many
    iterations of the others as fit, or as their SLOs need.
    """
    alone = [group.solo_s(member.job) for member in group.members]
    limits = [max(limit_s(member.job), time) for member, time in zip(group.members, alone, strict=True)]
    seen: set[tuple[int, ...]] = set()
    for pass_s in sorted({*alone, *limits, group.round_robin_s}):
        fits = [math.floor(pass_s / time + 1e-9) for time in alone]
        needed = [math.ceil(pass_s / limit - 1e-9) for limit in limits]
        for counts in (fits, needed):
            clipped = tuple(min(max(count, 1), MAX_REPEATS) for count in counts)
            if max(clipped) > 1 and sum(clipped) <= MAX_TURNS and clipped not in seen:
                seen.add(clipped)
                yield clipped


def _least_pass_s(group: Group, counts: Sequence[int]) -> float:
    """No pass with so many iterations is shorter: the busiest resource's work, or one job's own."""
    train_s = 0.0
    nodes = [0.0] * group.num_rollout_nodes
    longest_s = 0.0
    for count, member in zip(counts, group.members, strict=True):
        train_s += count * member.job.train_s_on(group.num_train_nodes)
        longest_s = max(longest_s, count * group.solo_s(member.job))
        for node in member.rollout_nodes:
            nodes[node] += count * member.job.rollout_s
    return max(train_s, longest_s, *nodes)


def _evenly(counts: Sequence[int]) -> list[int]:
    """Every member's turns at equal distances in the pass."""
    turns = [((turn + 0.5) / count, index) for index, count in enumerate(counts) for turn in range(count)]
    return [index for _, index in sorted(turns)]


def _as_they_start(group: Group, counts: Sequence[int]) -> list[int]:
    """The turns in the order in which rollouts start if nodes are given to whoever is first to use them."""
    nodes = [0.0] * group.num_rollout_nodes
    train_s = 0.0
    ready = [0.0] * len(counts)
    left = list(counts)
    order = []
    while any(left):
        starts = [
            max(ready[index], *(nodes[node] for node in member.rollout_nodes))
            for index, member in enumerate(group.members)
        ]
        index = min(
            (each for each in range(len(left)) if left[each]),
            key=lambda each: (starts[each], -left[each] / counts[each], each),
        )
        member = group.members[index]
        end = starts[index] + member.job.rollout_s
        for node in member.rollout_nodes:
            nodes[node] = end
        train_s = max(train_s, end + member.job.after_rollout_s)
        train_s += member.job.train_s_on(group.num_train_nodes)
        ready[index] = train_s + member.job.after_train_s
        left[index] -= 1
        order.append(index)
    return order
