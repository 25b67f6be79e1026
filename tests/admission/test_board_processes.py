"""Two real processes on one board: they never step at once, and each goes on when the other is killed."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from board_setup import (
    FAR_S,
    IDLE,
    STOP,
    TOTAL,
    VIOLATIONS,
    Players,
    await_grant,
    begin,
    work,
)

from rose._shm import Words
from rose.admission import board
from rose.admission.board import EngineState, Word
from rose.admission.rollout_side import RolloutSide
from rose.admission.serving_side import ServingSide, StepStart
from rose.admission.slack import NEVER
from rose.errors import BoardError


def test_two_processes_never_step_at_once(words: Words, players: Players) -> None:
    rollout = players.start("roll-out")
    serving = players.start("serve", "3000", "100")
    assert serving.wait() == 0
    assert rollout.wait() == 0
    seen = board.snapshot(words)
    assert words.load(VIOLATIONS) == 0
    assert seen.num_overruns == 0
    assert seen.serving.num_steps >= 3000
    assert seen.rollout.num_steps >= 100
    assert words.load(TOTAL) == seen.serving.num_steps + seen.rollout.num_steps
    assert not seen.serving.alive and not seen.rollout.alive


def test_serving_goes_on_after_rollout_is_killed_in_a_step(words: Words, players: Players) -> None:
    serving = ServingSide(words)
    player = players.start_hanging("hang-rollout")
    player.kill()
    player.wait()
    assert serving.begin_step() is StepStart.ROLLOUT_DIED
    serving.end_step(work())
    assert serving.offer_grant(NEVER, FAR_S) == 0.0
    assert serving.begin_step() is StepStart.CLEAR
    serving.end_step(IDLE)
    assert board.snapshot(words).num_deaths == 1
    # A new rollout process takes the side over and is waited for again.
    rollout = RolloutSide(words)
    assert rollout.try_begin(time.monotonic() - 1.0, rollout.view())
    assert serving.begin_step(grace_s=0) is StepStart.OVERRUN


def test_serving_finishes_after_rollout_is_killed_at_any_moment(words: Words, players: Players) -> None:
    rollout = players.start("roll-out")
    serving = players.start("serve", "2000", "20")
    while words.load(Word.R_STEPS) < 20 and serving.poll() is None:
        time.sleep(0.001)
    rollout.kill()
    rollout.wait()
    assert serving.wait() == 0
    assert board.snapshot(words).serving.num_steps >= 2000


def test_rollout_answers_after_serving_is_killed_at_any_moment(words: Words, players: Players) -> None:
    rollout = players.start("roll-out")
    serving = players.start("serve", "1000000", "0")
    while words.load(Word.R_STEPS) < 20:
        time.sleep(0.001)
    serving.kill()
    serving.wait()
    words.store(STOP, 1)
    assert rollout.wait() == 0


def test_rollout_stays_off_the_gpu_after_serving_is_killed_in_a_step(words: Words, players: Players) -> None:
    player = players.start_hanging("hang-serving")
    rollout = RolloutSide(words)
    assert rollout.serving_alive()
    player.kill()
    player.wait()
    assert not rollout.serving_alive()
    lost = rollout.view()
    assert lost.has_work and not lost.alive
    assert not begin(rollout)
    serving = ServingSide(words)  # the restarted engine
    assert rollout.serving_alive()
    assert begin(rollout)
    rollout.end_step(1)
    serving.detach()


def test_rollout_stays_off_the_gpu_after_serving_died_without_work(words: Words, players: Players) -> None:
    player = players.start_hanging("hang-serving")
    words.store(Word.S_STATE, EngineState.IDLE)
    rollout = RolloutSide(words)
    player.kill()
    player.wait()
    assert not rollout.serving_alive()
    assert not rollout.view().alive
    assert not rollout.may_try() and not begin(rollout)  # it sleeps instead of asking again and again
    ServingSide(words).detach()  # its successor came, and left the GPU free
    assert rollout.serving_alive()
    assert begin(rollout)
    rollout.end_step(1)


def test_a_restarted_serving_engine_takes_its_place_beside_a_running_rollout_step(
    words: Words, players: Players, monkeypatch: pytest.MonkeyPatch
) -> None:
    player = players.start_hanging("hang-serving")
    player.kill()
    player.wait()
    monkeypatch.setattr(board, "ARRIVAL_HOLD_S", FAR_S)
    board.announce_arrival(words)  # a request that died with its engine
    rollout = RolloutSide(words)
    rollout.set_want(True)
    serving = ServingSide(words)
    assert rollout.view().has_pending_prefill
    monkeypatch.setattr(board, "ARRIVAL_HOLD_S", 0.0)  # its time is over
    assert begin(rollout)
    with ThreadPoolExecutor(1) as thread:
        start = thread.submit(serving.begin_step)  # waits for the step it found
        while words.wake(Word.SERVING_BELL) == 0:
            time.sleep(0.001)
        assert not start.done()
        rollout.end_step(1)
        assert start.result() is StepStart.WAITED
    assert not begin(rollout)
    serving.end_step(work())
    assert not begin(rollout)  # no grant of the old engine is left over
    with ThreadPoolExecutor(1) as thread:
        grant = thread.submit(serving.offer_grant, NEVER, FAR_S)
        await_grant(rollout)
        assert begin(rollout)
        rollout.end_step(1)
        grant.result()
    serving.detach()


def test_a_side_of_the_board_has_one_live_process(words: Words, players: Players) -> None:
    player = players.start_hanging("hang-serving")
    with pytest.raises(BoardError, match=f"held by pid {player.pid}"):
        ServingSide(words)
    player.kill()
    player.wait()
    ServingSide(words)


def test_serving_goes_on_at_once_after_a_rollout_that_waited_for_its_grant_is_killed(
    words: Words, players: Players
) -> None:
    serving = ServingSide(words)
    serving.begin_step()
    player = players.start("roll-out")
    while not words.load(Word.R_WANT):
        time.sleep(0.001)
    player.kill()
    player.wait()
    serving.end_step(work())
    serving.offer_grant(NEVER, 0.001)
    assert serving.offer_grant(NEVER, FAR_S) == 0.0
