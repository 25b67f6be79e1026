"""What Prometheus reads: the status page and the board, under stable names."""

import time

import pytest

pytest.importorskip("prometheus_client", reason="comes with vllm")

from prometheus_client import CollectorRegistry, generate_latest

from rose._shm import Words
from rose.admission import board
from rose.admission.board import NUM_WORDS
from rose.admission.gate import GateReason, ServingView
from rose.admission.rollout_side import RolloutSide
from rose.admission.serving_side import ServingSide, StepStart
from rose.engine.http.metrics import RoseCollector
from rose.messages import GateStatus, HarmEstimate, HarmHistory, HarmWindow, WorkerStatus
from rose.types import Deployment, GateMode, Role

STATUS = WorkerStatus(
    role=Role.SERVING,
    deployment=Deployment.DECODE,
    model="m",
    engine_id="e",
    weight_version=None,
    steps=7,
    num_running=1,
    num_waiting=0,
    kv_slabs_owned=3,
    kv_slabs_in_use=2,
    kv_slabs_budget=9,
    pool_slabs_quarantined=0,
    kv_cached_blocks=0,
    kv_live_blocks=0,
    pressure="normal",
    gate=GateStatus(mode=GateMode.DUAL, admitted_steps=0, declined_steps=0),
    stalled_requests=0,
    reclaimed_requests=0,
    leases_expired=0,
    cuts=0,
    generated_tokens=11,
    busy_s=1.5,
    is_active=True,
    activated_at_s=0.0,
    device_weights_bytes=0,
    device_kv_bytes=0,
    device_fixed_bytes=0,
    adapter_problems=["math/4: no room"],
)


def scrape(words: Words | None, harm: HarmHistory | None = None, slot: int = 0) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(RoseCollector(lambda: STATUS, lambda: harm, words, slot))
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_an_engine_without_a_pool_shows_the_numbers_of_its_status() -> None:
    found = scrape(None)
    assert found['rose_generated_tokens_total{engine_id="e",role="serving"}'] == 11
    assert found['rose_kv_slabs_budget{engine_id="e",role="serving"}'] == 9
    assert found['rose_adapter_problems{engine_id="e",role="serving"}'] == 1
    assert found['rose_deployment{deployment="decode",engine_id="e",role="serving"}'] == 1
    assert not any("slack" in name for name in found)


def test_an_engine_on_a_board_shows_the_boards_numbers() -> None:
    words = Words(bytearray(8 * NUM_WORDS))
    serving, rollout = ServingSide(words), RolloutSide(words)
    assert rollout.try_begin(time.monotonic() + 1.0, rollout.view())
    rollout.end_step(16)
    rollout.decline(rollout.view(), GateReason.NO_SLACK)
    serving.publish(
        ServingView(has_work=True, has_pending_prefill=False, latest_start_s=time.monotonic() + 100)
    )
    found = scrape(words)
    engine = 'engine_id="e"'
    assert 0 < found[f'rose_serving_slack_seconds{{{engine},role="serving"}}'] <= 100
    assert found[f'rose_gate_decisions_total{{{engine},reason="admitted",role="serving"}}'] == 1
    assert found[f'rose_gate_decisions_total{{{engine},reason="no_slack",role="serving"}}'] == 1
    assert found[f'rose_harvested_tokens_total{{{engine},role="serving"}}'] == 16
    assert found[f'rose_yields_total{{{engine},role="serving"}}'] == 0


def test_the_present_hours_latencies_are_shown_with_rollouts_and_without_by_tenant() -> None:
    window = HarmWindow(
        gate=GateMode.IDLE,
        ended_at_s=0,
        seconds=60,
        num_requests=100,
        requests_s=60,
        num_closed_slices=15,
        latencies={"ttft_p99": HarmEstimate(value=0.25, low=0.2, high=0.3)},
        with_rollouts_ms={"ttft_p99": 250},
        without_rollouts_ms={"ttft_p99": 200},
    )
    harm = HarmHistory(
        gate=GateMode.IDLE,
        allow_harm=0.02,
        is_bounded=True,
        closed_share=0.05,
        is_retreating=False,
        slo_problem="too slow",
        hours=[window.model_copy(update={"tenants": {"search": window}}), window],
    )
    found = scrape(None, harm)
    engine = 'engine_id="e",latency="ttft_p99"'
    for tenant in ("", "search"):
        labels = f'{engine},role="serving",rollouts="{{}}",tenant="{tenant}"'
        assert found[f"rose_latency_seconds{{{labels.format('with')}}}"] == 0.25
        assert found[f"rose_latency_seconds{{{labels.format('without')}}}"] == 0.2
    high = f'rose_harm{{bound="high",{engine},role="serving",tenant="search"}}'
    assert found[high] == 0.3
    assert found['rose_slo_missed_alone{engine_id="e",role="serving"}'] == 1


def test_of_two_serving_engines_on_a_gpu_one_shows_the_guests_and_each_its_own_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    identities = iter(range(1, 9))
    monkeypatch.setattr(board, "own_identity", lambda: next(identities))
    for module in ("board", "board_snapshot", "rollout_side", "serving_side"):
        monkeypatch.setattr(f"rose.admission.{module}.is_alive", bool)
    words = Words(bytearray(8 * NUM_WORDS))
    sides, guest = [ServingSide(words) for _ in range(2)], RolloutSide(words)
    assert guest.try_begin(time.monotonic() - 1.0, guest.view())
    assert sides[1].begin_step(grace_s=0.0) is StepStart.OVERRUN
    overruns, harvested = "rose_overruns_total", "rose_harvested_tokens_total"
    label = '{engine_id="e",role="serving"}'
    first, second = (scrape(words, slot=slot) for slot in (0, 1))
    assert (first[overruns + label], second[overruns + label]) == (0, 1)
    assert harvested + label in first and harvested + label not in second
