"""Random groups, orders and SLOs: what the certificate is tried on, in tests and benchmarks.

Owns: how they are drawn. Promises: the same seed draws the same. Never: is used to schedule anything.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from rose.scheduler.group.certificate import Certificate, certify
from rose.scheduler.group.model import Group, Job, Member, Phase, SloKind
from rose.scheduler.group.order import CyclicOrder, order_of
from rose.scheduler.group.search import ordered


def group_of(
    jobs: Sequence[tuple[float, float, tuple[int, ...]]], *, slo: float = 1000.0, num_train_nodes: int = 1
) -> Group:
    """From (rollout_s, train_s, rollout nodes), named a, b, c..."""
    members = tuple(
        Member(
            job=Job(name=chr(ord("a") + index), rollout_s=rollout_s, train_s=train_s, slo=slo),
            rollout_nodes=nodes,
        )
        for index, (rollout_s, train_s, nodes) in enumerate(jobs)
    )
    num_rollout_nodes = 1 + max(max(nodes) for _, _, nodes in jobs)
    return Group(
        name="g", num_train_nodes=num_train_nodes, num_rollout_nodes=num_rollout_nodes, members=members
    )


def random_group(rng: random.Random, max_jobs: int = 5, max_nodes: int = 3) -> Group:
    """Phases of whole seconds up to 60, half of them with time outside afterwards, on any of the nodes."""
    num_nodes = rng.randint(1, max_nodes)
    jobs = [
        (
            float(rng.randint(1, 60)),
            float(rng.randint(1, 60)),
            tuple(sorted(rng.sample(range(num_nodes), rng.randint(1, num_nodes)))),
        )
        for _ in range(rng.randint(1, max_jobs))
    ]
    group = group_of(jobs)

    def with_gaps(job: Job) -> Job:
        gaps_s = [rng.choice((0.0, rng.uniform(0, 20))) for _ in Phase]
        return replace(job, after_rollout_s=gaps_s[0], after_train_s=gaps_s[1])

    return replace(group, members=tuple(replace(each, job=with_gaps(each.job)) for each in group.members))


def joined(group: Group) -> Group:
    """The group in the round-robin order that it gets if its members join one after the other."""
    found = replace(group, members=())
    for member in group.members:
        found = replace(found, members=(*found.members, member))
        limits_s = {each.job.name: math.inf for each in found.members}
        better = ordered(found, limits_s, multi_rate=False)
        assert better is not None, "no limits, and yet refused"
        found = better
    return found


def random_order(group: Group, rng: random.Random) -> CyclicOrder:
    """Any order of the members' iterations; one of them may have several."""
    iterations = list(range(len(group.members)))
    if rng.random() < 0.5:
        iterations += [rng.randrange(len(group.members))] * rng.randint(1, 3)
    rng.shuffle(iterations)
    return order_of(group, iterations)


def tightened(group: Group, order: CyclicOrder, rng: random.Random) -> Certificate:
    """The order certified again, with SLOs just or almost as tight as it can promise."""
    bounds = certify(group, order).bounds
    members = []
    for member in group.members:
        promised_s = bounds[member.job.name].longest_s
        is_mean = rng.random() < 0.2
        job = replace(
            member.job,
            slo=promised_s / member.job.solo_s * rng.choice((1.0, 1.0, 1.3)),
            slo_kind=SloKind.LIFETIME if is_mean else SloKind.ITERATION,
        )
        members.append(replace(member, job=job))
    return certify(replace(group, members=tuple(members)), order)
