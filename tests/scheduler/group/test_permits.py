"""Permits: granted in the certified order, as leases, void once they are not the job's."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.group.scenario import group_of, random_group, random_order

from rose.scheduler.group.certificate import certify
from rose.scheduler.group.model import Phase
from rose.scheduler.group.order import TRAIN_POOL, order_of, round_robin
from rose.scheduler.group.pace import Pace
from rose.scheduler.group.permits import Permit, PermitBook, StalePermit

LEASE_S = 2.0
ROLLOUT, TRAIN = Phase.ROLLOUT, Phase.TRAIN
SHARED = group_of([(10.0, 5.0, (0,)), (10.0, 5.0, (0,))])


def book_of_two() -> PermitBook:
    return PermitBook(round_robin(SHARED), lease_s=LEASE_S)


def grant(book: PermitBook, job: str, kind: Phase, now: float) -> Permit:
    book.request(job, kind, now)
    (permit,) = book.advance(now)
    assert (permit.job, permit.kind) == (job, kind)
    return permit


def test_the_order_holds_whatever_order_requests_come_in() -> None:
    book = book_of_two()
    book.request("a", ROLLOUT, 0.0)
    book.request("b", ROLLOUT, 0.0)
    (first,) = book.advance(0.0)
    assert first.job == "a"
    book.release("a", first.epoch, 1.0)
    (second,) = book.advance(1.0)
    assert second.job == "b" and second.epoch > first.epoch
    book.release("b", second.epoch, 1.5)
    book.request("b", TRAIN, 1.5)
    assert book.advance(1.5) == ()  # a trains first
    assert grant(book, "a", TRAIN, 1.6).resources == (TRAIN_POOL,)


def test_a_dead_holder_is_replaced_after_one_lease_and_comes_back_too_late() -> None:
    book = book_of_two()
    dead = grant(book, "a", ROLLOUT, 0.0)
    book.request("b", ROLLOUT, 0.5)
    assert book.advance(LEASE_S - 0.01) == ()
    assert book.next_wake_s(1.0) == LEASE_S
    (granted,) = book.advance(LEASE_S)
    assert granted.job == "b" and granted.epoch > dead.epoch
    for call in (book.heartbeat, book.release):
        with pytest.raises(StalePermit, match=f"job a: epoch {dead.epoch} is void"):
            call("a", dead.epoch, 3.0)
    assert not book.is_present("a")


def test_heartbeats_keep_a_permit_and_repeated_requests_a_place() -> None:
    book = book_of_two()
    held = grant(book, "a", ROLLOUT, 0.0)
    for now in range(1, 10):
        assert book.heartbeat("a", held.epoch, now).expires_s == now + LEASE_S
        book.request("b", ROLLOUT, now)
        assert book.advance(now) == ()
    assert book.permit_of("a") is not None and book.is_present("b")


def test_a_returning_job_starts_over_with_a_rollout_at_its_next_turn() -> None:
    book = book_of_two()
    first = grant(book, "a", ROLLOUT, 0.0)
    book.release("a", first.epoch, 1.0)
    book.leave("a", 1.0)
    b = grant(book, "b", ROLLOUT, 1.0)
    book.release("b", b.epoch, 2.0)
    training = grant(book, "b", TRAIN, 2.0)  # a's turn to train stays empty
    book.request("a", ROLLOUT, 2.0)
    (again,) = book.advance(2.0)
    assert again.job == "a" and again.kind is ROLLOUT and again.epoch > training.epoch


def test_a_departed_jobs_turns_stay_empty_for_ever() -> None:
    book = book_of_two()
    book.request("b", ROLLOUT, 0.0)
    book.leave("a", 0.0)
    now = 0.0
    for _ in range(20):
        permit = book.permit_of("b") or book.advance(now)[0]
        book.release("b", permit.epoch, now)
        book.request("b", TRAIN if permit.kind is ROLLOUT else ROLLOUT, now)
        now += 1.0
        assert [each.job for each in book.advance(now)] == ["b"]


def test_a_job_that_asks_for_nothing_loses_its_turn() -> None:
    book = PermitBook(round_robin(SHARED), lease_s=LEASE_S, between_s=5.0)
    first = grant(book, "a", ROLLOUT, 0.0)
    book.release("a", first.epoch, 1.0)
    book.request("b", ROLLOUT, 1.0)
    (second,) = book.advance(1.0)
    book.release("b", second.epoch, 2.0)
    book.request("b", TRAIN, 4.5)
    assert book.advance(5.9) == ()
    assert [each.job for each in book.advance(6.0)] == ["b"]


def test_a_tail_moved_aside_lets_the_next_rollout_in_as_its_host() -> None:
    book = book_of_two()
    first = grant(book, "a", ROLLOUT, 0.0)
    book.request("b", ROLLOUT, 0.0)
    with pytest.raises(ValueError, match=r"can't free \[7\]"):
        book.begin_tail("a", first.epoch, [7], 0.5)
    book.begin_tail("a", first.epoch, first.resources, 1.0)
    (host,) = book.advance(1.0)
    assert host.job == "b" and host.guests == ("a",)
    book.check_integrity()
    book.release("a", first.epoch, 1.5)
    assert grant(book, "a", TRAIN, 1.5).kind is TRAIN
    book.check_integrity()


def test_a_job_on_two_nodes_waits_for_both() -> None:
    group = group_of([(10.0, 5.0, (0,)), (10.0, 5.0, (0, 1)), (10.0, 5.0, (1,))])
    book = PermitBook(order_of(group, (0, 1, 2)), lease_s=LEASE_S)
    for job in "cba":
        book.request(job, ROLLOUT, 0.0)
    (first,) = book.advance(0.0)
    assert first.job == "a"  # c's node is idle, but it is b's turn there
    book.release("a", first.epoch, 1.0)
    assert [each.job for each in book.advance(1.0)] == ["b"]


def test_pace_holds_a_job_that_is_ahead_of_its_slo() -> None:
    group = group_of([(50.0, 50.0, (0,)), (50.0, 50.0, (1,))], slo=1.0)
    certificate = certify(group, round_robin(group))
    book = PermitBook(certificate.order, lease_s=1e6, pace=Pace(certificate, 0.0))
    for kind in (ROLLOUT, TRAIN):
        book.release("a", grant(book, "a", kind, 0.0).epoch, 0.0)
    book.request("b", ROLLOUT, 0.0)
    assert book.advance(0.0)[0].job == "b"
    book.request("a", ROLLOUT, 0.0)
    assert book.advance(0.0) == ()
    wake_s = book.next_wake_s(0.0)
    assert wake_s is not None and 0 < wake_s <= 100
    assert [each.job for each in book.advance(wake_s)] == ["a"]


def test_bad_messages_are_refused_with_what_is_true() -> None:
    book = book_of_two()
    with pytest.raises(ValueError, match=r"job z is not in this group's order \(a, b\)"):
        book.request("z", ROLLOUT, 0.0)
    held = grant(book, "a", ROLLOUT, 0.0)
    with pytest.raises(ValueError, match=f"job a holds a rollout permit \\(epoch {held.epoch}\\)"):
        book.request("a", TRAIN, 0.0)
    with pytest.raises(StalePermit, match="the permit held is none"):
        book.release("b", 7, 0.0)
    with pytest.raises(ValueError, match="lease_s must be positive"):
        PermitBook(round_robin(SHARED), lease_s=0)


def test_epochs_go_on_after_a_restart() -> None:
    before = book_of_two()
    old = grant(before, "a", ROLLOUT, 0.0)
    after = book_of_two()
    after.restore(before.state(), {"a": (old.epoch, old.granted_s)}, 5.0)
    assert after.permit_of("a") == replace(old, expires_s=5.0 + LEASE_S)
    after.release("a", old.epoch, 5.0)
    assert grant(after, "b", ROLLOUT, 5.0).epoch > old.epoch


def test_a_tail_is_still_its_hosts_guest_after_a_restart() -> None:
    before = book_of_two()
    tail = grant(before, "a", ROLLOUT, 0.0)
    before.begin_tail("a", tail.epoch, tail.resources, 1.0)
    host = grant(before, "b", ROLLOUT, 1.0)
    after = book_of_two()
    after.restore(before.state(), {each.job: (each.epoch, each.granted_s) for each in (tail, host)}, 1.0)
    after.check_integrity()
    assert after.permit_of("b") == host and after.freed_by("a") == tail.resources
    after.release("a", tail.epoch, 2.0)
    assert grant(after, "a", TRAIN, 2.0).resources == (TRAIN_POOL,)


@given(st.integers(0, 10**9))
@settings(max_examples=60, deadline=None)
def test_any_sequence_of_messages_keeps_the_promises(seed: int) -> None:
    rng = random.Random(seed)
    group = random_group(rng)
    order = random_order(group, rng)
    book = PermitBook(order, lease_s=LEASE_S)
    names = list(order.steps_of_job)
    numbers: dict[int, list[int]] = {}
    epochs = [0]
    for now in itertools.accumulate(rng.random() for _ in range(120)):
        name = rng.choice(names)
        permit = book.permit_of(name)
        if rng.random() < 0.05:
            book.leave(name, now)
        elif permit is None:
            book.request(name, rng.choice((ROLLOUT, TRAIN)), now)
        elif permit.kind is ROLLOUT and rng.random() < 0.2:
            book.begin_tail(name, permit.epoch, [rng.choice(permit.resources)], now)
        else:
            rng.choice((book.heartbeat, book.release))(name, permit.epoch, now)
        for granted in book.advance(now):
            epochs.append(granted.epoch)
            for key in granted.resources:
                numbers.setdefault(key, []).append(granted.step_number)
        book.check_integrity()
    assert epochs == sorted(set(epochs))
    assert all(each == sorted(set(each)) for each in numbers.values())
