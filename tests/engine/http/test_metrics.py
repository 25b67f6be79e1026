"""What Prometheus reads: the status page and the board, under stable names."""

import time

import pytest

pytest.importorskip("prometheus_client", reason="comes with vllm")

from prometheus_client import CollectorRegistry, generate_latest

from rose._shm import Words
from rose.admission.board import NUM_WORDS
from rose.admission.gate import GateReason, ServingView
from rose.admission.rollout_side import RolloutSide
from rose.admission.serving_side import ServingSide
from rose.engine.http.metrics import RoseCollector
from rose.messages import GateStatus, WorkerStatus
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
)


def scrape(words: Words | None) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(RoseCollector(lambda: STATUS, words))
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_an_engine_without_a_pool_shows_the_numbers_of_its_status() -> None:
    found = scrape(None)
    assert found['rose_generated_tokens_total{engine_id="e",role="serving"}'] == 11
    assert found['rose_kv_slabs_budget{engine_id="e",role="serving"}'] == 9
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
