"""Groups for the group level's tests and benchmarks."""

import random
from collections.abc import Sequence

from rose.scheduler.cluster.model import Group, Job, Member


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
