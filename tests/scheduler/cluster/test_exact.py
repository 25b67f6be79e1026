from collections.abc import Iterator

import pytest
from cluster_jobs import job, jobs, place
from hypothesis import given, settings

from rose.scheduler.cluster.candidates import candidates, isolated, memory_shortage, own_limit_s
from rose.scheduler.cluster.exact import optimum
from rose.scheduler.cluster.groups import Cluster
from rose.scheduler.cluster.policies import Weave
from rose.scheduler.cluster.pools import Pools
from rose.scheduler.group.model import Group, Job
from rose.scheduler.group.search import ordered
from rose.scheduler.sim.workloads import Workload, generate_trace, submissions

pytest.importorskip("ortools", reason="the optimum needs OR-tools: the extra `cluster`")
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


def limits_s(group: Group) -> dict[str, float]:
    return {member.job.name: own_limit_s(member.job) for member in group.members}


def least_cost(members: list[Job]) -> float:
    """Returns the least cost of a group of these jobs, over every way to pin them."""
    first, *others = members
    groups: list[Group] = [isolated(first, "g", POOLS).group]
    for one in others:
        groups = [candidate.group for group in groups for candidate in candidates(group, one, POOLS)]
    costs = [
        POOLS.dollars_per_hour(group)
        for group in groups
        if len(members) <= POOLS.max_residents
        and memory_shortage(group, POOLS) is None
        and ordered(group, limits_s(group), multi_rate=False) is not None
    ]
    return min(costs, default=float("inf"))


@settings(max_examples=20, deadline=None)
@given(jobs(max_size=5))
def test_the_optimum_is_that_of_all_partitions_and_no_policy_beats_it(arriving: list[Job]) -> None:
    best = min(sum(map(least_cost, partition)) for partition in partitions(arriving))
    best_found = optimum(arriving, POOLS, own_limit_s)
    assert best_found.gap == 0
    groups = best_found.groups
    found = sum(map(POOLS.dollars_per_hour, groups))
    assert found == pytest.approx(best)
    for group in groups:
        assert memory_shortage(group, POOLS) is None
        assert ordered(group, limits_s(group), multi_rate=False) is not None
    cluster = Cluster(POOLS)
    for one in arriving:
        place(cluster, Weave(prune_saturated=False), one)
    assert found <= cluster.dollars_per_hour + 1e-6


def test_four_alike_jobs_take_two_pairs_of_nodes() -> None:
    alike = [job(f"j{k}", 100, 100, slo=1.2) for k in range(4)]
    groups = optimum(alike, POOLS, own_limit_s).groups
    assert sum(map(POOLS.dollars_per_hour, groups)) == pytest.approx(2 * 57.04)


def test_jobs_on_several_rollout_nodes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="job wide needs 2 rollout nodes"):
        optimum([job("wide", 100, 100, num_rollout_nodes=2)], POOLS, own_limit_s)


def test_a_bounded_search_of_many_jobs_says_how_far_from_the_optimum_it_may_be() -> None:
    many = [x.job for x in submissions(generate_trace(0, 40), Workload.MIXED, 0)]
    whole = optimum(many, POOLS, own_limit_s)
    bounded = optimum(many, POOLS, own_limit_s, limit_s=0.001)
    costs = [sum(map(POOLS.dollars_per_hour, found.groups)) for found in (whole, bounded)]
    assert whole.gap == 0 < bounded.gap < 1
    assert costs[1] * (1 - bounded.gap) <= costs[0] <= costs[1]
    assert sorted(m.job.name for group in bounded.groups for m in group.members) == sorted(
        one.name for one in many
    )
