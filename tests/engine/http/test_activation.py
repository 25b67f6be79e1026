"""A rollout engine's weights and KV leave the GPU between rollout phases, and come back the same."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from probes import prompt
from real_engine import RealEngine, until
from references import ModelDirs
from shared_gpu import SharedGpu
from tiny_models import SLAB_BYTES, make_heavy_model, staged_update
from weight_probes import probe, update

from rose.types import Role, StopReason

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

NUM_SEQS = 12


@pytest.fixture(scope="module")
def heavy_models(engines_dir: Path) -> list[Path]:
    return [make_heavy_model(engines_dir / f"heavy-{version}", version=version) for version in range(2)]


@pytest.fixture(scope="module")
def _heavy(engines_dir: Path, heavy_models: list[Path]) -> Iterator[RealEngine]:
    """A dedicated rollout engine with weights that show in its memory."""
    engine = RealEngine(heavy_models[0], Role.ROLLOUT, engines_dir)
    try:
        yield engine.wait_ready()
    finally:
        engine.stop()


@pytest.fixture
def heavy(_heavy: RealEngine) -> Iterator[RealEngine]:
    """Active and without a cache. It is brought there after each test: its very first pause is tested too."""
    yield _heavy
    _heavy.begin_anew()


@pytest.fixture
def active(rollout: RealEngine) -> Iterator[RealEngine]:
    """The shared rollout engine, active and without a cache for whoever comes next."""
    yield rollout
    rollout.begin_anew()


def anonymous_bytes(engine: RealEngine) -> int:
    status = engine.status()
    return status.device_weights_bytes + status.device_fixed_bytes


def test_requests_end_with_their_tokens_and_every_slab_goes_back(gpu: SharedGpu, active: RealEngine) -> None:
    before = active.status()
    requests = active.start_requests([prompt(f"off-{i}", 200) for i in range(NUM_SEQS)], max_tokens=700)

    def are_all_under_way() -> bool:
        """One that is still on its way to the engine when this is told to stop is refused."""
        status = active.status()
        has_tokens = status.generated_tokens > before.generated_tokens + 5 * NUM_SEQS
        return has_tokens and status.num_running + status.num_waiting == NUM_SEQS

    until(are_all_under_way, "tokens")
    started = time.monotonic()
    change = active.deactivate()
    assert not change.is_active
    assert 0 < change.took_s <= time.monotonic() - started
    answers = [request.result() for request in requests]
    assert {answer.finish_reason for answer in answers} == {"abort"}
    assert {answer.stop_reason for answer in answers} == {StopReason.DEACTIVATED}
    assert sum(len(answer.tokens) for answer in answers) >= 5 * NUM_SEQS
    # The slab under the padding block is all that stays.
    assert gpu.ledger.num_held(Role.ROLLOUT) == 1
    assert gpu.ledger.num_draining == 0
    status = active.status()
    assert (status.is_active, status.num_running, status.num_waiting) == (False, 0, 0)
    assert (status.device_weights_bytes, status.device_kv_bytes) == (0, SLAB_BYTES)
    # What was cut goes on from its tokens, as the router lets it.
    active.activate()
    cut = answers[0].tokens
    rest = active.complete(prompt("off-0", 200) + cut, 30)
    assert rest.tokens == active.complete(prompt("off-0", 200), len(cut) + 30).tokens[len(cut) :]


def test_an_engine_answers_with_the_same_bits_after_a_pause(
    gpu: SharedGpu, active: RealEngine, models: ModelDirs
) -> None:
    before = probe(active)
    active.deactivate()
    active.activate()
    assert probe(active) == before
    update(active, models.untied[2], 2)
    updated = probe(active)
    assert updated != before
    active.deactivate()
    assert active.status().weight_version == "test/2"
    active.activate()
    assert probe(active) == updated
    update(active, models.untied[0], 0)


def test_an_inactive_engine_refuses_turns_at_once_and_both_commands_may_be_repeated(
    gpu: SharedGpu, active: RealEngine
) -> None:
    active.deactivate()
    assert active.deactivate().took_s == 0
    with pytest.raises(httpx.HTTPStatusError) as refused:
        active.complete(prompt("refused", 20), 4)
    assert refused.value.response.status_code == 503
    assert "inactive" in refused.value.response.json()["error"]["message"]
    assert active.post("profile", {}).status_code == 409
    gpu.begin_rl_step()
    since = active.status().activated_at_s
    assert active.activate().is_active
    assert active.status().activated_at_s > since
    assert active.activate().took_s == 0
    assert active.complete(prompt("refused", 20), 4).finish_reason == "length"


@pytest.mark.parametrize("route", ["activate", "deactivate"])
def test_a_serving_engine_refuses_to_be_activated_or_deactivated(serving: RealEngine, route: str) -> None:
    refused = serving.post(route, {})
    assert refused.status_code == 409
    assert "a serving engine is always active" in refused.text
    assert serving.status().is_active


def test_an_engine_without_a_pool_refuses_a_share_of_memory(heavy: RealEngine) -> None:
    refused = heavy.post("memory_share", {"share": 0.5})
    assert refused.status_code == 409
    assert "in no pool, and its memory is its own; start it with --pool" in refused.text
    assert heavy.post("memory_share", {"share": 1.0}).status_code == 200
    assert heavy.post("memory_share", {"share": 0.0}).status_code == 400


def test_memory_of_the_weights_is_given_back_and_taken_again(heavy: RealEngine) -> None:
    weights = heavy.status().device_weights_bytes
    assert weights > 50 << 20
    answers = probe(heavy)
    before = anonymous_bytes(heavy)
    for _ in range(2):
        heavy.deactivate()
        assert heavy.status().device_weights_bytes == 0
        idle = anonymous_bytes(heavy)
        assert idle < before - 0.9 * weights
        heavy.activate()
        assert heavy.status().device_weights_bytes == weights
        assert abs(anonymous_bytes(heavy) - idle - weights) < 0.2 * weights
    assert probe(heavy) == answers


def test_an_update_of_an_inactive_engine_counts_when_it_is_activated(
    heavy: RealEngine, heavy_models: list[Path], tmp_path: Path
) -> None:
    update(heavy, heavy_models[1], 1)
    answers = probe(heavy)
    update(heavy, heavy_models[0], 2)
    heavy.deactivate()
    idle = anonymous_bytes(heavy)
    staged = Path(shutil.copytree(heavy_models[1], tmp_path / "staged"))
    wrong = staged_update(staged, "test/3").model_copy(
        update={"state_hash": staged_update(heavy_models[0], "test/3").state_hash}
    )
    refused = heavy.update_weights(wrong)
    assert refused.status_code == 500 and "state hash" in refused.text
    assert heavy.status().weight_version == "test/2"
    update(heavy, staged, 3)
    status = heavy.status()
    assert not status.is_active and status.device_weights_bytes == 0
    assert anonymous_bytes(heavy) < idle + (20 << 20)
    # As the subscriber does once it has staged the next version.
    shutil.rmtree(staged)
    heavy.activate()
    assert probe(heavy) == answers
