"""The speed estimate recovers the parts of an engine's steps, in time of a whole GPU, and ages when idle."""

import random

import pytest

from rose.scheduler.rollout.router_config import RouterConfig, WorkerSpec
from rose.scheduler.rollout.workers.members import Members
from rose.scheduler.rollout.workers.speed import SpeedEstimate
from rose.scheduler.rollout.workers.worker import Worker


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_the_fit_recovers_both_parts_of_a_step(share: float) -> None:
    estimate, chance = SpeedEstimate(), random.Random(1)
    assert estimate.speed() is None
    for _ in range(60):
        turns = chance.randint(1, 16)
        noise = chance.uniform(0.95, 1.05)
        estimate.saw_decode((0.02 + 0.001 * turns) / share * noise, turns, share)
        estimate.saw_prefill(2000 * 1e-4 / share * noise, 2000, share)
    speed = estimate.speed()
    assert speed is not None
    assert speed.step_s == pytest.approx(0.02, rel=0.15)
    assert speed.step_s_per_turn == pytest.approx(0.001, rel=0.3)
    assert speed.prefill_s_per_token == pytest.approx(1e-4, rel=0.1)


def test_a_constant_batch_predicts_its_own_step_time() -> None:
    estimate = SpeedEstimate()
    for _ in range(20):
        estimate.saw_decode(0.03, 4, 1.0)
        estimate.saw_prefill(0.1, 1000, 1.0)
    speed = estimate.speed()
    assert speed is not None and speed.decode_s(4) == pytest.approx(0.03)


def test_neither_part_of_a_step_is_negative_whatever_is_seen() -> None:
    for sign in (1, -1):
        estimate = SpeedEstimate()
        for turns in range(1, 17):
            estimate.saw_decode(max(1e-4, 0.01 + sign * 0.01 * (turns - 8)), turns, 1.0)
            estimate.saw_prefill(0.1, 1000, 1.0)
        speed = estimate.speed()
        assert speed is not None and speed.step_s >= 0 and speed.step_s_per_turn >= 0


def test_short_prefills_say_nothing_of_the_rate() -> None:
    estimate = SpeedEstimate()
    for _ in range(20):
        estimate.saw_decode(0.03, 4, 1.0)
        estimate.saw_prefill(0.1, 3, 1.0)
    assert estimate.speed() is None


@pytest.mark.parametrize("batches", [[8], [8, 8, 8, 9]])
def test_no_batch_grows_for_free_when_it_hardly_varied(batches: list[int]) -> None:
    estimate, chance = SpeedEstimate(), random.Random(1)
    for _ in range(60):
        estimate.saw_decode(0.03 * chance.uniform(0.9, 1.1), chance.choice(batches), 1.0)
        estimate.saw_prefill(0.1, 1000, 1.0)
    speed = estimate.speed()
    assert speed is not None and speed.decode_s(8) == pytest.approx(0.03, rel=0.05)
    assert 0.0199 <= speed.step_s_per_turn / speed.step_s <= 0.1


def fleet(models: list[str]) -> tuple[Worker, ...]:
    """Returns a router's workers, which serve these models."""
    specs = [WorkerSpec(url=f"http://gpu:{port}") for port in range(1, 1 + len(models))]
    made = tuple(Worker(spec, RouterConfig()) for spec in specs)
    members = Members(made)
    for worker, model in zip(members.values(), models, strict=True):
        worker.says_models({model: None})
    return made


def work(worker: Worker, begin_s: float, end_s: float, step_s: float) -> None:
    """Lets a turn run on the worker for this time."""
    worker.begin_turn("job", 1000.0)
    while (begin_s := begin_s + 0.5) <= end_s:
        worker.prefilled(1000 * step_s, 1000.0)
        worker.made_tokens(1, begin_s, step_s)
    worker.end_prefill(1000.0)
    worker.end_turn("job")


def step_s(worker: Worker) -> float:
    """Returns the time of a step with one turn by the worker's view after a heartbeat."""
    worker.seen(0.0)
    speed = worker.view().speed
    assert speed is not None
    return speed.decode_s(1)


def test_an_idle_workers_estimate_becomes_what_other_workers_of_its_model_show() -> None:
    idle, busy, _ = fleet(["m", "m", "other"])
    work(busy, 0.0, 50.0, 0.01)
    work(idle, 50.0, 100.0, 0.03)
    assert step_s(idle) == pytest.approx(0.03, rel=0.1)
    work(busy, 100.0, 150.0, 0.01)
    half_way = step_s(idle)
    assert 0.015 < half_way < 0.028
    work(busy, 1000.0, 1001.0, 0.01)
    assert step_s(idle) == pytest.approx(half_way, rel=0.1)  # both were idle meanwhile
    work(busy, 1001.0, 1300.0, 0.01)
    assert step_s(idle) == pytest.approx(0.01, rel=0.15)
    idle.begin_turn("job", 100.0)
    assert step_s(idle) == pytest.approx(0.01, rel=0.15)
    idle.made_tokens(1, 1301.0, 0.03)
    assert 0.01 < step_s(idle) < 0.02


def test_a_workers_estimate_does_not_age_by_what_workers_of_other_models_show() -> None:
    idle, _, other = fleet(["m", "m", "other"])
    work(idle, 0.0, 50.0, 0.03)
    work(other, 50.0, 1000.0, 0.01)
    assert step_s(idle) == pytest.approx(0.03)


def test_an_idle_worker_that_shows_another_list_of_models_goes_on_ageing() -> None:
    idle, busy, _ = fleet(["m", "m", "other"])
    work(busy, 0.0, 50.0, 0.01)
    work(idle, 50.0, 100.0, 0.03)
    work(busy, 100.0, 150.0, 0.01)
    aged = step_s(idle)
    idle.says_models({"m": None, "adapter": None})
    assert step_s(idle) == pytest.approx(aged)


def test_a_worker_that_was_idle_for_hours_is_known_by_its_next_turn() -> None:
    idle, busy, _ = fleet(["m", "m", "other"])
    work(idle, 0.0, 50.0, 0.03)
    work(busy, 50.0, 25_000.0, 0.01)
    idle.begin_turn("job", 1000.0)
    assert step_s(idle) == pytest.approx(0.01, rel=0.05)
    idle.prefilled(30.0, 1000.0)
    assert step_s(idle) == pytest.approx(0.01, rel=0.05)
    idle.made_tokens(1, 25_001.0, 0.02)
    assert step_s(idle) == pytest.approx(0.012, rel=0.05)
