"""Turns on the shared page: by hand within one process, then between two real ones."""

import mmap
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rose._shm import Words
from rose.admission import board, liveness
from rose.admission.board import Phase, Word
from rose.admission.gate import GateReason, ServingView
from rose.admission.rollout_side import RolloutSide
from rose.admission.serving_side import ServingSide, StepStart
from rose.admission.slack import NEVER
from rose.errors import BoardError

PLAYER = Path(__file__).with_name("board_player.py")
VIOLATIONS, TOTAL, STOP = 208, 216, 224
FAR_S = 600.0


def work(latest_start_s: float = NEVER, pending: bool = False) -> ServingView:
    return ServingView(has_work=True, has_pending_prefill=pending, latest_start_s=latest_start_s)


IDLE = ServingView(has_work=False, has_pending_prefill=False, latest_start_s=NEVER)


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page"
    path.write_bytes(bytes(4096))
    return path


@pytest.fixture
def words(page: Path) -> Words:
    with page.open("r+b") as file:
        return Words(mmap.mmap(file.fileno(), 4096))


@pytest.fixture
def players(page: Path) -> Iterator["Players"]:
    started = Players(page)
    yield started
    started.stop()


class Players:
    """Real processes on the page; all are stopped at the end of the test."""

    def __init__(self, page: Path) -> None:
        self._page = page
        self._running: list[subprocess.Popen[str]] = []

    def start(self, *args: str) -> subprocess.Popen[str]:
        player = subprocess.Popen(
            [sys.executable, str(PLAYER), str(self._page), *args], stdout=subprocess.PIPE, text=True
        )
        self._running.append(player)
        return player

    def start_hanging(self, action: str) -> subprocess.Popen[str]:
        player = self.start(action)
        assert player.stdout is not None
        assert player.stdout.readline() == "in step\n"
        return player

    def stop(self) -> None:
        for player in self._running:
            player.kill()
            player.wait()
            if player.stdout is not None:
                player.stdout.close()


def serving_and_wanting(words: Words) -> tuple[ServingSide, RolloutSide]:
    """Both sides: serving between two steps, rollout with something to run."""
    serving, rollout = ServingSide(words), RolloutSide(words)
    rollout.set_want(True)
    serving.publish(work())
    return serving, rollout


def await_turn(rollout: RolloutSide) -> None:
    while not rollout.wait_turn():
        pass


def begin(rollout: RolloutSide) -> bool:
    return rollout.try_begin(time.monotonic() + FAR_S, rollout.view())


def test_rollout_steps_at_will_while_nobody_serves(words: Words) -> None:
    rollout = RolloutSide(words)
    for _ in range(3):
        assert begin(rollout)
        rollout.end_step(5)
    seen = board.snapshot(words)
    assert (seen.rollout.num_steps, seen.rollout_tokens) == (3, 15)


def test_rollout_steps_at_will_while_serving_is_idle(words: Words) -> None:
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
    assert words.load(Word.R_PHASE) == Phase.IDLE
    serving.end_step(IDLE)
    assert begin(rollout)


def test_rollout_needs_a_turn_while_serving_has_work(words: Words) -> None:
    serving, rollout = ServingSide(words), RolloutSide(words)
    serving.publish(work())
    assert not begin(rollout)


def test_a_turn_admits_one_step(words: Words) -> None:
    serving, rollout = serving_and_wanting(words)
    serving.yield_turn(NEVER, 1e-6)
    assert begin(rollout)
    rollout.end_step(1)
    assert not begin(rollout)


def test_begin_step_takes_an_unused_turn_back(words: Words) -> None:
    serving, rollout = serving_and_wanting(words)
    serving.yield_turn(NEVER, 1e-6)
    assert rollout.view().may_start
    serving.begin_step()
    assert not begin(rollout)


def test_no_turn_is_offered_to_a_rollout_that_cannot_use_it(words: Words) -> None:
    serving, rollout = ServingSide(words), RolloutSide(words)
    serving.publish(work())
    assert serving.yield_turn(NEVER, FAR_S) == 0.0
    rollout.set_want(True, min_step_s=5.0)
    assert serving.yield_turn(time.monotonic() + 1.0, FAR_S) == 0.0
    assert board.snapshot(words).num_yields == 0


def test_who_leaves_a_turn_unanswered_is_offered_none_until_it_shows_up_again(words: Words) -> None:
    serving, rollout = serving_and_wanting(words)
    for _ in range(3):
        serving.yield_turn(NEVER, 1e-6)
        assert board.snapshot(words).num_yields == 1
    serving.begin_step()
    assert not rollout.wait_turn(0.001)  # too late, but it lives
    serving.end_step(work())
    serving.yield_turn(NEVER, 1e-6)
    assert board.snapshot(words).num_yields == 2
    RolloutSide(words).set_want(True)  # a new engine in its place
    serving.yield_turn(NEVER, 1e-6)
    assert board.snapshot(words).num_yields == 3


def test_serving_goes_on_at_once_after_a_rollout_that_waited_for_its_turn_is_killed(
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
    serving.yield_turn(NEVER, 0.001)
    assert serving.yield_turn(NEVER, FAR_S) == 0.0


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
    assert board.snapshot(words).serving.num_steps == 2
    assert not serving.is_stepping


def test_view_carries_what_serving_published(words: Words) -> None:
    serving, rollout = ServingSide(words), RolloutSide(words)
    serving.publish(work(123.5, pending=True))
    seen = rollout.view()
    assert (seen.has_work, seen.has_pending_prefill, seen.latest_start_s) == (True, True, 123.5)
    serving.publish(IDLE)
    assert rollout.view().latest_start_s == NEVER


def test_rollout_learns_how_long_a_step_serving_puts_up_with(words: Words) -> None:
    rollout = RolloutSide(words)
    assert rollout.view().max_step_s == NEVER
    ServingSide(words).set_max_step(0.125)
    assert rollout.view().max_step_s == 0.125


def test_a_claim_stays_through_a_publication(words: Words) -> None:
    serving, rollout = ServingSide(words), RolloutSide(words)
    serving.begin_step()
    serving.publish(IDLE)
    assert not begin(rollout)


def in_thread(action: object, *args: object) -> threading.Thread:
    assert callable(action)
    thread = threading.Thread(target=action, args=args)
    thread.start()
    return thread


def test_serving_waits_for_the_running_step_and_goes_before_the_next(words: Words) -> None:
    serving, rollout = ServingSide(words), RolloutSide(words)
    outcomes: list[StepStart] = []
    assert begin(rollout)
    waiting = in_thread(lambda: outcomes.append(serving.begin_step()))
    while words.wake(Word.SERVING_BELL) == 0:  # until it sleeps; it goes on sleeping
        time.sleep(0.001)
    assert outcomes == []
    rollout.end_step(1)
    assert not begin(rollout)
    waiting.join()
    assert outcomes == [StepStart.WAITED]


def test_a_decline_ends_the_handover(words: Words) -> None:
    serving, rollout = serving_and_wanting(words)
    waiting = in_thread(serving.yield_turn, NEVER, FAR_S)
    await_turn(rollout)
    rollout.decline(rollout.view(), GateReason.NO_SLACK)
    waiting.join()
    assert board.snapshot(words).declines[GateReason.NO_SLACK] == 1


def test_a_step_taken_on_a_turn_ends_the_handover(words: Words) -> None:
    serving, rollout = serving_and_wanting(words)
    waiting = in_thread(serving.yield_turn, NEVER, FAR_S)
    await_turn(rollout)
    assert begin(rollout)
    rollout.end_step(1)
    waiting.join()
    assert board.snapshot(words).num_yields == 1


def test_turns_go_on_while_rollout_uses_them(words: Words) -> None:
    serving, rollout = serving_and_wanting(words)
    waiting = in_thread(serving.yield_turns, NEVER, FAR_S)
    for _ in range(3):
        await_turn(rollout)
        assert begin(rollout)
        rollout.end_step(1)
    await_turn(rollout)
    rollout.decline(rollout.view(), GateReason.NO_SLACK)
    waiting.join()
    assert board.snapshot(words).num_yields == 4


@pytest.fixture
def patient_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Announcements hold for as long as a test takes."""
    monkeypatch.setattr(board, "ARRIVAL_HOLD_S", FAR_S)


@pytest.mark.usefixtures("patient_hold")
def test_an_announced_arrival_ends_the_handover_and_holds_rollout_back(words: Words) -> None:
    serving, rollout = serving_and_wanting(words)
    waiting = in_thread(serving.yield_turn, NEVER, FAR_S)
    while words.load(Word.S_YIELDS) == 0:
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
def test_the_first_of_a_burst_does_not_stand_for_the_rest(words: Words) -> None:
    serving, rollout = serving_and_wanting(words)
    board.announce_arrival(words)
    first_s = time.monotonic()
    board.announce_arrival(words)
    serving.absorb_arrival(first_s)
    assert rollout.view().has_pending_prefill
    assert serving.yield_turns(NEVER, FAR_S) == 0.0
    serving.absorb_arrival(time.monotonic())
    serving.absorb_arrival(first_s)  # out of order
    assert not rollout.view().has_pending_prefill


def test_an_engine_with_other_work_offers_no_more_turns(words: Words) -> None:
    serving, _ = serving_and_wanting(words)
    assert serving.yield_turns(NEVER, FAR_S, is_called=lambda: True) == 0.0
    assert board.snapshot(words).num_yields == 0


def test_an_unused_turn_ends_the_offers(words: Words) -> None:
    serving, rollout = serving_and_wanting(words)
    waiting = in_thread(serving.yield_turns, NEVER, FAR_S)
    await_turn(rollout)
    assert begin(rollout)
    rollout.end_step(0)
    waiting.join()
    assert board.snapshot(words).num_yields == 1


def test_an_arrival_that_never_comes_is_let_go(words: Words) -> None:
    ServingSide(words)
    rollout = RolloutSide(words)
    board.announce_arrival(words)
    words.store(Word.ARRIVED, time.monotonic_ns() - board.to_ns(board.ARRIVAL_HOLD_S) - 1)
    assert rollout.wait_turn()
    assert begin(rollout)


def test_an_overrunning_step_does_not_hold_serving(words: Words) -> None:
    serving, rollout = ServingSide(words), RolloutSide(words)
    assert rollout.try_begin(time.monotonic() - 1.0, rollout.view())
    assert serving.begin_step(grace_s=0) is StepStart.OVERRUN
    assert board.snapshot(words).num_overruns == 1


def test_wait_turn_ends_without_a_turn(words: Words) -> None:
    serving, rollout = ServingSide(words), RolloutSide(words)
    serving.begin_step()
    assert not rollout.wait_turn(0.001)


def test_detached_serving_leaves_the_gpu_free(words: Words) -> None:
    serving, rollout = ServingSide(words), RolloutSide(words)
    serving.begin_step()
    serving.detach()
    assert rollout.view().alive
    assert begin(rollout)


@pytest.mark.parametrize("look", [ServingSide, RolloutSide, board.snapshot])
def test_a_page_of_another_layout_is_refused(words: Words, look: Callable[[Words], object]) -> None:
    words.store(Word.MAGIC, board.MAGIC + 1)
    with pytest.raises(BoardError, match="same ROSE version"):
        look(words)


def test_a_short_page_is_refused() -> None:
    with pytest.raises(BoardError, match="128 words, the page has 8"):
        RolloutSide(Words(bytearray(64)))


def test_identity_tells_a_process_from_a_later_one_with_its_pid() -> None:
    me = liveness.own_identity()
    assert liveness.is_alive(me)
    assert not liveness.is_alive(me + (1 << liveness.PID_BITS))
    assert not liveness.is_alive(liveness.NOBODY)


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
    assert serving.yield_turn(NEVER, FAR_S) == 0.0
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
    words.store(Word.S_PHASE, board.Phase.IDLE)
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
    assert not begin(rollout)  # no turn of the old engine is left over
    with ThreadPoolExecutor(1) as thread:
        turn = thread.submit(serving.yield_turn, NEVER, FAR_S)
        await_turn(rollout)
        assert begin(rollout)
        rollout.end_step(1)
        turn.result()
    serving.detach()


def test_a_side_has_one_live_process(words: Words, players: Players) -> None:
    player = players.start_hanging("hang-serving")
    with pytest.raises(BoardError, match=f"held by pid {player.pid}"):
        ServingSide(words)
    player.kill()
    player.wait()
    ServingSide(words)


def test_snapshot_shares_count_the_step_in_progress(words: Words) -> None:
    rollout = RolloutSide(words)
    before = board.snapshot(words)
    assert begin(rollout)
    time.sleep(0.01)
    serving_share, rollout_share = board.snapshot(words).busy_shares_since(before)
    assert serving_share == 0.0
    assert 0.0 < rollout_share <= 1.0
