from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose.scheduler.group.certificate import Certificate, certify
from rose.scheduler.group.cycle import promised_s, round_robin_s
from rose.scheduler.group.model import Group, Job, Member
from rose.scheduler.group.order import own_order
from rose.scheduler.group.search import MAX_ITERATIONS, ordered


def group_of(jobs: list[tuple[float, float, tuple[int, ...]]]) -> Group:
    return Group(
        name="g",
        num_train_nodes=1,
        num_rollout_nodes=1 + max(node for _, _, nodes in jobs for node in nodes),
        members=tuple(
            Member(job=Job(name=f"j{k}", rollout_s=rollout_s, train_s=train_s), rollout_nodes=nodes)
            for k, (rollout_s, train_s, nodes) in enumerate(jobs)
        ),
    )


def limits_of(group: Group, limits_s: list[float]) -> dict[str, float]:
    return {member.job.name: limit for member, limit in zip(group.members, limits_s, strict=True)}


def kept(group: Group, limits_s: list[float]) -> Certificate | None:
    """The certificate of the order that was found, which always has one; None: no order was found."""
    limits = limits_of(group, limits_s)
    found = ordered(group, limits, multi_rate=True)
    if found is None:
        return None
    certificate = certify(found, own_order(found), limits)
    certificate.check()
    for member, promise_s in zip(found.members, promised_s(found), strict=True):
        assert certificate.bounds[member.job.name].mean_s <= promise_s * (1 + 1e-6)
        assert promise_s <= limits[member.job.name] * (1 + 1e-6)
    return certificate


def test_a_short_job_beside_a_long_one_keeps_its_own_rate() -> None:
    pair = group_of([(400, 100, (0,)), (100, 25, (1,))])
    found = kept(pair, [500 * 1.1, 125 * 1.1])
    assert found is not None
    assert found.bounds["j1"].longest_s <= 137.5 < 500 <= found.bounds["j0"].longest_s


def test_training_that_leaves_no_gap_has_no_order() -> None:
    assert kept(group_of([(400, 100, (0,)), (50, 45, (1,))]), [600, 140]) is None


def test_two_long_jobs_may_train_longer_in_a_row_than_a_short_ones_period() -> None:
    assert kept(group_of([(20, 116, (0,)), (41, 10, (1,)), (115, 11, (2,))]), [252, 126, 252]) is not None


def test_round_robin_comes_before_turns_and_a_newcomer_takes_the_best_place() -> None:
    jobs: list[tuple[float, float, tuple[int, ...]]] = [(35, 41, (0,)), (35, 5, (1,)), (39, 23, (0, 1))]
    group = group_of(jobs)
    found = ordered(group, limits_of(group, [78.0] * 3), multi_rate=True)
    assert found is not None and not found.iterations
    assert [member.job.name for member in found.members if member.job.name != "j2"] == ["j0", "j1"]
    assert round_robin_s(found) == pytest.approx(77.5)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            *(st.floats(20, 600), st.floats(10, 300), st.sets(st.integers(0, 2), min_size=1, max_size=2)),
            *(st.floats(1.0, 3), st.sampled_from((0.0, 5.0, 80.0)), st.sampled_from((0.0, 5.0, 80.0))),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_whatever_is_found_is_certified(
    jobs: list[tuple[float, float, set[int], float, float, float]],
) -> None:
    found = group_of([(rollout_s, train_s, tuple(sorted(nodes))) for rollout_s, train_s, nodes, *_ in jobs])
    members = [
        replace(each, job=replace(each.job, after_rollout_s=before_s, after_train_s=after_s))
        for each, (*_, before_s, after_s) in zip(found.members, jobs, strict=True)
    ]
    limits_s = [each.job.solo_s * job[3] for each, job in zip(members, jobs, strict=True)]
    certificate = kept(replace(found, members=tuple(members)), limits_s)
    assert certificate is None or len(certificate.order.iterations) <= MAX_ITERATIONS
