"""How two engines share their GPU through the board, within one process."""

import time
from collections.abc import Callable

import pytest
from board_setup import FAR_S, IDLE, await_grant, begin, in_thread, serving_and_wanting, work

from rose._shm import Words
from rose.admission import board, liveness
from rose.admission.board import BoardWord
from rose.admission.board_snapshot import snapshot
from rose.admission.claim import guest_of
from rose.admission.gate import GateReason
from rose.admission.rollout_side import MAX_PAUSE_S, Resumed, RolloutSide
from rose.admission.serving_side import ServingSide, StepStart
from rose.admission.slack import NEVER
from rose.errors import BoardError


def test_rollout_steps_freely_while_nobody_serves(words: Words) -> None:
    rollout = RolloutSide(words)
    for _ in range(3):
        assert begin(rollout)
        rollout.end_step(5)
    seen = snapshot(words)
    assert (seen.rollout.num_steps, seen.rollout_tokens) == (3, 15)


def test_rollout_steps_freely_while_serving_is_idle(words: Words) -> None:
    ServingSide(words)
    rollout = RolloutSide(words)
    assert begin(rollout)
    rollout.end_step(1)
    assert begin(rollout)


def test_rollout_gives_way_while_serving_holds_the_gpu(words: Words) -> None:
    serving, rollout = ServingSide(words), RolloutSide(words)
    assert serving.begin_step() is StepStart.CLEAR
    assert not rollout.view().may_start
    assert not begin(rollout)
    assert guest_of(words.load(BoardWord.CLAIM)) == -1
    serving.end_step(IDLE)
    assert begin(rollout)


def test_rollout_needs_a_grant_while_serving_has_work(words: Words) -> None:
    serving, rollout = ServingSide(words), RolloutSide(words)
    serving.publish(work())
    assert not begin(rollout)


def test_a_grant_admits_one_step(words: Words) -> None:
    serving, rollout = serving_and_wanting(words)
    serving.offer_grant(NEVER, 1e-6)
    assert begin(rollout)
    rollout.end_step(1)
    assert not begin(rollout)


def test_a_paused_step_frees_the_gpu_and_goes_on_when_serving_is_idle_again(words: Words) -> None:
    serving, rollout = ServingSide(words), RolloutSide(words)
    rollout.set_want(True)
    assert begin(rollout) and not rollout.is_called()
    board.announce_arrival(words)
    assert rollout.is_called()
    rollout.pause()
    assert serving.begin_step() is StepStart.CLEAR  # it waits for nobody
    assert rollout.try_resume(0.1, 0.0) is Resumed.NOT
    serving.absorb_arrival(time.monotonic())
    serving.end_step(IDLE)
    assert serving.rollout_paused_s() is not None
    assert rollout.try_resume(0.1, 0.0) is Resumed.WHILE_IDLE
    assert serving.rollout_paused_s() is None
    rollout.end_step(3)
    assert snapshot(words).rollout.num_steps == 1


def test_a_grant_lets_a_paused_step_end_while_serving_has_work(words: Words) -> None:
    serving, rollout = serving_and_wanting(words)
    serving.publish(IDLE)
    assert begin(rollout)
    serving.publish(work())
    rollout.pause()
    assert rollout.try_resume(0.1, 0.0) is Resumed.NOT
    serving.offer_grant(NEVER, 1e-6)
    assert rollout.try_resume(0.1, 0.0) is Resumed.WITH_GRANT
    rollout.end_step(1)
    assert not begin(rollout)


def test_a_paused_step_stays_out_of_closed_slices_but_not_for_ever(words: Words) -> None:
    ServingSide(words)
    rollout = RolloutSide(words)
    assert begin(rollout)
    rollout.pause()
    board.set_closed_share(words, 1.0)
    assert rollout.try_resume(0.1, 0.0) is Resumed.NOT
    assert rollout.try_resume(0.1, MAX_PAUSE_S) is Resumed.WHILE_IDLE


def test_a_serving_engine_that_went_silent_does_not_hold_a_paused_step(words: Words) -> None:
    serving, rollout = ServingSide(words), RolloutSide(words)
    assert begin(rollout)
    serving.publish(work())
    rollout.pause()
    assert rollout.try_resume(0.1, MAX_PAUSE_S) is Resumed.NOT
    words.store(BoardWord.S_HEARTBEAT, time.monotonic_ns() - int(1e9 * MAX_PAUSE_S))
    assert rollout.try_resume(0.1, 0.0) is Resumed.NOT
    assert rollout.try_resume(0.1, MAX_PAUSE_S) is Resumed.WITH_GRANT


def test_begin_step_takes_an_unused_grant_back(words: Words) -> None:
    serving, rollout = serving_and_wanting(words)
    serving.offer_grant(NEVER, 1e-6)
    assert rollout.view().may_start
    serving.begin_step()
    assert not begin(rollout)


def test_no_grant_is_offered_to_a_rollout_that_cannot_use_it(words: Words) -> None:
    serving, rollout = ServingSide(words), RolloutSide(words)
    serving.publish(work())
    assert serving.offer_grant(NEVER, FAR_S) == 0.0
    rollout.set_want(True, min_step_s=5.0)
    assert serving.offer_grant(time.monotonic() + 1.0, FAR_S) == 0.0
    assert snapshot(words).num_yields == 0


def test_a_rollout_that_leaves_a_grant_unanswered_is_offered_none_until_it_lives_again(words: Words) -> None:
    serving, rollout = serving_and_wanting(words)
    for _ in range(3):
        serving.offer_grant(NEVER, 1e-6)
        assert snapshot(words).num_yields == 1
    serving.begin_step()
    assert not rollout.wait_grant(0.001)  # too late, but it lives
    serving.end_step(work())
    serving.offer_grant(NEVER, 1e-6)
    assert snapshot(words).num_yields == 2
    RolloutSide(words).set_want(True)  # a new engine in its place
    serving.offer_grant(NEVER, 1e-6)
    assert snapshot(words).num_yields == 3


def test_a_decision_on_an_old_publication_is_refused(words: Words) -> None:
    serving, rollout = ServingSide(words), RolloutSide(words)
    old = rollout.view()
    serving.begin_step()
    serving.end_step(IDLE)
    assert not rollout.try_begin(time.monotonic() + FAR_S, old)
    assert begin(rollout)


def test_steps_in_flight_share_one_claim(words: Words) -> None:
    serving = ServingSide(words)
    serving.begin_step()
    serving.begin_step()
    serving.end_step(IDLE, num_steps=2)
    assert snapshot(words).serving.num_steps == 2
    assert not serving.is_stepping


def test_view_carries_what_serving_published(words: Words) -> None:
    serving, rollout = ServingSide(words), RolloutSide(words)
    serving.publish(work(123.5, pending=True))
    seen = rollout.view()
    assert (seen.has_work, seen.has_pending_prefill, seen.latest_start_s) == (True, True, 123.5)
    serving.publish(IDLE)
    assert rollout.view().latest_start_s == NEVER


def test_rollout_learns_the_longest_step_that_idle_serving_allows(words: Words) -> None:
    rollout = RolloutSide(words)
    assert rollout.view().max_step_s == NEVER
    ServingSide(words).set_max_step(0.125)
    assert rollout.view().max_step_s == 0.125


def test_serving_keeps_its_claim_when_it_publishes(words: Words) -> None:
    serving, rollout = ServingSide(words), RolloutSide(words)
    serving.begin_step()
    serving.publish(IDLE)
    assert not begin(rollout)


def test_serving_waits_for_the_running_step_and_goes_before_the_next(words: Words) -> None:
    serving, rollout = ServingSide(words), RolloutSide(words)
    outcomes: list[StepStart] = []
    assert begin(rollout)
    waiting = in_thread(lambda: outcomes.append(serving.begin_step()))
    while words.wake(BoardWord.SERVING_BELL) == 0:  # until it sleeps; it goes on sleeping
        time.sleep(0.001)
    assert outcomes == []
    rollout.end_step(1)
    assert not begin(rollout)
    waiting.join()
    assert outcomes == [StepStart.WAITED]


def test_a_decline_ends_the_handover(words: Words) -> None:
    serving, rollout = serving_and_wanting(words)
    waiting = in_thread(serving.offer_grant, NEVER, FAR_S)
    await_grant(rollout)
    rollout.decline(rollout.view(), GateReason.NO_SLACK)
    waiting.join()
    assert snapshot(words).declines[GateReason.NO_SLACK] == 1


def test_a_step_taken_on_a_grant_ends_the_handover(words: Words) -> None:
    serving, rollout = serving_and_wanting(words)
    waiting = in_thread(serving.offer_grant, NEVER, FAR_S)
    await_grant(rollout)
    assert begin(rollout)
    rollout.end_step(1)
    waiting.join()
    assert snapshot(words).num_yields == 1


def test_grants_go_on_while_rollout_uses_them(words: Words) -> None:
    serving, rollout = serving_and_wanting(words)
    waiting = in_thread(serving.offer_grants, NEVER, FAR_S)
    for _ in range(3):
        await_grant(rollout)
        assert begin(rollout)
        rollout.end_step(1)
    await_grant(rollout)
    rollout.decline(rollout.view(), GateReason.NO_SLACK)
    waiting.join()
    assert snapshot(words).num_yields == 4


@pytest.fixture
def patient_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Announcements hold for as long as a test takes."""
    monkeypatch.setattr(board, "ARRIVAL_HOLD_NS", board.to_ns(FAR_S))


@pytest.mark.usefixtures("patient_hold")
def test_an_announced_arrival_ends_the_handover_and_holds_rollout_back(words: Words) -> None:
    serving, rollout = serving_and_wanting(words)
    waiting = in_thread(serving.offer_grant, NEVER, FAR_S)
    while words.load(BoardWord.S_YIELDS) == 0:
        time.sleep(0.001)
    # Repeated: the first may come before the hand-over has counted the arrivals so far.
    while waiting.is_alive():
        board.announce_arrival(words)
        time.sleep(0.001)
    board.announce_arrival(words)
    assert rollout.view().has_pending_prefill
    assert not rollout.view().may_start
    serving.absorb_arrival(time.monotonic())
    assert not rollout.view().has_pending_prefill


@pytest.mark.usefixtures("patient_hold")
def test_the_first_request_of_a_burst_does_not_absorb_the_arrival_of_the_rest(words: Words) -> None:
    serving, rollout = serving_and_wanting(words)
    board.announce_arrival(words)
    first_s = time.monotonic()
    board.announce_arrival(words)
    serving.absorb_arrival(first_s)
    assert rollout.view().has_pending_prefill
    assert serving.offer_grants(NEVER, FAR_S) == 0.0
    serving.absorb_arrival(time.monotonic())
    serving.absorb_arrival(first_s)  # out of order
    assert not rollout.view().has_pending_prefill


def test_an_engine_with_other_work_offers_no_more_grants(words: Words) -> None:
    serving, _ = serving_and_wanting(words)
    assert serving.offer_grants(NEVER, FAR_S, is_called=lambda: True) == 0.0
    assert snapshot(words).num_yields == 0


def test_an_unused_grant_ends_the_offers(words: Words) -> None:
    serving, rollout = serving_and_wanting(words)
    waiting = in_thread(serving.offer_grants, NEVER, FAR_S)
    await_grant(rollout)
    assert begin(rollout)
    rollout.end_step(0)
    waiting.join()
    assert snapshot(words).num_yields == 1


def test_an_announced_arrival_that_never_comes_is_forgotten(words: Words) -> None:
    ServingSide(words)
    rollout = RolloutSide(words)
    board.announce_arrival(words)
    words.store(BoardWord.S_ARRIVED, time.monotonic_ns() - board.ARRIVAL_HOLD_NS - 1)
    assert rollout.wait_grant()
    assert begin(rollout)


def test_an_overrunning_step_does_not_hold_serving(words: Words) -> None:
    serving, rollout = ServingSide(words), RolloutSide(words)
    assert rollout.try_begin(time.monotonic() - 1.0, rollout.view())
    assert serving.begin_step(grace_s=0) is StepStart.OVERRUN
    assert snapshot(words).num_overruns == 1


def test_waiting_for_a_grant_ends_without_one(words: Words) -> None:
    serving, rollout = ServingSide(words), RolloutSide(words)
    serving.begin_step()
    assert not rollout.wait_grant(0.001)


def test_detached_serving_leaves_the_gpu_free(words: Words) -> None:
    serving, rollout = ServingSide(words), RolloutSide(words)
    serving.begin_step()
    serving.detach()
    assert rollout.view().alive
    assert begin(rollout)


@pytest.mark.parametrize("look", [ServingSide, RolloutSide, snapshot])
def test_a_page_of_another_layout_is_refused(words: Words, look: Callable[[Words], object]) -> None:
    words.store(BoardWord.MAGIC, board.MAGIC + 1)
    with pytest.raises(BoardError, match="same ROSE version"):
        look(words)


def test_a_short_page_is_refused() -> None:
    with pytest.raises(BoardError, match=f"{board.NUM_WORDS} words, and the page has 8"):
        RolloutSide(Words(bytearray(64)))


def test_an_identity_differs_for_a_later_process_with_the_same_pid() -> None:
    me = liveness.own_identity()
    assert liveness.is_alive(me)
    assert not liveness.is_alive(me + (1 << liveness.PID_BITS))
    assert not liveness.is_alive(liveness.NOBODY)


def test_the_shares_of_a_snapshot_count_the_step_in_progress(words: Words) -> None:
    rollout = RolloutSide(words)
    before = snapshot(words)
    assert begin(rollout)
    time.sleep(0.01)
    serving_share, rollout_share = snapshot(words).busy_shares_since(before)
    assert serving_share == 0.0
    assert 0.0 < rollout_share <= 1.0
