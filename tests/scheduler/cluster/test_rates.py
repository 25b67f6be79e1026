import itertools
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rose.scheduler.cluster.model import Group, Job, Member
from rose.scheduler.cluster.rates import Slot, slots_of, timetable


def group_of(jobs: list[tuple[float, float, int]]) -> Group:
    return Group(
        name="g",
        num_train_nodes=1,
        num_rollout_nodes=max(node for _, _, node in jobs) + 1,
        members=tuple(
            Member(job=Job(name=f"j{k}", rollout_s=rollout_s, train_s=train_s), rollout_nodes=(node,))
            for k, (rollout_s, train_s, node) in enumerate(jobs)
        ),
    )


def replay(group: Group, slots: tuple[Slot, ...]) -> None:
    """Every phase of many periods, one by one: nothing meets on a node."""
    busy: dict[object, list[tuple[float, float]]] = {}
    horizon_s = 60 * max(slot.period_s for slot in slots)
    for member, slot in zip(group.members, slots, strict=True):
        job = member.job
        train_s = job.train_s_on(group.num_train_nodes)
        assert slot.rollout_at_s + job.rollout_s + job.after_rollout_s <= slot.train_at_s + 1e-6
        assert slot.train_at_s + train_s + job.after_train_s <= slot.rollout_at_s + slot.period_s + 1e-6
        for repetition in range(int(horizon_s / slot.period_s)):
            at_s = repetition * slot.period_s
            busy.setdefault("train", []).append((slot.train_at_s + at_s, train_s))
            for node in member.rollout_nodes:
                busy.setdefault(node, []).append((slot.rollout_at_s + at_s, job.rollout_s))
    for phases in busy.values():
        phases.sort()
        for (start_s, length_s), (next_s, _) in itertools.pairwise(phases):
            assert start_s + length_s <= next_s + 1e-5


def test_a_short_job_beside_a_long_one_keeps_its_own_rate() -> None:
    pair = group_of([(400, 100, 0), (100, 25, 1)])
    slots = timetable(pair, [500 * 1.1, 125 * 1.1])
    assert slots is not None
    replay(pair, slots)
    assert slots[1].period_s <= 137.5 < 500 <= slots[0].period_s


def test_training_that_leaves_no_gap_has_no_timetable() -> None:
    assert timetable(group_of([(400, 100, 0), (50, 45, 1)]), [600, 140]) is None


def test_two_long_jobs_may_train_longer_in_a_row_than_a_short_ones_period() -> None:
    three = group_of([(20, 116, 0), (41, 10, 0), (115, 11, 1)])
    slots = timetable(three, [252, 126, 252])
    assert slots is not None
    replay(three, slots)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            *(st.floats(20, 600), st.floats(10, 300), st.integers(0, 2), st.floats(1.01, 3)),
            *(st.sampled_from((0.0, 5.0, 80.0)), st.sampled_from((0.0, 5.0, 80.0))),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_whatever_is_promised_can_be_replayed(
    jobs: list[tuple[float, float, int, float, float, float]],
) -> None:
    found = group_of([job[:3] for job in jobs])
    members = [
        replace(each, job=replace(each.job, after_rollout_s=before_s, after_train_s=after_s))
        for each, (*_, before_s, after_s) in zip(found.members, jobs, strict=True)
    ]
    found = replace(found, members=tuple(members))
    limits_s = [each.job.solo_s * job[3] for each, job in zip(members, jobs, strict=True)]
    replay(found, slots_of(found))
    slots = timetable(found, limits_s)
    if slots is not None:
        replay(found, slots)
        again = slots_of(replace(found, periods_s=tuple(slot.period_s for slot in slots)))
        assert all(one.period_s <= slot.period_s * (1 + 1e-6) for one, slot in zip(again, slots, strict=True))
        assert all(slot.period_s <= limit * (1 + 1e-6) for slot, limit in zip(slots, limits_s, strict=True))
