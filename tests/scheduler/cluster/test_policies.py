import random

import pytest
from cluster_jobs import HOUR_S, assert_kept, job, jobs, place
from hypothesis import given, settings

from rose.errors import PoolsFull
from rose.scheduler.cluster.borrowed import lend
from rose.scheduler.cluster.candidates import CandidateKind, Constraint, Rejection, is_saturated
from rose.scheduler.cluster.groups import Cluster
from rose.scheduler.cluster.lifetime import Lifetime
from rose.scheduler.cluster.policies import (
    ClusterPolicy,
    Greedy,
    Random,
    Solo,
    Weave,
    explain,
    first_fitting,
)
from rose.scheduler.cluster.pools import H20, H800, Pool, Pools
from rose.scheduler.group.model import Job

CERTIFIED = (Weave, lambda: Weave(prune_saturated=False), Lifetime, lambda: Lifetime(multi_rate=True), Solo)


def test_a_node_of_each_pool_costs_what_the_paper_says() -> None:
    assert H20.dollars_per_node_hour == pytest.approx(14.80)
    assert H800.dollars_per_node_hour == pytest.approx(42.24)


def test_two_alike_jobs_are_packed_for_nothing() -> None:
    cluster = Cluster(Pools())
    place(cluster, Weave(), job("a", 100, 100))
    found = Weave().place(cluster, job("b", 100, 100), 0.0)
    assert (found.kind, found.dollars_per_hour) == (CandidateKind.DIRECT, 0.0)


def test_rollout_heavy_jobs_share_training_and_get_rollout_nodes_of_their_own() -> None:
    """Source: WEAVE Figure 10b: two jobs of type D and one E on one training node."""
    cluster = Cluster(Pools())
    for name, rollout_s, train_s in (("d1", 250, 100), ("d2", 250, 100), ("e", 300, 50)):
        place(cluster, Weave(), job(name, rollout_s, train_s, slo=1.3))
    (group,) = cluster.groups.values()
    assert (group.num_rollout_nodes, group.num_train_nodes) == (3, 1)


def test_a_saturated_group_is_pruned_only_by_the_printed_algorithm() -> None:
    cluster = Cluster(Pools())
    for name in ("a", "b"):
        place(cluster, Weave(), job(name, 100, 100, slo=2.0))
    assert is_saturated(cluster.group_of("a"))
    third = job("c", 50, 50, slo=3.0)
    assert Weave().place(cluster, third, 0.0).kind is CandidateKind.ISOLATED
    assert Weave(prune_saturated=False).place(cluster, third, 0.0).kind is CandidateKind.DIRECT
    (verdict,) = explain(cluster, third, prune_saturated=True, multi_rate=False)
    assert isinstance(verdict, Rejection)
    assert verdict.constraint is Constraint.SATURATED


def test_memory_that_fits_exactly_fits_and_a_byte_more_is_refused_with_the_numbers() -> None:
    pools = Pools(rollout=Pool(name="h20", dollars_per_gpu_hour=1.85, host_bytes=600 * 10**9))
    for held, kind in ((300 * 10**9, CandidateKind.DIRECT), (300 * 10**9 + 1, CandidateKind.SCALED)):
        cluster = Cluster(pools)
        place(cluster, Weave(), job("a", 100, 100, rollout_bytes=300 * 10**9))
        newcomer = job("b", 100, 100, rollout_bytes=held)
        assert Weave().place(cluster, newcomer, 0.0).kind is kind
    verdict = explain(cluster, newcomer, prune_saturated=True, multi_rate=False)[0]
    assert isinstance(verdict, Rejection)
    assert verdict.constraint is Constraint.MEMORY
    assert "600.0 of 600.0 GB" in verdict.text


def test_lifetime_joins_the_group_that_stays_longest() -> None:
    cluster = Cluster(Pools())
    place(cluster, Solo(), job("short", 100, 100, num_iterations=10))
    place(cluster, Solo(), job("long", 100, 100, num_iterations=900))
    newcomer = job("new", 90, 90, num_iterations=800)
    assert Weave().place(cluster, newcomer, 0.0).group.name == cluster.group_of("short").name
    assert Lifetime().place(cluster, newcomer, 0.0).group.name == cluster.group_of("long").name


def test_lifetime_merges_two_jobs_that_were_left_alone_and_charges_the_pause() -> None:
    cluster = Cluster(Pools())
    for name in ("a", "b"):
        place(cluster, Solo(), job(name, 100, 100, slo=1.9))
    change = Lifetime().rearrange(cluster, HOUR_S, 2)
    assert change is not None and len(change.moved) == 1
    cluster.apply(change, HOUR_S)
    assert len(cluster.groups) == 1
    moved = cluster.residents[change.moved[0]]
    assert moved.since_s == HOUR_S + cluster.pause_s
    assert moved.bank_s == pytest.approx(0.9 * HOUR_S - cluster.pause_s)
    assert Lifetime().rearrange(cluster, HOUR_S, 2) is None


def test_a_pause_that_a_job_cannot_afford_is_not_taken() -> None:
    cluster = Cluster(Pools())
    for name in ("a", "b"):
        place(cluster, Solo(), job(name, 100, 100, slo=1.001, num_iterations=100))
    assert Lifetime().rearrange(cluster, 0.0, 2) is None


def test_a_full_pool_refuses_with_the_numbers_and_loses_nothing() -> None:
    cluster = Cluster(Pools(train=Pool(name="h800", dollars_per_gpu_hour=5.28, num_nodes=1)))
    place(cluster, Weave(), job("a", 500, 600, slo=1.05))
    with pytest.raises(PoolsFull, match="1 nodes of pool h800, 0 of 1 free"):
        Weave().place(cluster, job("b", 500, 600, slo=1.05), 0.0)
    assert_kept(cluster, 0.0)


@settings(max_examples=25, deadline=None)
@given(jobs(max_size=10, max_nodes=3))
@pytest.mark.slow
def test_no_certified_policy_breaks_a_limit_or_a_hosts_memory(arriving: list[Job]) -> None:
    for make in CERTIFIED:
        policy: ClusterPolicy = make()
        cluster, now_s = Cluster(Pools()), 0.0
        for number, one in enumerate(arriving):
            now_s += 200.0
            place(cluster, policy, one, now_s)
            assert_kept(cluster, now_s)
            if number % 3 == 2:
                cluster.remove(arriving[number - 1].name, now_s)
            change = policy.rearrange(cluster, now_s, 2)
            if change is not None:
                cluster.apply(change, now_s)
            assert_kept(cluster, now_s)


@settings(max_examples=30, deadline=None)
@given(jobs(max_size=10, max_nodes=2))
def test_the_index_finds_what_a_scan_of_all_groups_finds(arriving: list[Job]) -> None:
    *running, newcomer = arriving
    cluster = Cluster(Pools())
    for one in running:
        place(cluster, Weave(prune_saturated=False), one)
    for multi_rate in (False, True):
        fit = cluster.index.fit(
            newcomer, cluster.limit_s(newcomer), prune_saturated=False, multi_rate=multi_rate
        )
        indexed = {cluster.index.name(row) for row in fit.rows}
        scanned = {
            group.name
            for group in cluster.groups.values()
            if first_fitting(cluster, group, newcomer, multi_rate=multi_rate) is not None
        }
        assert scanned <= indexed
        if not multi_rate and all(one.num_rollout_nodes == 1 for one in arriving):
            assert scanned == indexed
    # The least cost of a scan, too.
    cost = min(
        (
            found.dollars_per_hour
            for group in cluster.groups.values()
            if (found := first_fitting(cluster, group, newcomer)) is not None
        ),
        default=None,
    )
    placed = Weave(prune_saturated=False).place(cluster, newcomer, 0.0)
    assert (
        placed.kind is CandidateKind.ISOLATED
        if cost is None
        else placed.dollars_per_hour == pytest.approx(cost)
    )


def test_serving_gpus_go_to_the_most_rollout_bound_jobs_and_to_one_job_each() -> None:
    cluster = Cluster(Pools(num_serving_gpus=12))
    for name, rollout_s in (("light", 50), ("heavy", 500), ("middling", 100)):
        place(cluster, Solo(), job(name, rollout_s, 100))
    assert lend(cluster.groups.values(), cluster.pools) == {"heavy": 8, "middling": 4}
    assert lend(cluster.groups.values(), Pools()) == {}


@pytest.mark.parametrize(
    ("price", "lent"),
    [
        (0.0, {"few": 8, "many": 4}),
        (1.84, {"few": 8, "many": 4}),
        (6.9, {"few": 8, "many": 4}),
        (7.2, {}),
    ],
)
def test_serving_gpus_are_lent_at_a_price_below_what_they_save_of_the_jobs_own_nodes(
    price: float, lent: dict[str, int]
) -> None:
    cluster = Cluster(Pools(num_serving_gpus=12, serving_dollars_per_gpu_hour=price))
    place(cluster, Solo(), job("few", 500, 100))
    place(cluster, Solo(), job("many", 100, 100))
    # A node of each pool costs 8 * (1.85 + 5.28) dollars an hour: 7.13 for each rollout GPU of the job.
    assert lend(cluster.groups.values(), cluster.pools) == lent


def test_the_baselines_look_at_memory_alone() -> None:
    for policy in (Random(random.Random(0)), Greedy()):
        cluster = Cluster(Pools())
        for number in range(7):
            place(cluster, policy, job(f"j{number}", 100, 400, slo=1.1))
        assert sorted(len(group.members) for group in cluster.groups.values()) == [2, 5]
