"""A trainer on the board: pieces run under grants alone, and serving comes first."""

import os
import threading
import time
from collections.abc import Iterator

import pytest

from rose._shm import Words
from rose.admission.board_snapshot import EngineState, snapshot
from rose.admission.gate import ServingView
from rose.admission.serving_side import NO_WORK, ServingSide, StepStart
from rose.admission.slack import NEVER
from rose.errors import WorkerError
from rose.scheduler.node.pieces import Piece, Work
from rose.trainers.fine_tune import guest as guest_module
from rose.trainers.fine_tune.guest import TrainingGuest

FIRST, SECOND = Piece("forward", 0), Piece("forward", 1)
WORK = Work(1, 32)


@pytest.fixture
def guest(words: Words) -> Iterator[TrainingGuest]:
    made = TrainingGuest(words)
    yield made
    made.close()


def know(guest: TrainingGuest, seconds: float, num_times: int = 5) -> None:
    for piece in (FIRST, SECOND):
        for _ in range(num_times):
            guest.times.add(piece, WORK, seconds)


def busy(latest_start_s: float = NEVER) -> ServingView:
    return ServingView(has_work=True, has_pending_prefill=False, latest_start_s=latest_start_s)


def beginning(guest: TrainingGuest, piece: Piece) -> threading.Thread:
    thread = threading.Thread(target=guest.begin, args=(piece, WORK))
    thread.start()
    return thread


def test_pieces_that_fit_share_a_grant_and_leaving_ends_it(words: Words, guest: TrainingGuest) -> None:
    know(guest, 1e-4)
    guest.begin(FIRST, WORK)
    guest.begin(SECOND, WORK)
    assert (guest.num_grants, guest.is_computing) == (1, True)
    guest.leave()
    assert not guest.is_computing
    assert snapshot(words).rollout.num_steps == 1


def test_the_tokens_of_a_pass_count_once(words: Words, guest: TrainingGuest) -> None:
    for piece in [*(Piece("forward", layer) for layer in range(-1, 3)), Piece("backward", 3)]:
        for _ in range(5):
            guest.times.add(piece, WORK, 1e-4)
        guest.begin(piece, WORK)
    guest.leave()
    assert WORK.tokens <= snapshot(words).rollout_tokens < WORK.tokens + guest.num_grants


def test_a_piece_that_no_longer_fits_gets_a_grant_of_its_own(guest: TrainingGuest) -> None:
    know(guest, 0.025)  # longer than a request may wait, so a grant is for one
    guest.begin(FIRST, WORK)
    guest.begin(SECOND, WORK)
    assert guest.num_grants == 2


def test_no_piece_begins_while_serving_computes(words: Words, guest: TrainingGuest) -> None:
    serving = ServingSide(words)
    serving.begin_step()
    thread = beginning(guest, FIRST)
    thread.join(0.1)
    assert thread.is_alive()
    serving.end_step(NO_WORK)
    thread.join(60)
    assert guest.is_computing


def test_a_request_ends_the_grant_at_the_next_border(words: Words, guest: TrainingGuest) -> None:
    serving = ServingSide(words)
    know(guest, 1e-4)
    guest.begin(FIRST, WORK)
    serving.publish(busy())
    claimed: list[StepStart] = []
    claim = threading.Thread(target=lambda: claimed.append(serving.begin_step(grace_s=60.0)))
    claim.start()
    thread = beginning(guest, SECOND)
    claim.join(60)
    assert claimed[0] in (StepStart.WAITED, StepStart.CLEAR)  # for the first piece, and not for the second
    assert not guest.is_computing
    serving.end_step(NO_WORK)
    thread.join(60)
    assert guest.num_grants == 2


def test_lent_slack_is_used_by_known_pieces_that_fit_alone(words: Words, guest: TrainingGuest) -> None:
    serving = ServingSide(words)
    serving.publish(busy())
    thread = beginning(guest, FIRST)  # nobody knows how long it takes
    serving.offer_grant(time.monotonic() + 5.0, 0.2)
    thread.join(0.1)
    assert thread.is_alive()
    serving.publish(NO_WORK)
    thread.join(60)
    guest.leave()
    know(guest, 1e-3)
    serving.publish(busy(time.monotonic() + 60.0))
    thread = beginning(guest, FIRST)
    while thread.is_alive():
        serving.offer_grant(time.monotonic() + 60.0, 0.2)
    assert guest.num_grants == 2


def test_a_piece_longer_than_serving_ever_allows_ends_the_trainer(words: Words, guest: TrainingGuest) -> None:
    serving = ServingSide(words)
    serving.set_max_step(0.125)
    know(guest, 0.5, 12)
    with pytest.raises(WorkerError, match="takes 500 ms for 1 sequences of 32 tokens, and serving allows"):
        guest.begin(FIRST, WORK)


def test_a_request_with_a_tight_slo_holds_the_trainer_back_and_does_not_end_it(
    words: Words, guest: TrainingGuest
) -> None:
    serving = ServingSide(words)
    serving.set_max_step(0.125)
    know(guest, 0.1, 12)
    guest.begin(FIRST, WORK)
    guest.leave()
    know(guest, 0.1, 12)
    serving.set_max_step(0.001)
    thread = beginning(guest, SECOND)
    thread.join(0.2)
    assert thread.is_alive()
    serving.set_max_step(0.125)
    thread.join(60)
    assert guest.num_grants == 2


def test_a_few_slow_measurements_on_a_crowded_machine_do_not_end_the_trainer(
    words: Words, guest: TrainingGuest
) -> None:
    serving = ServingSide(words)
    serving.set_max_step(0.125)
    know(guest, 0.5)
    guest.begin(FIRST, WORK)
    assert guest.is_computing


@pytest.mark.parametrize("num_before", [1, 2, 3, 12, 70, 200])
def test_a_machine_that_stood_still_once_does_not_end_the_trainer(
    words: Words, guest: TrainingGuest, num_before: int
) -> None:
    serving = ServingSide(words)
    serving.set_max_step(0.125)
    know(guest, 1e-4, num_before)
    know(guest, 30.0, 1)
    for _ in range(80):
        guest.begin(FIRST, WORK)
        guest.leave()
        know(guest, 1e-4, 1)
    assert guest.num_grants == 80


def test_the_computing_thread_is_on_the_cpus_of_the_gpu_only_while_it_computes(words: Words) -> None:
    everywhere = os.sched_getaffinity(0)
    guest = TrainingGuest(words, cpus=[min(everywhere)])
    guest.begin(FIRST, WORK)
    assert os.sched_getaffinity(0) == {min(everywhere)}
    guest.leave()
    assert os.sched_getaffinity(0) == everywhere
    guest.close()


def test_a_guest_that_leaves_amid_a_piece_waits_for_the_device_and_gets_its_cpus_back(words: Words) -> None:
    everywhere, waits = os.sched_getaffinity(0), 0

    def synchronize() -> None:
        nonlocal waits
        waits += snapshot(words).rollout.state is EngineState.RUNNING

    guest = TrainingGuest(words, cpus=[min(everywhere)], synchronize=synchronize)
    guest.begin(FIRST, WORK)
    guest.close()
    guest.close()
    assert (waits, guest.is_computing) == (1, False)
    assert os.sched_getaffinity(0) == everywhere
    assert snapshot(words).rollout.state is EngineState.DETACHED


def test_the_other_processes_hear_that_the_first_one_still_waits_for_a_grant(
    words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_module, "TELL_S", 0.05)
    told: list[float] = []

    class Ranks:
        """The first of several processes."""

        def most(self, value: float, *, soon: bool) -> float:
            told.append(value)
            return value

    serving = ServingSide(words)
    serving.begin_step()
    guest = TrainingGuest(words, ranks=Ranks())  # type: ignore[arg-type]
    know(guest, 1e-3)
    thread = beginning(guest, FIRST)
    until_s = time.monotonic() + 60
    while told.count(1.0) < 2:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    assert guest.num_grants == 0
    serving.end_step(NO_WORK)
    thread.join(60)
    assert guest.num_grants == 1 and told[-1] == 0.0
    guest.close()
