"""Several serving engines and several guests on one board, within one process."""

import time
from dataclasses import replace

import pytest
from board_setup import FAR_S, IDLE, await_grant, begin, in_thread, work

from rose._shm import Words
from rose.admission import board, liveness
from rose.admission.board import BoardWord
from rose.admission.board_snapshot import ServingTime, snapshot
from rose.admission.gate import GateReason
from rose.admission.rollout_side import MAX_PAUSE_S, Resumed, RolloutSide
from rose.admission.serving_side import ServingSide, StepStart
from rose.admission.slack import NEVER


@pytest.fixture
def as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each side that attaches passes for a process of its own, which lives."""
    identities = iter(range(1, 100))
    monkeypatch.setattr(board, "own_identity", lambda: next(identities))
    for module in ("board", "board_snapshot", "rollout_side", "serving_side"):
        monkeypatch.setattr(f"rose.admission.{module}.is_alive", lambda identity: identity != 0)


pytestmark = pytest.mark.usefixtures("as_others")


def wanting(words: Words) -> RolloutSide:
    side = RolloutSide(words)
    side.set_want(True)
    return side


def test_guests_exclude_each_other(words: Words) -> None:
    first, second = wanting(words), wanting(words)
    assert (first.slot, second.slot) == (0, 1)
    assert begin(first)
    assert not second.may_try() and not begin(second)
    first.end_step(1)
    assert begin(second)
    second.end_step(1)
    assert [side.num_steps for side in snapshot(words).guests] == [1, 1]


def test_a_decision_made_before_another_guest_stepped_is_refused(words: Words) -> None:
    first, second = wanting(words), wanting(words)
    old = second.view()
    assert begin(first)
    first.end_step(1)
    assert not second.try_begin(time.monotonic() + FAR_S, old)


def test_every_serving_engine_has_to_leave_the_gpu_to_guests(words: Words) -> None:
    one, two, guest = ServingSide(words), ServingSide(words), wanting(words)
    one.begin_step()
    two.begin_step()  # serving engines don't exclude each other
    one.end_step(IDLE)
    assert not begin(guest)
    two.end_step(IDLE)
    assert begin(guest)


def test_each_serving_engine_waits_for_the_one_step_that_has_begun(words: Words) -> None:
    one, two = ServingSide(words), ServingSide(words)
    guests = [wanting(words) for _ in range(3)]
    outcomes: list[StepStart] = []
    assert begin(guests[1])
    waiting = [in_thread(lambda side=side: outcomes.append(side.begin_step())) for side in (one, two)]
    while words.wake(BoardWord.SERVING_BELL) < 2:
        time.sleep(0.001)
    guests[1].end_step(1)
    assert not any(begin(guest) for guest in guests)
    for thread in waiting:
        thread.join()
    assert outcomes == [StepStart.WAITED] * 2


def test_nothing_is_offered_while_another_serving_engine_has_work(words: Words) -> None:
    one, two, guest = ServingSide(words), ServingSide(words), wanting(words)
    one.publish(work())
    two.publish(work())
    assert one.offer_grant(NEVER, FAR_S) == 0.0
    two.publish(IDLE)
    one.offer_grant(NEVER, 1e-6)
    assert guest.view().may_start
    two.publish(work())  # takes the GPU from under the grant
    assert not begin(guest)


def test_a_guest_sees_what_the_strictest_serving_engine_allows(words: Words) -> None:
    one, two, guest = ServingSide(words), ServingSide(words), RolloutSide(words)
    one.set_max_step(0.5)
    two.set_max_step(0.125)
    one.publish(work(20.0))
    two.publish(work(10.0, pending=True))
    seen = guest.view()
    assert (seen.latest_start_s, seen.max_step_s, seen.has_pending_prefill) == (10.0, 0.125, True)
    two.detach()
    seen = guest.view()
    assert (seen.latest_start_s, seen.max_step_s, seen.has_pending_prefill) == (20.0, 0.5, False)
    board.announce_arrival(words, one.slot)
    assert not guest.view().may_start
    one.absorb_arrival(time.monotonic())
    board.set_closed_share(words, 1.0, one.slot)
    assert guest.view().is_closed


def test_a_grant_is_for_one_step_of_one_guest(words: Words) -> None:
    serving, guests = ServingSide(words), [wanting(words) for _ in range(2)]
    serving.publish(work())
    serving.offer_grant(NEVER, 1e-6)
    assert begin(guests[0])
    guests[0].end_step(1)
    assert not any(begin(guest) for guest in guests)


def test_an_offer_ends_when_every_guest_has_declined_it(words: Words) -> None:
    serving, guests = ServingSide(words), [wanting(words) for _ in range(2)]
    serving.publish(work())
    offer = in_thread(serving.offer_grant, NEVER, FAR_S)
    await_grant(guests[0])
    guests[0].decline(guests[0].view(), GateReason.NO_SLACK)
    assert not guests[0].may_try()
    offer.join(0.05)
    assert offer.is_alive()
    guests[1].decline(guests[1].view(), GateReason.NO_SLACK)
    offer.join()


def test_the_next_guest_has_its_turn_at_once_when_one_has_declined(
    words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.admission.rollout_side._GIVE_WAY_NS", board.to_ns(FAR_S))
    serving, first, second = ServingSide(words), wanting(words), wanting(words)
    first.wait_grant(0.0)
    serving.publish(work())
    serving.offer_grant(NEVER, 1e-6)
    assert not second.may_try() and first.may_try()
    rung = words.load(BoardWord.GUEST_BELL)
    first.decline(first.view(), GateReason.NO_SLACK)
    assert words.load(BoardWord.GUEST_BELL) > rung
    first.wait_grant(0.0)
    assert second.may_try()
    serving.publish(work())
    serving.offer_grant(NEVER, 1e-6)
    first.wait_grant(0.0)  # for the next grant it waits again
    assert not second.may_try()


def test_an_offer_goes_past_a_guest_whose_shortest_step_is_too_long(words: Words) -> None:
    serving, guests = ServingSide(words), [wanting(words) for _ in range(2)]
    guests[0].set_want(True, min_step_s=FAR_S)
    serving.publish(work())
    offer = in_thread(serving.offer_grant, time.monotonic() + FAR_S / 2, FAR_S)
    await_grant(guests[1])
    guests[1].decline(guests[1].view(), GateReason.NO_SLACK)
    offer.join()


def test_guests_that_wait_take_turns(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.admission.rollout_side._GIVE_WAY_NS", board.to_ns(FAR_S))
    monkeypatch.setattr("rose.admission.rollout_side._WAITS_FOR_NS", board.to_ns(FAR_S))
    guests = [wanting(words) for _ in range(3)]
    order = []
    for _ in range(9):
        for guest in guests:
            guest.wait_grant(0.0)
        (goes,) = [guest for guest in guests if guest.may_try()]
        assert begin(goes)
        goes.end_step(1)
        order.append(goes.slot)
    assert order == [0, 1, 2] * 3


def test_a_guest_that_does_not_take_its_turn_loses_it_to_the_next(words: Words) -> None:
    serving = ServingSide(words)
    silent, other = wanting(words), wanting(words)
    serving.begin_step()
    assert not silent.wait_grant(0.0)
    serving.end_step(IDLE)
    assert not other.may_try()
    time.sleep(board.GIVE_WAY_S)
    assert other.may_try() and begin(other)
    other.end_step(1)
    time.sleep(board.WAITS_FOR_S)
    assert other.may_try()  # the silent one does not count any more


def test_a_newcomer_goes_behind_the_guests_that_wait(words: Words) -> None:
    waits = wanting(words)
    waits.wait_grant(0.0)
    assert not wanting(words).may_try()
    assert waits.may_try()


def test_a_guest_that_keeps_the_gpu_for_far_too_long_loses_it_and_stops_at_the_next_layer(
    words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.admission.rollout_side.MAX_STEP_WAIT_S", 0.0)
    hung, other = wanting(words), wanting(words)
    assert hung.try_begin(time.monotonic(), hung.view())
    other.serving_alive()  # looks at all others
    assert begin(other)
    assert snapshot(words).num_evictions == 1
    assert hung.is_called()
    hung.pause()
    assert hung.try_resume(0.1, 0.0) is Resumed.NOT
    other.end_step(1)
    assert hung.try_resume(0.1, 0.0) is Resumed.WHILE_IDLE
    hung.end_step(1)


def test_a_step_that_lost_the_gpu_does_not_end_its_successors(
    words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.admission.rollout_side.MAX_STEP_WAIT_S", 0.0)
    hung, other = wanting(words), wanting(words)
    assert hung.try_begin(time.monotonic(), hung.view())
    other.serving_alive()
    assert begin(other)
    hung.end_step(1)
    assert not begin(hung)


def test_a_dead_guest_is_taken_the_gpu_from_at_once(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    dead, other = wanting(words), wanting(words)
    assert begin(dead)
    identity = words.load(BoardWord.R_IDENTITY)
    monkeypatch.setattr("rose.admission.rollout_side.is_alive", lambda who: who not in (identity, 0))
    other.serving_alive()
    assert begin(other)


def test_a_paused_step_does_not_go_on_beside_a_second_serving_engine_because_the_first_died(
    words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, two, guest = ServingSide(words), ServingSide(words), wanting(words)
    assert begin(guest)
    dead.publish(work())
    guest.pause()
    identity = words.load(BoardWord.S_IDENTITY)
    monkeypatch.setattr("rose.admission.rollout_side.is_alive", lambda who: who not in (identity, 0))
    assert not guest.serving_alive()
    two.begin_step()
    assert guest.try_resume(0.1, 0.0) is Resumed.NOT
    two.end_step(IDLE)
    assert guest.try_resume(0.1, 0.0) is Resumed.WITH_GRANT


def test_serving_engines_that_all_have_work_hold_a_paused_step_up_for_a_bounded_time(words: Words) -> None:
    one, two, guest = ServingSide(words), ServingSide(words), wanting(words)
    assert begin(guest)
    one.publish(work())
    guest.pause()
    two.begin_step()
    assert guest.try_resume(0.0, 0.0) is Resumed.NOT
    assert guest.try_resume(0.0, MAX_PAUSE_S) is Resumed.WITH_GRANT
    assert one.begin_step(grace_s=0.0) is StepStart.OVERRUN  # it waits for the rest as for any step
    guest.end_step(1)
    assert not begin(guest)


def test_a_paused_step_goes_on_with_a_living_serving_engines_grant_after_another_died(
    words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    ServingSide(words)  # it dies idle
    two, guest = ServingSide(words), wanting(words)
    assert begin(guest)
    two.publish(work())
    guest.pause()
    identity = words.load(BoardWord.S_IDENTITY)
    monkeypatch.setattr("rose.admission.rollout_side.is_alive", lambda who: who not in (identity, 0))
    assert not guest.serving_alive()
    assert guest.try_resume(0.0, 0.0) is Resumed.NOT
    offer = in_thread(two.offer_grant, NEVER, FAR_S)
    deadline_s = time.monotonic() + FAR_S
    while (resumed := guest.try_resume(FAR_S, 0.0)) is Resumed.NOT:
        assert time.monotonic() < deadline_s
        assert not guest.wait_grant()
    assert resumed is Resumed.WITH_GRANT
    guest.end_step(1)
    offer.join()


def test_a_guest_answers_at_once_where_a_serving_engine_has_died(
    words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    ServingSide(words)  # it dies idle
    two, guest = ServingSide(words), wanting(words)
    identity = words.load(BoardWord.S_IDENTITY)
    monkeypatch.setattr("rose.admission.rollout_side.is_alive", lambda who: who not in (identity, 0))
    assert not guest.serving_alive()
    two.publish(work())
    offer = in_thread(two.offer_grant, NEVER, 5.0)
    deadline_s = time.monotonic() + 2.0
    while offer.is_alive() and time.monotonic() < deadline_s:
        assert not guest.wait_grant()
    assert not offer.is_alive()


def test_a_guest_that_died_paused_costs_one_offer_and_the_others_none(words: Words) -> None:
    serving, dead, other = ServingSide(words), wanting(words), wanting(words)
    assert begin(dead)
    serving.publish(work())
    dead.pause()
    other.wait_grant(0.0)
    assert serving.rollout_paused_s() is not None
    serving.offer_grant(NEVER, 1e-6, to_paused=True)
    assert serving.rollout_paused_s() is None
    serving.publish(work())
    assert serving.may_offer(time.monotonic(), NEVER)  # to the other
    assert not serving.may_offer(time.monotonic(), NEVER, to_paused=True)
    other.wait_grant(0.0)
    dead.wait_grant(0.0)  # it was only slow
    assert serving.rollout_paused_s() is not None


def test_of_serving_engines_that_compute_side_by_side_the_busiest_counts(words: Words) -> None:
    servings = [ServingSide(words) for _ in range(2)]
    words.store(BoardWord.S_BUSY, board.to_ns(100.0))  # long ago
    time_of_serving, before = ServingTime(words), snapshot(words)
    first_s = time_of_serving.read_s()
    for side, busy_s in zip(servings, (2.0, 3.0), strict=True):
        words.add(BoardWord.S_BUSY + board.SLOT_WORDS * side.slot, board.to_ns(busy_s))
    assert time_of_serving.read_s() - first_s == pytest.approx(3.0)
    now = replace(snapshot(words), taken_s=before.taken_s + 4.0)
    assert now.busy_shares_since(before)[0] == pytest.approx(0.75)


def test_a_successor_takes_the_slot_of_the_dead(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        ServingSide(words)
    gone = words.load(BoardWord.S_IDENTITY + board.SLOT_WORDS)
    monkeypatch.setattr(board, "is_alive", lambda who: who not in (gone, liveness.NOBODY))
    assert ServingSide(words).slot == 1
