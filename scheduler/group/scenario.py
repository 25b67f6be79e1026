"""Random groups, orders and SLOs: what the certificate is tried on, in tests and benchmarks.

Owns: how they are drawn. Promises: the same seed draws the same. Never: is used to schedule anything.
"""

import random
from collections.abc import Sequence
from dataclasses import replace

from rose.scheduler.cluster.model import Group, Job, Member
from rose.scheduler.group.certificate import Certificate, certify
from rose.scheduler.group.order import CyclicOrder, order_of


def group_of(
    jobs: Sequence[tuple[float, float, tuple[int, ...]]], *, slo: float = 100.0, num_train_nodes: int = 1
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
    """Whole seconds up to 60, jobs on any of the nodes."""
    num_nodes = rng.randint(1, max_nodes)
    jobs = [
        (
            float(rng.randint(1, 60)),
            float(rng.randint(1, 60)),
            tuple(sorted(rng.sample(range(num_nodes), rng.randint(1, num_nodes)))),
        )
        for _ in range(rng.randint(1, max_jobs))
    ]
    return group_of(jobs)


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
        slo = bounds[member.job.name].longest_s / member.job.solo_s * rng.choice((1.0, 1.0, 1.3))
        members.append(replace(member, job=replace(member.job, slo=slo)))
    return certify(replace(group, members=tuple(members)), order)
