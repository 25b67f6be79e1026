"""The watch on a real board page and real records; no engine."""

import logging
import mmap
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rose._shm import Words
from rose.admission.board import NUM_WORDS, closed_slices
from rose.admission.harm import CONTROL_WINDOWS_S, MEASURING_SHARE, HarmReport, RequestDelay, SliceTime
from rose.admission.rollout_side import RolloutSide
from rose.admission.serving_side import ServingSide
from rose.admission.slices import GROUP_SLICES, slice_number
from rose.engine.harm_records import NUM_REQUESTS, NUM_SLICES, HarmRecords, records_path
from rose.engine.http.harm import HOUR_S, LOOKS_PER_HOURLY, NO_ROLLOUTS, HarmWatch
from rose.engine.settings import EngineSettings
from rose.messages import HarmHistory, HarmStatus
from rose.types import GateMode, Role


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


def watch_of(
    board: Words,
    writer: HarmRecords,
    allowed: float = 0.02,
    floors_s: tuple[float, float] = (0.0, 0.0),
    **settings: Any,
) -> HarmWatch:
    chosen = EngineSettings(role=Role.SERVING, pool="p", allow_harm=allowed, **settings)
    return HarmWatch(board, reader(writer), chosen, lambda: floors_s)


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
    # Whole groups, the same at whatever time the test runs.
    last = slice_number(now) // GROUP_SLICES * GROUP_SLICES
    for place in range(400):
        number, is_closed = last - 400 + place, place % 10 == 0
        factor = (1 if is_closed else 1 + slowdown) * (1 + 0.001 * (place % 7))
        writer.add_slice(
            SliceTime(number=number, is_closed=is_closed, seconds=0.1 * factor, predicted_s=0.1, fixed_s=0.09)
        )


def test_harm_above_the_bound_shuts_rollouts_out_and_another_mode_lets_them_in(
    board: Words, writer: HarmRecords
) -> None:
    RolloutSide(board)
    watch = watch_of(board, writer, 0.02)
    record_minute(writer, slowdown=0.05)
    watch.look(GateMode.IDLE)
    status = watch.status()
    assert status.is_retreating and status.closed_share == closed_slices(board).share > 0.4
    assert status.recent is not None and status.recent.num_requests == 60
    assert HarmStatus.model_validate_json(status.model_dump_json()) == status
    history = watch.history()
    assert HarmHistory.model_validate_json(history.model_dump_json()) == history
    watch.look(GateMode.DUAL)
    assert not watch.status().is_retreating


def test_a_new_rollout_engine_is_not_held_back_for_what_the_last_one_cost(
    board: Words, writer: HarmRecords
) -> None:
    first = RolloutSide(board)
    watch = watch_of(board, writer, 0.02)
    record_minute(writer, slowdown=0.05)
    watch.look(GateMode.IDLE)
    assert watch.status().is_retreating
    first.detach()
    watch.look(GateMode.IDLE)
    assert watch.status().recent is None
    RolloutSide(board)
    watch.look(GateMode.IDLE)
    assert closed_slices(board).share == MEASURING_SHARE and watch.status().note != NO_ROLLOUTS


def test_the_log_warns_when_rollouts_are_held_back_and_tells_when_they_are_let_in_again(
    board: Words, writer: HarmRecords, caplog: pytest.LogCaptureFixture
) -> None:
    RolloutSide(board)
    watch = watch_of(board, writer, 0.02)
    record_minute(writer, slowdown=0.05)
    with caplog.at_level(logging.INFO, logger="rose"):
        watch.look(GateMode.IDLE)
        now = time.monotonic()
        for minute in range(1, 20):
            at_s = now + minute * CONTROL_WINDOWS_S[0] + 1
            watch._adjust(HarmReport.nothing(), HarmReport.nothing(), GateMode.IDLE, at_s, 60.0)
    held_back, *let_in = caplog.records
    assert held_back.levelno == logging.WARNING and "tpot_p99 +4.5%" in held_back.getMessage()
    assert {record.levelno for record in let_in} == {logging.INFO}
    assert "for more of the time" in let_in[0].getMessage()
    assert let_in[-1].getMessage().startswith("rollouts are let in again")
    assert not watch.status().is_retreating


def test_the_harm_of_one_mode_is_not_held_against_another(board: Words, writer: HarmRecords) -> None:
    RolloutSide(board)
    watch = watch_of(board, writer, 0.02)
    watch.look(GateMode.OFF)
    record_minute(writer, slowdown=0.05)
    watch.look(GateMode.OFF)
    watch.look(GateMode.IDLE)
    status = watch.status()
    assert not status.is_retreating and status.recent is not None and status.recent.num_requests == 0


def test_without_rollouts_nothing_is_shut_out(board: Words, writer: HarmRecords) -> None:
    watch = watch_of(board, writer, 0.02)
    watch.look(GateMode.IDLE)
    assert (watch.status().note, closed_slices(board).share) == (NO_ROLLOUTS, 0.0)


def test_a_serving_engine_that_has_gone_shuts_nothing_out(board: Words, writer: HarmRecords) -> None:
    RolloutSide(board)
    watch_of(board, writer, 0.02).look(GateMode.IDLE)
    assert closed_slices(board).share == MEASURING_SHARE
    serving = ServingSide(board)
    assert closed_slices(board).share == 0.0  # a new engine's watch has not looked yet
    watch_of(board, writer, 0.02).look(GateMode.IDLE)
    serving.detach()
    assert closed_slices(board).share == 0.0


def test_each_tenant_has_its_own_figures(board: Words, writer: HarmRecords) -> None:
    RolloutSide(board)
    watch = watch_of(board, writer, 0.02)
    watch._hour_began_s -= 60
    record_minute(writer, slowdown=0.0)
    watch.look(GateMode.IDLE)
    tenants = watch.history().hours[0].tenants
    assert tenants["slow"].num_requests == tenants["quick"].num_requests == 30
    assert tenants["slow"].latencies["ttft_p99"].value == pytest.approx(1.0, abs=0.05)
    assert tenants["quick"].latencies["ttft_p99"].value == pytest.approx(0.0, abs=0.05)
    status = watch.status()
    assert status.hour is not None and not status.hour.tenants
    worst = status.worst_tenant
    assert worst is not None and (worst.tenant, worst.latency) == ("slow", "ttft_p99")
    assert worst.harm == tenants["slow"].latencies["ttft_p99"]


def test_an_hour_that_has_ended_keeps_its_tenants(board: Words, writer: HarmRecords) -> None:
    rollout = RolloutSide(board)
    watch = watch_of(board, writer)
    watch._hour_began_s -= 60
    record_minute(writer, slowdown=0.0)
    watch.look(GateMode.IDLE)
    watch._hour_began_s -= HOUR_S
    rollout.detach()
    watch.look(GateMode.IDLE)
    now, before = watch.history().hours
    assert now.num_requests == 0 and not now.tenants
    assert before.tenants["slow"].num_requests == 30 and before.num_requests == 60


def test_an_hour_that_begins_beside_rollouts_says_at_once_that_nothing_is_known(
    board: Words, writer: HarmRecords
) -> None:
    RolloutSide(board)
    watch = watch_of(board, writer)
    watch._hour_began_s -= 60
    record_minute(writer, slowdown=0.0)
    watch.look(GateMode.IDLE)
    assert watch.history().note is None
    watch._hour_began_s -= HOUR_S
    watch.look(GateMode.IDLE)
    status = watch.status()
    assert status.hour is not None and not status.hour.latencies
    assert status.note is not None and "slices without rollouts" in status.note


def test_another_mode_begins_an_hour_of_its_own_at_once(board: Words, writer: HarmRecords) -> None:
    RolloutSide(board)
    watch = watch_of(board, writer)
    watch._hour_began_s -= 60
    record_minute(writer, slowdown=0.05)
    watch.look(GateMode.IDLE)
    assert watch.history().note is None
    watch.look(GateMode.DUAL)
    status, (now, before) = watch.status(), watch.history().hours
    assert (now.gate, now.num_requests, now.tenants) == (GateMode.DUAL, 0, {})
    assert before.gate is GateMode.IDLE and before.num_requests == 60 and before.tenants
    assert status.hour is not None and status.hour.gate is GateMode.DUAL
    assert status.note is not None and not status.is_bounded and status.gate is GateMode.DUAL


def test_the_hour_says_what_serving_had_what_it_has_and_what_rollouts_earned(
    board: Words, writer: HarmRecords
) -> None:
    rollout = RolloutSide(board)
    watch = watch_of(board, writer)
    watch._hour_began_s -= 60
    watch.look(GateMode.IDLE)
    assert rollout.try_begin(time.monotonic() + 1.0, rollout.view())
    rollout.end_step(90)
    record_minute(writer, slowdown=0.05)
    for _ in range(LOOKS_PER_HOURLY):
        watch.look(GateMode.IDLE)
    hour = watch.status().hour
    assert hour is not None and hour.harvest is not None
    assert hour.with_rollouts_ms["ttft_p99"] == pytest.approx(100)
    assert hour.without_rollouts_ms["ttft_p99"] == pytest.approx(100 / 1.045, rel=0.01)
    assert hour.harvest.tokens == 90 and 0 < hour.harvest.rollout_s <= hour.harvest.seconds


def test_an_hour_has_figures_from_the_first_look_that_can_know_them(
    board: Words, writer: HarmRecords
) -> None:
    RolloutSide(board)
    watch = watch_of(board, writer)
    watch._hour_began_s -= 60
    watch.look(GateMode.IDLE)
    record_minute(writer, slowdown=0.05)
    watch.look(GateMode.IDLE)
    hour = watch.status().hour
    assert hour is not None and hour.latencies and watch.status().note is None


def test_requests_that_are_no_longer_kept_shorten_what_the_hour_rests_on(
    board: Words, writer: HarmRecords
) -> None:
    RolloutSide(board)
    watch = watch_of(board, writer)
    watch._hour_began_s -= 3000
    now = time.monotonic()
    for number in range(NUM_REQUESTS + 10):
        at_s = now - 1000 + number / 20
        writer.add_request(
            RequestDelay(at_s=at_s, ttft_s=0.1, ttft_waited_s=0.0, tpot_s=0.01, tpot_waited_s=0.0)
        )
    watch.look(GateMode.IDLE)
    hour = watch.history().hours[0]
    assert hour.seconds >= 3000 and 999 < hour.requests_s < 1001
    assert hour.num_requests == NUM_REQUESTS - 1


def test_forecasts_rest_on_the_time_whose_slices_are_kept(board: Words, writer: HarmRecords) -> None:
    RolloutSide(board)
    # Both forecasts are of the same slices, in the same groups, however long the test takes.
    now = slice_number(time.monotonic()) // GROUP_SLICES * GROUP_SLICES

    def forecast() -> float:
        noise = random.Random(0)
        for number in range(now - 2000, now):
            seconds = 0.1 * noise.lognormvariate(0, 0.1)
            writer.add_slice(
                SliceTime(
                    number=number,
                    is_closed=(now - number) % 20 == 0,
                    seconds=seconds,
                    predicted_s=0.1,
                    fixed_s=0.09,
                )
            )
        watch = watch_of(board, writer)
        watch._hour_began_s -= 3000
        watch.look(GateMode.IDLE)
        hour = watch.status().hour
        assert hour is not None and hour.shown_in_a_day is not None
        return hour.shown_in_a_day

    rests_on_all = forecast()
    for number in range(now - NUM_SLICES, now):
        writer.add_slice(SliceTime(number=number, is_closed=False, seconds=0.0, predicted_s=0.0, fixed_s=0.0))
    kept_s = NUM_SLICES / 10
    assert forecast() / rests_on_all == pytest.approx((kept_s / 3000) ** 0.5, rel=0.1)


def test_an_slo_that_serving_alone_misses_is_told_with_the_numbers(
    board: Words, writer: HarmRecords, caplog: pytest.LogCaptureFixture
) -> None:
    RolloutSide(board)
    watch = watch_of(board, writer, slo_ttft_ms=50)
    watch._hour_began_s -= 60
    record_minute(writer, slowdown=0.05)
    with caplog.at_level(logging.WARNING, logger="rose"):
        for _ in range(2 * LOOKS_PER_HOURLY):
            watch.look(GateMode.IDLE)
    problem = watch.status().slo_problem
    assert problem is not None and "above slo_ttft_ms of 50, and rollouts are not the reason" in problem
    assert caplog.messages.count(problem) == 1
    below = watch_of(board, writer, slo_tpot_ms=5, floors_s=(0.01, 0.02)).status().slo_problem
    assert below is not None and "slo_tpot_ms is 5, but one decoded token takes up to 20.0 ms" in below


def test_a_bound_below_the_noise_of_this_traffic_is_told_once(
    board: Words, writer: HarmRecords, caplog: pytest.LogCaptureFixture
) -> None:
    RolloutSide(board)
    watch = watch_of(board, writer, 1e-4)
    watch._hour_began_s = time.monotonic() - 4 * HOUR_S / 5
    noise = random.Random(0)
    record_minute(writer, slowdown=0.0)
    first = slice_number(time.monotonic()) - 2000
    for number in range(first, first + 1800):
        seconds = 0.1 * noise.lognormvariate(0, 0.3)
        writer.add_slice(
            SliceTime(
                number=number,
                is_closed=(number - first) % 20 == 0,
                seconds=seconds,
                predicted_s=0.1,
                fixed_s=0.09,
            )
        )
    with caplog.at_level(logging.WARNING, logger="rose"):
        for _ in range(2 * LOOKS_PER_HOURLY):
            watch.look(GateMode.IDLE)
    (told,) = caplog.messages
    assert "allow_harm is 0.0001, and a day of this traffic shows a difference of" in told
    hour = watch.status().hour
    assert hour is not None and hour.shown_in_a_day is not None and hour.shown_in_a_day > 1e-4


def test_only_one_of_several_api_servers_closes_slices(board: Words, writer: HarmRecords) -> None:
    RolloutSide(board)
    record_minute(writer, slowdown=0.0)
    first, second = (watch_of(board, writer, allowed) for allowed in (0.02, 1e-4))
    first.look(GateMode.IDLE)
    for _ in range(3):
        second.look(GateMode.IDLE)
    assert closed_slices(board).share == MEASURING_SHARE


def test_records_come_back_as_they_were_written_and_the_oldest_are_dropped(writer: HarmRecords) -> None:
    for number in range(NUM_SLICES + 5):
        writer.add_slice(SliceTime(number=number, is_closed=number % 2 == 0, seconds=0.5, predicted_s=0.25))
    records = reader(writer)
    found = records.slices()
    assert found[-1].number == NUM_SLICES + 4 and found[0].number in (5, 6)
    assert found[-1] == SliceTime(
        number=NUM_SLICES + 4, is_closed=True, seconds=0.5, predicted_s=0.25, fixed_s=0.0
    )
    writer.add_slice(SliceTime(number=-1, is_closed=False))
    again = records.slices()
    assert again[:-1] == found[-NUM_SLICES + 1 :] and again[-1].number == -1
    assert records.slices() == again
