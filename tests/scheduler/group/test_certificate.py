"""Certificates: the notes' worked numbers, exact timetables, refusals, and replays that keep them."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.group.scenario import group_of, random_group, random_order, tightened

from rose.scheduler.group.certificate import Certificate, CertificateError, certify
from rose.scheduler.group.maxplus import NoTimetable, Precedence, shortest_cycle
from rose.scheduler.group.model import Job, Member, Phase, SloKind
from rose.scheduler.group.order import CyclicOrder, Step, order_of, own_order, round_robin
from rose.scheduler.group.permits import Permit
from rose.scheduler.group.replay import PhaseTimes, replay
from rose.scheduler.group.search import ordered

SPANNING = [(35.0, 41.0, (0,)), (39.0, 23.0, (0, 1)), (35.0, 5.0, (1,))]
"""The jobs that refute round-robin's bound for jobs on several nodes."""
MULTI_RATE = [(400.0, 100.0, (0,)), (100.0, 25.0, (1,))]


def test_a_job_on_several_nodes_breaks_the_round_robin_bound() -> None:
    group = group_of(SPANNING)
    assert group.round_robin_s == 76
    cycles = {certify(group, order_of(group, each)).cycle_s for each in itertools.permutations(range(3))}
    assert cycles == {77.5}  # 78 with starts in whole seconds
    found = ordered(group, dict.fromkeys("abc", 77.5), multi_rate=False)
    assert found is not None and certify(found, own_order(found)).cycle_s == 77.5


def test_the_spanning_group_is_refused_at_the_bound_and_certified_at_its_optimum() -> None:
    group = group_of(SPANNING)
    longest = group.members[0]
    for cycle_s, is_refused in ((76.0, True), (77.4, True), (77.5, False)):
        member = replace(longest, job=replace(longest.job, slo=cycle_s / longest.job.solo_s))
        tight = replace(group, members=(member, *group.members[1:]))
        if is_refused:
            with pytest.raises(CertificateError) as refusal:
                certify(tight, round_robin(tight))
            assert refusal.value.job == "a" and refusal.value.bound_s == 77.5
            assert "77.5 s" in str(refusal.value) and f"{cycle_s:g} s" in str(refusal.value)
        else:
            certify(tight, round_robin(tight)).check()


def test_a_short_job_on_its_own_node_runs_four_times_in_a_pass() -> None:
    group = group_of(MULTI_RATE)
    round_robin_bounds = certify(group, round_robin(group)).bounds
    assert [round_robin_bounds[name].longest_s for name in "ab"] == [500, 500]
    found = ordered(group, {"a": 500.0, "b": 125.0}, multi_rate=True)
    assert found is not None and found.iterations.count("b") == 4
    best = certify(found, own_order(found))
    assert [best.bounds[name].longest_s for name in "ab"] == [500, 125]
    best.check()


def test_an_slo_that_no_round_robin_order_keeps_is_refused_with_the_numbers() -> None:
    group = group_of(MULTI_RATE, slo=1.0)
    with pytest.raises(
        CertificateError, match=r"job b could be promised an iteration of 500 s, its SLO is 125 s"
    ):
        certify(group, round_robin(group))


@pytest.mark.parametrize("left_s", [0.0, -50.0])
def test_a_refusal_names_the_job_that_has_nothing_left_of_its_slo(left_s: float) -> None:
    group = group_of(MULTI_RATE, slo=1.0)
    with pytest.raises(CertificateError, match=rf"job a .* left of its SLO of 500 s is {left_s:g} s"):
        certify(group, round_robin(group), {"a": left_s})


@pytest.mark.parametrize("kind", SloKind)
def test_no_iteration_is_promised_beyond_the_limit_whatever_the_slo_is_of(kind: SloKind) -> None:
    """A job may end within a pass: then the mean over whole passes says nothing of its last iterations."""

    def in_order(nodes: tuple[int, ...], iterations: tuple[int, ...], slo: float) -> Certificate:
        group = group_of([(400.0, 100.0, (0,)), (100.0, 25.0, nodes)])
        long, short = group.members
        short = replace(short, job=replace(short.job, slo=slo, slo_kind=kind))
        return certify(replace(group, members=(long, short)), order_of(group, iterations))

    bound = in_order((1,), (0, 1, 1, 1, 1), 1.0).bounds["b"]
    assert bound.mean_s == bound.longest_s == bound.limit_s == 125
    with pytest.raises(CertificateError, match=r"job b .* its SLO is 312\.5 s"):
        in_order((0,), (0, 1, 1), 2.5)


def test_fewer_training_nodes_and_the_sync_count() -> None:
    job = Job(name="a", rollout_s=10, train_s=20, num_train_nodes=2, after_train_s=5, slo=2)
    group = replace(group_of([(1, 1, (0,))]), members=(Member(job=job, rollout_nodes=(0,)),))
    assert certify(group, round_robin(group)).bounds["a"].longest_s == 10 + 40 + 5


@given(st.integers(0, 10**9))
@settings(max_examples=60, deadline=None)
def test_single_node_jobs_reach_the_bound_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    jobs = [
        (float(rng.randint(1, 60)), float(rng.randint(1, 60)), (rng.randrange(3),))
        for _ in range(rng.randint(1, 5))
    ]
    group = group_of(jobs)
    order = rng.sample(range(len(jobs)), len(jobs))
    assert certify(group, order_of(group, order)).cycle_s == group.round_robin_s


@given(st.integers(0, 10**9))
@settings(max_examples=80, deadline=None)
def test_no_replay_is_worse_than_its_certificate(seed: int) -> None:
    rng = random.Random(seed)
    group = random_group(rng)
    certificate = tightened(group, random_order(group, rng), rng)
    certificate.check()

    def times_of(permit: Permit, iteration: int) -> PhaseTimes:
        worst_s = certificate.durations_s[permit.step_number % len(certificate.order.steps)]
        return PhaseTimes(done_s=worst_s * rng.choice((0.0, rng.random(), 1.0, 1.0)))

    leaver = rng.choice(group.members).job.name
    leaves_s = {leaver: rng.random() * 3 * certificate.cycle_s} if rng.random() < 0.3 else {}
    history = replay(certificate, times_of, 3, leaves_s=leaves_s)
    assert history.violations(certificate) == []
    for name, bound in certificate.bounds.items():
        assert name in leaves_s or len(history.ends_s[name]) == 3 * bound.num_iterations


def test_without_pace_a_fast_iteration_makes_the_next_one_too_long() -> None:
    group = group_of([(50.0, 50.0, (0,)), (50.0, 50.0, (1,))], slo=1.0)
    certificate = certify(group, round_robin(group))

    def times_of(permit: Permit, iteration: int) -> PhaseTimes:
        return PhaseTimes(done_s=0.0 if (permit.job, iteration) == ("a", 0) else 50.0)

    unpaced = replay(certificate, times_of, 3, with_pace=False)
    assert unpaced.starts_s["a"] == [0.0, 0.0, 150.0]
    assert "job a: an iteration of 150 s" in unpaced.violations(certificate)[0]
    assert not replay(certificate, times_of, 3).violations(certificate)


def test_an_order_may_begin_with_a_training_phase() -> None:
    group = group_of([(50.0, 50.0, (0,)), (30.0, 20.0, (0,))])
    steps = round_robin(group).steps
    certificate = certify(group, CyclicOrder(steps=(*steps[1:], steps[0])))
    assert certificate.cycle_s == group.round_robin_s
    history = replay(certificate, lambda permit, iteration: PhaseTimes(done_s=20.0), 3)
    assert history.violations(certificate) == []
    assert [len(history.ends_s[name]) for name in "ab"] == [3, 3]


def test_a_phase_beyond_its_worst_case_shows_as_delay() -> None:
    group = group_of([(50.0, 50.0, (0,)), (50.0, 50.0, (0,))], slo=1.0)
    certificate = certify(group, round_robin(group))
    history = replay(certificate, lambda permit, iteration: PhaseTimes(done_s=60.0), 2)
    assert history.longest_delay_s >= 10
    assert history.violations(certificate)


def test_contradicting_constraints_have_no_timetable() -> None:
    apart = [
        Precedence(before=0, after=1, ticks=10, passes=0),
        Precedence(before=1, after=0, ticks=-9, passes=0),
    ]
    with pytest.raises(NoTimetable):
        shortest_cycle(2, apart)


def test_orders_without_alternation_or_without_a_member_are_refused() -> None:
    group = group_of(SPANNING)
    with pytest.raises(ValueError, match="no iteration of b"):
        order_of(group, (0, 2))
    rollout = Step(job="a", kind=Phase.ROLLOUT, resources=(0,))
    with pytest.raises(ValueError, match="must alternate"):
        CyclicOrder(steps=(rollout, rollout))
    with pytest.raises(ValueError, match="the order a"):
        certify(group, round_robin(group_of(SPANNING[:1])))
