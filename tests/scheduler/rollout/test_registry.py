"""Worker: what a status, a token and a loss do to its view."""

import pytest

from rose.errors import WorkerError
from rose.scheduler.rollout.config import RouterConfig, WorkerSpec
from rose.scheduler.rollout.views import WorkerKind
from rose.scheduler.rollout.worker import GateStatus, Worker, WorkerStatus, parse_version
from rose.types import WeightVersion

CONFIG = RouterConfig()


def worker() -> Worker:
    made = Worker(WorkerSpec(url="http://gpu:1", kind=WorkerKind.SERVING), CONFIG)
    made.seen(0.0)
    return made


def status(admitted: int = 0, declined: int = 0, **fields: object) -> WorkerStatus:
    gate = GateStatus(admitted_steps=admitted, declined_steps=declined)
    return WorkerStatus.model_validate({"gate": gate, **fields})


@pytest.mark.parametrize(
    ("statuses", "is_eligible"),
    [
        ([status()], True),
        ([status(pressure="PRESSURE")], False),
        ([status(pressure="frozen")], True),
        ([status(num_waiting=1)], False),
        ([status(5, 5), status(5, 9)], False),
        ([status(5, 5), status(6, 9)], True),
        ([status(5, 5), status(5, 5)], True),
        ([status(5, 5), status(5, 9), status(6, 9)], True),
    ],
)
def test_eligibility_follows_pressure_gate_and_waiting(
    statuses: list[WorkerStatus], is_eligible: bool
) -> None:
    one = worker()
    for each in statuses:
        one.take_status(each, 0.0)
    assert one.view().eligible is is_eligible


def test_a_worker_that_yielded_gets_no_turn_before_its_next_status() -> None:
    one = worker()
    one.has_yielded = True
    assert not one.view().eligible
    one.take_status(status(), 0.0)
    assert one.view().eligible


def test_a_deactivated_worker_gets_no_turn_until_it_is_active_again() -> None:
    one = worker()
    one.take_status(status(is_active=False), 0.0)
    assert not one.view().has_room
    one.seen(1.0)
    assert not one.view().has_room
    one.take_status(status(is_active=True), 0.0)
    assert one.view().has_room


@pytest.mark.parametrize(
    ("seconds_per_token", "interval"), [(None, 1), (0.001, 16), (0.1, 5), (3.0, 1), (0.0, 16)]
)
def test_chunks_come_often_enough_not_to_look_like_a_stall(
    seconds_per_token: float | None, interval: int
) -> None:
    one = worker()
    one.seconds_per_token = seconds_per_token
    assert one.stream_interval(CONFIG) == interval


def test_a_suspect_is_on_probation_until_it_makes_a_token() -> None:
    one = worker()
    one.suspect(10.0, CONFIG)
    assert (one.view().cap, one.view().not_before) == (1, 10.0 + CONFIG.avoid_s)
    one.made_tokens(1, 12.0, None)
    assert one.view().cap == CONFIG.turns_per_gpu


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (None, None),
        ("run/7", WeightVersion(run_id="run", number=7)),
        ("a/b/0", WeightVersion(run_id="a/b", number=0)),
    ],
)
def test_versions_are_parsed(text: str | None, version: WeightVersion | None) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize("text", ["7", "run/", "/7", "run/x", ""])
def test_malformed_versions_are_refused(text: str) -> None:
    with pytest.raises(WorkerError, match="RUN/NUMBER"):
        parse_version(text)
