"""A running group keeps its certificate: through phases that end early, crashes, joins and new schedulers."""

import functools
import heapq
import itertools
import random
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.group.scenario import group_of, random_group, random_order, tightened

from rose.scheduler.group.certificate import Certificate, CertificateError, certify
from rose.scheduler.group.model import Group, Phase, SloKind
from rose.scheduler.group.order import own_order, round_robin
from rose.scheduler.runtime.decide.group_permits import GroupPermits, OrderRow, PermitsRow

LEASE_S = 1e6
"""Nobody is silent here."""
TOLERANCE_S = 1e-4


def restarted(permits: GroupPermits, clock: str, now: float) -> GroupPermits:
    """Returns what a new scheduler makes of what the old one kept as JSON."""
    order, row = map(msgspec.json.encode, permits.rows())
    fresh = GroupPermits(LEASE_S, clock)
    fresh.restore(msgspec.json.decode(order, type=OrderRow), msgspec.json.decode(row, type=PermitsRow), now)
    return fresh


class Run:
    """Jobs on one group's permits, with phases as short as they are drawn, and no waiting."""

    def __init__(self, group: Group, certificate: Certificate, rng: random.Random) -> None:
        self.rng = rng
        self.now = 100.0
        self.permits = GroupPermits(LEASE_S, "clock")
        self.starts_s: dict[str, list[float]] = {}
        self._events: list[tuple[float, int, str, str, int]] = []
        self._asks: dict[str, Phase] = {}
        self._number = itertools.count()
        self._attempts: dict[str, int] = {}
        self._crashed_s: dict[str, float] = {}
        self.lengths_s: dict[str, list[tuple[float, float]]] = {}
        """The begin and the length of every iteration that was not cut short."""
        self.form(group, certificate)

    def form(self, group: Group, certificate: Certificate) -> None:
        self.permits.form(group, certificate, self.now)
        self.jobs = {member.job.name: member.job for member in group.members}
        self.group = group
        for name in self.jobs.keys() - self._attempts.keys():
            self._attempts[name] = 0
            self.lengths_s[name] = []
            self._add(0.0, "rollout", name)

    def restart(self) -> None:
        self.permits = restarted(self.permits, "clock", self.now)
        for name, phase in self._asks.items():
            self.permits.ask(name, phase, 0)

    def crash(self, name: str, away_s: float) -> None:
        """It comes back for a rollout; that iteration's length is its own fault."""
        self._attempts[name] += 1
        self._asks.pop(name, None)
        self.starts_s.pop(name, None)
        self.permits.drop(name, self.now)
        self._add(away_s, "rollout", name)

    def until(self, end_s: float) -> None:
        """Events up to a time; the permits are asked whenever they said that something is due."""
        while True:
            self._grant()
            wake_s = self.permits.next_wake_s(self.now)
            times = [self._events[0][0]] if self._events else []
            if wake_s is not None and wake_s < self.now + LEASE_S / 2:
                times.append(wake_s)
            at_s = min(times, default=end_s)
            if at_s >= end_s:
                self.now = end_s
                return
            self.now = max(self.now, at_s)
            while self._events and self._events[0][0] <= self.now:
                _, _, what, name, attempt = heapq.heappop(self._events)
                if attempt == self._attempts[name]:
                    self._happen(what, name)

    def _happen(self, what: str, name: str) -> None:
        if what == "done":
            hold = self.permits.holds[name]
            assert self.permits.release(name, hold.epoch, self.now)
            following = Phase.ROLLOUT if hold.phase is Phase.TRAIN else Phase.TRAIN
            self._add(self.jobs[name].after_s(hold.phase) * self._share(), following, name)
            return
        self._asks[name] = Phase(what)
        self.permits.ask(name, self._asks[name], 0)

    def _grant(self) -> None:
        granted = self.permits.grant(self.now)
        self.permits.check_integrity()
        for hold in granted:
            del self._asks[hold.job]
            job = self.jobs[hold.job]
            worst_s = job.rollout_s
            if hold.phase is Phase.ROLLOUT:
                starts = self.starts_s.setdefault(hold.job, [])
                if starts:
                    self.lengths_s[hold.job].append((starts[-1], self.now - starts[-1]))
                starts.append(self.now)
            else:
                worst_s = job.train_s_on(self.group.num_train_nodes)
            self._add(worst_s * self._share(), "done", hold.job)

    def _share(self) -> float:
        return self.rng.choice((0.0, self.rng.random(), 1.0, 1.0))

    def _add(self, later_s: float, what: str, name: str) -> None:
        event = (self.now + later_s, next(self._number), what, name, self._attempts[name])
        heapq.heappush(self._events, event)

    def check(self, certificate: Certificate, since_s: float = 0.0) -> None:
        for name, bound in certificate.bounds.items():
            if bound.slo_kind is SloKind.LIFETIME:
                continue
            allowed_s = bound.longest_s + bound.lead_s + TOLERANCE_S
            too_long = [each for each in self.lengths_s[name] if each[0] >= since_s and each[1] > allowed_s]
            assert not too_long, f"{name}: {allowed_s:g} s certified, {too_long}"


def tight(seed: int, *, is_multi_rate: bool = False) -> tuple[Group, Certificate, random.Random]:
    """A group whose SLOs are as tight as its order can promise, or almost."""
    rng = random.Random(seed)
    group = random_group(rng)
    order = random_order(group, rng) if is_multi_rate else round_robin(group)
    group = replace(group, iterations=order.iterations if is_multi_rate else ())
    bounds = tightened(group, order, rng).bounds
    members = []
    for member in group.members:
        bound = bounds[member.job.name]
        job = replace(member.job, slo=bound.limit_s / member.job.solo_s, slo_kind=bound.slo_kind)
        members.append(replace(member, job=job))
    group = replace(group, members=tuple(members))
    return group, certify(group, own_order(group)), rng


def of_first(group: Group, num: int) -> Group:
    """The group with so many of its members, who follow each other as in the whole group."""
    return functools.reduce(Group.without, [member.job.name for member in group.members[num:]], group)


@given(st.integers(0, 10**9), st.booleans())
@settings(max_examples=100, deadline=None)
@pytest.mark.slow
def test_no_iteration_that_begins_after_a_job_was_let_in_is_longer_than_certified(
    seed: int, is_multi_rate: bool
) -> None:
    whole, certificate, rng = tight(seed, is_multi_rate=is_multi_rate)
    group = of_first(whole, 1)
    certificate = certify(group, own_order(group))
    run = Run(group, certificate, rng)
    formed_s = run.now
    for num in range(2, len(whole.members) + 1):
        run.until(run.now + rng.random() * 3 * certificate.cycle_s)
        run.check(certificate, formed_s)
        joins = of_first(whole, num)
        try:
            joined = certify(joins, run.permits.order_for(joins))
        except CertificateError:
            continue  # as submitting it would be refused
        group, certificate, formed_s = joins, joined, run.now
        run.form(group, certificate)
    run.until(run.now + 9 * certificate.cycle_s)
    run.check(certificate, formed_s)
    assert all(run.lengths_s[member.job.name] for member in group.members), "each has run"


@given(st.integers(0, 10**9))
@settings(max_examples=100, deadline=None)
@pytest.mark.slow
def test_no_iteration_is_longer_than_certified(seed: int) -> None:
    group, certificate, rng = tight(seed)
    run = Run(group, certificate, rng)
    for _ in range(40):
        run.until(run.now + rng.random() * certificate.cycle_s)
        choice = rng.random()
        if choice < 0.1:
            run.crash(rng.choice(group.members).job.name, rng.random() * certificate.cycle_s)
        elif choice < 0.4:
            run.restart()
    run.check(certificate)
    assert any(run.lengths_s.values())


def test_a_job_that_was_outside_of_phases_for_less_than_its_longest_time_does_not_wait_for_that() -> None:
    group = group_of([(50.0, 50.0, (0,))], slo=1.0)
    member = replace(
        group.members[0], job=replace(group.members[0].job, after_rollout_s=60, after_train_s=90)
    )
    group = replace(group, members=(member,))
    permits = GroupPermits(LEASE_S, "clock")
    permits.form(group, certify(group, round_robin(group)), 0.0)
    job = member.job.name
    for now in (0.0, 10.0):
        run_through(permits, job, Phase.ROLLOUT, now)
        run_through(permits, job, Phase.TRAIN, now + 5.0)


def two_on_two_nodes() -> tuple[Group, Certificate]:
    group = group_of([(50.0, 50.0, (0,)), (50.0, 50.0, (1,))], slo=1.0)
    return group, certify(group, round_robin(group))


def begin(permits: GroupPermits, job: str, phase: Phase, now: float) -> bool:
    """Whether the phase may begin, once asked for."""
    permits.ask(job, phase, 0)
    return job in [hold.job for hold in permits.grant(now)]


def run_through(permits: GroupPermits, job: str, phase: Phase, now: float) -> None:
    assert begin(permits, job, phase, now)
    assert permits.release(job, permits.holds[job].epoch, now)


@pytest.mark.parametrize(("clock", "now"), [(None, 0.0), ("clock", 0.0), ("another", 5e6), ("another", -5e6)])
def test_a_job_whose_phases_took_no_time_waits_for_its_turn_in_the_timetable(
    clock: str | None, now: float
) -> None:
    permits = GroupPermits(LEASE_S, "clock")
    group, certificate = two_on_two_nodes()
    permits.form(group, certificate, 0.0)
    permits.ask("b", Phase.ROLLOUT, 0)
    for phase in Phase:
        run_through(permits, "a", phase, 0.0)
    assert not begin(permits, "a", Phase.ROLLOUT, 0.0), "else its next one would take 150 s, for b's 50 + 50"
    if clock is not None:
        permits = restarted(permits, clock, now)
        assert not begin(permits, "a", Phase.ROLLOUT, now)
    wake_s = permits.next_wake_s(now)
    assert wake_s is not None and now < wake_s <= now + 100.0
    assert [hold.job for hold in permits.grant(wake_s)] == ["a"]


def test_a_new_scheduler_on_the_same_clock_knows_how_long_phases_have_been_running() -> None:
    waits = []
    for is_restarted in (False, True):
        permits = GroupPermits(LEASE_S, "clock")
        permits.form(*two_on_two_nodes(), 0.0)
        permits.ask("b", Phase.ROLLOUT, 0)
        for phase in Phase:
            run_through(permits, "a", phase, 0.0)
        assert permits.holds["b"].phase is Phase.ROLLOUT
        if is_restarted:
            permits = restarted(permits, "clock", 20.0)
        assert not begin(permits, "a", Phase.ROLLOUT, 20.0)
        waits.append(permits.next_wake_s(20.0))
    assert waits[0] == waits[1]


def test_a_job_that_joins_lets_those_pass_that_would_be_late() -> None:
    """Alone, b is in its training when a comes back: a's rollout would end after b's next one is due."""
    group = group_of([(50.0, 50.0, (0,)), (50.0, 50.0, (0,))], slo=1.0)
    permits = GroupPermits(LEASE_S, "clock")
    permits.form(group, certify(group, round_robin(group)), 0.0)
    assert begin(permits, "b", Phase.ROLLOUT, 0.0)
    assert permits.release("b", permits.holds["b"].epoch, 50.0)
    assert begin(permits, "b", Phase.TRAIN, 50.0)
    assert not begin(permits, "a", Phase.ROLLOUT, 75.0)
    assert permits.release("b", permits.holds["b"].epoch, 100.0)
    assert begin(permits, "b", Phase.ROLLOUT, 100.0)
    assert permits.release("b", permits.holds["b"].epoch, 150.0)
    assert [hold.job for hold in permits.grant(150.0)] == ["a"]


def test_the_order_of_those_that_run_stays_when_another_joins() -> None:
    jobs = [(10.0, 1.0, (0,))] * 4
    three = group_of(jobs[:3])
    permits = GroupPermits(LEASE_S, "clock")
    permits.form(three, certify(three, round_robin(three)), 0.0)
    for job in "abc":
        permits.ask(job, Phase.ROLLOUT, 0)
    permits.grant(0.0)
    assert permits.release("a", permits.holds["a"].epoch, 10.0)
    run_through(permits, "a", Phase.TRAIN, 10.0)
    four = group_of(jobs)
    order = permits.order_for(four)
    assert list(order.steps_of_job) == ["b", "c", "a", "d"]
    permits.form(four, certify(four, order), 12.0)
    assert permits.holds["b"].phase is Phase.ROLLOUT, "what is out stays so"
    permits.ask("a", Phase.ROLLOUT, 1)
    permits.ask("d", Phase.ROLLOUT, 0)
    granted = []
    for now in (20.0, 30.0, 40.0):
        holder = next(each for each in permits.holds.values() if each.phase is Phase.ROLLOUT)
        assert permits.release(holder.job, holder.epoch, now)
        granted += [hold.job for hold in permits.grant(now)]
    assert granted == ["c", "a", "d"]
