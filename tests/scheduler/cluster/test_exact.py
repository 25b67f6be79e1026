from collections.abc import Iterator

import pytest
from cluster_jobs import job, jobs, place
from hypothesis import given, settings

from rose.scheduler.cluster.candidates import candidates, certified, isolated, memory_shortage, own_limit_s
from rose.scheduler.cluster.exact import optimum
from rose.scheduler.cluster.groups import Cluster
from rose.scheduler.cluster.model import Group, Job
from rose.scheduler.cluster.policies import Weave
from rose.scheduler.cluster.pools import Pools

pytest.importorskip("ortools", reason="the optimum needs OR-tools: pip install 'vllm-rose[cluster]'")
POOLS = Pools(max_residents=4)


def partitions(left: list[Job]) -> Iterator[list[list[Job]]]:
    if not left:
        yield []
        return
    first, *others = left
    for rest in partitions(others):
        yield [[first], *rest]
        for k in range(len(rest)):
            yield [*rest[:k], [first, *rest[k]], *rest[k + 1 :]]


def least_cost(members: list[Job]) -> float:
    """Of a group of these jobs, over every way to pin them."""
    first, *others = members
    groups: list[Group] = [isolated(first, "g", POOLS).group]
    for one in others:
        groups = [candidate.group for group in groups for candidate in candidates(group, one, POOLS)]
    costs = [
        POOLS.dollars_per_hour(group)
        for group in groups
        if len(members) <= POOLS.max_residents
        and memory_shortage(group, POOLS) is None
        and certified(group, own_limit_s, multi_rate=False) is not None
    ]
    return min(costs, default=float("inf"))


@settings(max_examples=20, deadline=None)
@given(jobs(max_size=5))
def test_the_optimum_is_that_of_all_partitions_and_no_policy_beats_it(arriving: list[Job]) -> None:
    best = min(sum(map(least_cost, partition)) for partition in partitions(arriving))
    groups = optimum(arriving, POOLS, own_limit_s)
    found = sum(map(POOLS.dollars_per_hour, groups))
    assert found == pytest.approx(best)
    for group in groups:
        assert memory_shortage(group, POOLS) is None
        assert certified(group, own_limit_s, multi_rate=False) is not None
    cluster = Cluster(POOLS)
    for one in arriving:
        place(cluster, Weave(prune_saturated=False), one)
    assert found <= cluster.dollars_per_hour + 1e-6


def test_four_alike_jobs_take_two_pairs_of_nodes() -> None:
    alike = [job(f"j{k}", 100, 100, slo=1.2) for k in range(4)]
    assert sum(map(POOLS.dollars_per_hour, optimum(alike, POOLS, own_limit_s))) == pytest.approx(2 * 57.04)


def test_jobs_on_several_rollout_nodes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="job wide needs 2 rollout nodes"):
        optimum([job("wide", 100, 100, num_rollout_nodes=2)], POOLS, own_limit_s)
