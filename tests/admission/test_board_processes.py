"""Two real processes on one board: they never step at once, and each goes on when the other is killed."""

import random
import signal
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
from rose.admission.board import BoardWord
from rose.admission.board_snapshot import snapshot
from rose.admission.claim import ServingState, change, with_state
from rose.admission.rollout_side import RolloutSide
from rose.admission.serving_side import ServingSide, StepStart
from rose.admission.slack import NEVER
from rose.errors import BoardError
from rose.types import MAX_ENGINES, Role


@pytest.mark.slow
def test_two_processes_never_step_at_once(words: Words, players: Players) -> None:
    rollout = players.start("roll-out")
    serving = players.start("serve", "3000", "100")
    assert serving.wait() == 0
    assert rollout.wait() == 0
    seen = snapshot(words)
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
    assert snapshot(words).num_deaths == 1
    # A new rollout process takes the side over and is waited for again.
    rollout = RolloutSide(words)
    assert rollout.try_begin(time.monotonic() - 1.0, rollout.view())
    assert serving.begin_step(grace_s=0) is StepStart.OVERRUN


def test_serving_finishes_after_rollout_is_killed_at_any_moment(words: Words, players: Players) -> None:
    rollout = players.start("roll-out")
    serving = players.start("serve", "2000", "20")
    while words.load(BoardWord.R_STEPS) < 20 and serving.poll() is None:
        time.sleep(0.001)
    rollout.kill()
    rollout.wait()
    assert serving.wait() == 0
    assert snapshot(words).serving.num_steps >= 2000


def test_rollout_answers_after_serving_is_killed_at_any_moment(words: Words, players: Players) -> None:
    rollout = players.start("roll-out")
    serving = players.start("serve", "1000000", "0")
    while words.load(BoardWord.R_STEPS) < 20:
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
    change(words, BoardWord.CLAIM, lambda claim: with_state(claim, 0, ServingState.IDLE))
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
    monkeypatch.setattr(board, "ARRIVAL_HOLD_NS", board.to_ns(FAR_S))
    board.announce_arrival(words)  # a request that died with its engine
    rollout = RolloutSide(words)
    rollout.set_want(True)
    serving = ServingSide(words)
    assert rollout.view().has_pending_prefill
    monkeypatch.setattr(board, "ARRIVAL_HOLD_NS", 0)  # its time is over
    assert begin(rollout)
    with ThreadPoolExecutor(1) as thread:
        start = thread.submit(serving.begin_step)  # waits for the step it found
        while words.wake(BoardWord.SERVING_BELL) == 0:
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


def test_a_slot_is_held_by_one_live_process_and_passes_to_another_when_it_dies(
    words: Words, players: Players
) -> None:
    hanging = [players.start_hanging("hang-serving") for _ in range(MAX_ENGINES[Role.SERVING])]
    with pytest.raises(BoardError, match=f"all 4 serving slots .* {hanging[1].pid}"):
        ServingSide(words)
    hanging[1].kill()
    hanging[1].wait()
    assert ServingSide(words).slot == 1


def test_serving_goes_on_at_once_after_a_rollout_that_waited_for_its_grant_is_killed(
    words: Words, players: Players
) -> None:
    serving = ServingSide(words)
    serving.begin_step()
    player = players.start("roll-out")
    while not words.load(BoardWord.R_WANT):
        time.sleep(0.001)
    player.kill()
    player.wait()
    serving.end_step(work())
    serving.offer_grant(NEVER, 0.001)
    assert serving.offer_grant(NEVER, FAR_S) == 0.0


@pytest.mark.slow
def test_two_serving_engines_and_two_guests_never_compute_at_once_though_they_are_killed_and_stopped(
    words: Words, players: Players
) -> None:
    actions = ["serve-among-many", "serve-among-many", "guest-among-many", "guest-among-many"]
    running = [players.start(action) for action in actions]
    rng = random.Random(3)
    for _ in range(16):
        seen, until_s = snapshot(words), time.monotonic() + FAR_S
        # Each fault meets processes at work: both kinds have stepped since the last one.
        while time.monotonic() < until_s:
            now = snapshot(words)
            kinds = ((now.rollout, seen.rollout), (now.serving, seen.serving))
            if all(side.num_steps > before.num_steps + 3 for side, before in kinds):
                break
            time.sleep(0.002)
        else:
            pytest.fail("nobody steps")
        at = rng.randrange(len(running))
        if rng.random() < 0.5:
            running[at].kill()
            running[at].wait()
            running[at] = players.start(actions[at])
        else:
            running[at].send_signal(signal.SIGSTOP)
            time.sleep(rng.random() * 0.03)
            running[at].send_signal(signal.SIGCONT)
    words.store(STOP, 1)
    assert [player.wait() for player in running] == [0] * 4
    assert words.load(VIOLATIONS) == 0
    assert snapshot(words).num_overruns == 0
