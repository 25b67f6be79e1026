"""Jobs and clusters for the tests of candidate."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from rose.scheduler.cluster.candidates import memory_shortage
from rose.scheduler.cluster.groups import Cluster, Rearrangement
from rose.scheduler.cluster.policies import ClusterPolicy
from rose.scheduler.group.cycle import promised_s
from rose.scheduler.group.model import Job, SloKind

HOUR_S = 3600.0


def job(name: str, rollout_s: float, train_s: float, slo: float = 1.5, **more: object) -> Job:
    fields = {"num_iterations": 1000} | more
    return Job(name=name, rollout_s=rollout_s, train_s=train_s, slo=slo, **fields)  # type: ignore[arg-type]


def jobs(max_size: int = 8, max_nodes: int = 1) -> st.SearchStrategy[list[Job]]:
    one = st.builds(
        lambda rollout_s, train_s, slo, iterations, nodes, gigabytes, kind: Job(
            name="",
            rollout_s=rollout_s,
            train_s=train_s,
            slo=slo,
            num_iterations=iterations,
            num_rollout_nodes=nodes,
            num_train_nodes=nodes,
            rollout_bytes=gigabytes * 10**9,
            train_bytes=gigabytes * 10**9,
            slo_kind=kind,
        ),
        st.floats(25, 600),
        st.floats(25, 600),
        st.floats(1.01, 2.5),
        st.integers(10, 2000),
        st.integers(1, max_nodes),
        st.integers(0, 900),
        st.sampled_from(SloKind),
    )
    return st.lists(one, min_size=1, max_size=max_size).map(named)


def named(found: Sequence[Job]) -> list[Job]:
    return [replace(one, name=f"j{number}") for number, one in zip(itertools.count(), found, strict=False)]


def place(cluster: Cluster, policy: ClusterPolicy, one: Job, now_s: float = 0.0) -> None:
    cluster.submit(one, now_s)
    cluster.apply(Rearrangement(groups=(policy.place(cluster, one, now_s).group,)), now_s)


def assert_kept(cluster: Cluster, now_s: float) -> None:
    """Every promise within its limit, every host's memory, the residency, the pools' sizes."""
    cluster.check_integrity()
    assert cluster.has_nodes_for(Rearrangement(groups=()))
    for group in cluster.groups.values():
        assert memory_shortage(group, cluster.pools) is None
        assert len(group.members) <= cluster.pools.max_residents
        for member, promise_s in zip(group.members, promised_s(group), strict=True):
            limit_s = cluster.residents[member.job.name].at(now_s).limit_s
            assert promise_s <= limit_s * (1 + 1e-6), (member.job, promise_s, limit_s)
