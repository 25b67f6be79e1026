"""The watch on a real board page and real records; no engine."""

import mmap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose._shm import Words
from rose.admission.board import NUM_WORDS, closed_slices
from rose.admission.harm import MEASURING_SHARE, RequestDelay, SliceTime
from rose.admission.rollout_side import RolloutSide
from rose.admission.serving_side import ServingSide
from rose.admission.slices import slice_number
from rose.engine.harm_records import NUM_SLICES, HarmRecords, records_path
from rose.engine.http.harm import NO_ROLLOUTS, HarmWatch
from rose.messages import HarmStatus
from rose.types import GateMode


@pytest.fixture
def board() -> Words:
    words = Words(mmap.mmap(-1, 8 * NUM_WORDS))
    ServingSide(words)
    return words


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[HarmRecords]:
    records = HarmRecords(records_path(tmp_path, "e"), create=True)
    yield records
    records.close()


def reader(writer: HarmRecords) -> HarmRecords:
    return HarmRecords(writer.path, create=False)


def record_minute(writer: HarmRecords, *, slowdown: float) -> None:
    """Sixty requests, those of tenant "slow" with waits, and slices of which every tenth is closed."""
    now = time.monotonic()
    for number in range(60):
        at_s = now - 30 + number / 4
        is_slow = number >= 30 and slowdown == 0
        writer.add_request(
            RequestDelay(
                at_s=at_s,
                ttft_s=0.1,
                ttft_waited_s=0.05 * is_slow,
                tpot_s=0.01,
                tpot_waited_s=0.0,
                tenant="slow" if is_slow else "quick",
            )
        )
    for number in range(slice_number(now) - 200, slice_number(now)):
        is_closed = number % 10 == 0
        factor = (1 if is_closed else 1 + slowdown) * (1 + 0.001 * (number % 7))
        writer.add_slice(
            SliceTime(number=number, is_closed=is_closed, seconds=0.1 * factor, predicted_s=0.1, fixed_s=0.09)
        )


def test_harm_above_the_bound_shuts_rollouts_out_and_another_mode_lets_them_in(
    board: Words, writer: HarmRecords
) -> None:
    RolloutSide(board)
    watch = HarmWatch(board, reader(writer), 0.02)
    record_minute(writer, slowdown=0.05)
    watch.look(GateMode.IDLE)
    status = watch.status()
    assert status.is_retreating and status.closed_share == closed_slices(board).share > 0.4
    assert status.recent is not None and status.recent.num_requests == 60
    assert HarmStatus.model_validate_json(status.model_dump_json()) == status
    watch.look(GateMode.DUAL)
    assert not watch.status().is_retreating


def test_the_harm_of_one_mode_is_not_held_against_another(board: Words, writer: HarmRecords) -> None:
    RolloutSide(board)
    watch = HarmWatch(board, reader(writer), 0.02)
    watch.look(GateMode.OFF)
    record_minute(writer, slowdown=0.05)
    watch.look(GateMode.OFF)
    watch.look(GateMode.IDLE)
    status = watch.status()
    assert not status.is_retreating and status.recent is not None and status.recent.num_requests == 0


def test_without_rollouts_nothing_is_shut_out(board: Words, writer: HarmRecords) -> None:
    watch = HarmWatch(board, reader(writer), 0.02)
    watch.look(GateMode.IDLE)
    assert (watch.status().note, closed_slices(board).share) == (NO_ROLLOUTS, 0.0)


def test_a_serving_engine_that_has_gone_shuts_nothing_out(board: Words, writer: HarmRecords) -> None:
    RolloutSide(board)
    HarmWatch(board, reader(writer), 0.02).look(GateMode.IDLE)
    assert closed_slices(board).share == MEASURING_SHARE
    serving = ServingSide(board)
    assert closed_slices(board).share == 0.0  # a new engine's watch has not looked yet
    HarmWatch(board, reader(writer), 0.02).look(GateMode.IDLE)
    serving.detach()
    assert closed_slices(board).share == 0.0


def test_each_tenant_has_its_own_figures(board: Words, writer: HarmRecords) -> None:
    RolloutSide(board)
    watch = HarmWatch(board, reader(writer), 0.02)
    watch._hour_began_s -= 60
    record_minute(writer, slowdown=0.0)
    watch.look(GateMode.IDLE)
    tenants = watch.status().tenants
    assert tenants["slow"].num_requests == tenants["quick"].num_requests == 30
    assert tenants["slow"].latencies["ttft_p99"].value == pytest.approx(1.0, abs=0.05)
    assert tenants["quick"].latencies["ttft_p99"].value == pytest.approx(0.0, abs=0.05)


def test_only_one_of_several_api_servers_closes_slices(board: Words, writer: HarmRecords) -> None:
    RolloutSide(board)
    record_minute(writer, slowdown=0.0)
    first, second = (HarmWatch(board, reader(writer), allowed) for allowed in (0.02, 1e-9))
    first.look(GateMode.IDLE)
    for _ in range(3):
        second.look(GateMode.IDLE)
    assert closed_slices(board).share == MEASURING_SHARE


def test_records_come_back_as_they_were_written_and_the_oldest_are_dropped(writer: HarmRecords) -> None:
    for number in range(NUM_SLICES + 5):
        writer.add_slice(SliceTime(number=number, is_closed=number % 2 == 0, seconds=0.5, predicted_s=0.25))
    found = reader(writer).slices()
    assert found[-1].number == NUM_SLICES + 4 and found[0].number in (5, 6)
    assert found[-1] == SliceTime(
        number=NUM_SLICES + 4, is_closed=True, seconds=0.5, predicted_s=0.25, fixed_s=0.0
    )
