"""What an operator may write under ``rose`` in --additional-config, and what a typo answers."""

from typing import Any

import pytest

from rose.engine.hooks.compatibility import resolve_deployment
from rose.engine.settings import EngineSettings
from rose.errors import ConfigError
from rose.types import Deployment, GateMode, Role


def test_an_engine_without_the_rose_key_is_left_alone() -> None:
    assert EngineSettings.parse({}) is None
    assert EngineSettings.parse({"other_plugin": {"role": "x"}}) is None


def test_defaults_follow_the_role_and_an_engine_is_named_by_role_and_pid() -> None:
    settings = EngineSettings.parse({"rose": {"role": "rollout"}})
    assert settings is not None
    assert (settings.role, settings.pool, settings.gate_mode) == (Role.ROLLOUT, None, GateMode.DUAL)
    assert EngineSettings(role=Role.SERVING).gate_mode is GateMode.IDLE
    assert EngineSettings(role=Role.SERVING, spend_slo=0.5).gate_mode is GateMode.DUAL
    assert settings.named(42).engine_id == "rollout-42"
    named = EngineSettings(role=Role.SERVING, engine_id="chat")
    assert named.named(42).engine_id == "chat"


def test_each_data_parallel_rank_has_a_pool_and_a_name_of_its_own() -> None:
    settings = EngineSettings(role=Role.SERVING, engine_id="chat", pool="gpu")
    ranks = [settings.of_rank(rank) for rank in range(3)]
    assert [rank.pool for rank in ranks] == ["gpu", "gpu-1", "gpu-2"]
    assert [rank.engine_id for rank in ranks] == ["chat", "chat-1", "chat-2"]
    assert EngineSettings(role=Role.ROLLOUT).of_rank(1).pool is None


def test_settings_survive_vllms_config() -> None:
    """patches.py writes them back as JSON for the engine core and the worker to parse."""
    settings = EngineSettings(role=Role.SERVING, pool="gpu0", allow_harm=0.05, max_step_ms=40)
    assert EngineSettings.parse({"rose": settings.model_dump(mode="json")}) == settings


def test_milliseconds_stay_at_the_edge() -> None:
    settings = EngineSettings(
        role=Role.SERVING, slo_ttft_ms=250, slo_tpot_ms=80, spend_slo=0.5, itl_cap_ms=90, max_step_ms=30
    )
    assert (settings.slo().ttft_s, settings.slo().tpot_s) == (0.25, 0.08)
    gate = settings.gate_settings(GateMode.TPOT_ONLY)
    assert (gate.mode, gate.tpot_target_for(0.01)) == (GateMode.TPOT_ONLY, 0.04)
    assert gate.itl_cap_for(0.04) == 0.09
    assert gate.effective_max_step_s == 0.03
    assert settings.gate_settings(GateMode.DUAL, 60).tpot_target_for(0.01) == 0.06


@pytest.mark.parametrize(
    ("rose", "message"),
    [
        ("serving", "--additional-config: 'rose' must be an object, got 'serving'"),
        ({}, "--additional-config: 'rose.role': Field required (got {})"),
        (
            {"role": "serving", "lease": 3},
            "--additional-config: unknown key 'rose.lease'; did you mean 'lease_s'?",
        ),
        ({"role": "serving", "zzz": 3}, "--additional-config: unknown key 'rose.zzz'"),
        ({"role": "trainer"}, "'rose.role': Input should be 'serving' or 'rollout' (got 'trainer')"),
        ({"role": "serving", "stall_s": 0}, "'rose.stall_s': Input should be greater than 0 (got 0)"),
        ({"role": "serving", "high_watermark": 1.5}, "'rose.high_watermark'"),
        (
            {"role": "serving", "spend_slo": 0.5, "gate": "idle"},
            "--additional-config: 'rose': spend_slo with gate idle: only the dual gate spends slack",
        ),
        (
            {"role": "rollout", "spend_slo": 0.5},
            "--additional-config: 'rose': spend_slo: the serving engine says what rollouts may spend",
        ),
        (
            {"role": "serving", "spend_slo": 1.2},
            "--additional-config: 'rose.spend_slo': Input should be less than or equal to 0.95 (got 1.2)",
        ),
        ({"role": "serving", "gate": "both"}, "'rose.gate': Input should be 'dual', 'ttft-only'"),
        (
            {"role": "serving", "deployment": "both"},
            "'rose.deployment': Input should be 'collocated', 'prefill' or 'decode' (got 'both')",
        ),
        (
            {"role": "rollout", "deployment": "decode"},
            "'rose': deployment decode: a rollout engine computes both phases wherever it runs",
        ),
        (
            {"role": "serving", "deployment": "prefill", "gate": "tpot-only"},
            "'rose': gate tpot-only: a prefiller makes no tokens that could be late; use dual or ttft-only",
        ),
        (
            {"role": "serving", "lend_idle_s": 30},
            "'rose': lend_idle_s: only a serving engine with a pool has anything to lend",
        ),
        (
            {"role": "rollout", "pool": "gpu0", "lend_idle_s": 30},
            "'rose': lend_idle_s: only a serving engine with a pool has anything to lend",
        ),
        (
            {"role": "rollout", "pool": "gpu0", "floor_slabs": 30},
            "'rose': floor_slabs: only a serving engine with a pool keeps slabs from rollouts",
        ),
        (
            {"role": "serving", "pool": "gpu0", "floor_slabs": -1},
            "rose.floor_slabs': Input should be greater",
        ),
    ],
)
def test_a_bad_value_gives_one_line_with_key_and_fix(rose: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineSettings.parse({"rose": rose})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def kv_transfer(kv_role: str | None) -> Any:
    """vLLM's own configuration; None: no connector."""
    config = pytest.importorskip("vllm.config", reason="vllm is not installed")
    return None if kv_role is None else config.KVTransferConfig(kv_connector="AnyConnector", kv_role=kv_role)


@pytest.mark.parametrize(
    ("given", "kv_role", "expected"),
    [
        (None, None, Deployment.COLLOCATED),
        (None, "kv_both", Deployment.COLLOCATED),
        (None, "kv_producer", Deployment.PREFILL),
        (None, "kv_consumer", Deployment.DECODE),
        (Deployment.DECODE, "kv_consumer", Deployment.DECODE),
        (Deployment.PREFILL, "kv_both", Deployment.PREFILL),
        (Deployment.DECODE, "kv_both", Deployment.DECODE),
        (Deployment.COLLOCATED, "kv_producer", Deployment.COLLOCATED),
    ],
)
def test_the_deployment_follows_the_connector_unless_it_is_set(
    given: Deployment | None, kv_role: str | None, expected: Deployment
) -> None:
    settings = EngineSettings(role=Role.SERVING, deployment=given)
    resolved = resolve_deployment(settings, kv_transfer(kv_role))
    assert resolved.deployment is expected
    assert resolved.gate_settings(GateMode.DUAL).deployment is expected


@pytest.mark.parametrize(
    ("settings", "kv_role", "message"),
    [
        (
            {"role": "serving", "deployment": "decode"},
            None,
            "'rose.deployment' is decode, but nothing carries KV between prefiller and decoder; "
            "set --kv-transfer-config",
        ),
        (
            {"role": "serving", "deployment": "prefill"},
            "kv_consumer",
            "is prefill, but --kv-transfer-config has kv_role kv_consumer, which says decode; drop one",
        ),
        (
            {"role": "serving", "gate": "ttft-only"},
            "kv_consumer",
            "'rose': gate ttft-only: a decoder has no prompts that could be late; use dual or tpot-only",
        ),
        (
            {"role": "rollout"},
            "kv_producer",
            "--kv-transfer-config kv_role kv_producer: a rollout engine always computes both phases",
        ),
        (
            {"role": "rollout", "pool": "gpu0"},
            "kv_consumer",
            "--kv-transfer-config kv_role kv_consumer: a rollout engine always computes both phases",
        ),
    ],
)
def test_a_deployment_that_cannot_work_is_refused(
    settings: dict[str, Any], kv_role: str | None, message: str
) -> None:
    parsed = EngineSettings.model_validate(settings)
    with pytest.raises(ConfigError) as error:
        resolve_deployment(parsed, kv_transfer(kv_role))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_dedicated_rollout_engine_may_use_a_connector_as_a_cache() -> None:
    settings = EngineSettings(role=Role.ROLLOUT)
    assert resolve_deployment(settings, kv_transfer("kv_both")) is settings


def test_the_gate_of_a_running_engine_keeps_to_its_deployment() -> None:
    settings = EngineSettings(role=Role.SERVING).deployed(Deployment.DECODE)
    assert settings.gate_problem(GateMode.DUAL, 40) is None
    problem = settings.gate_problem(GateMode.TTFT_ONLY, None)
    assert problem is not None and "a decoder has no prompts" in problem


def test_a_bound_below_the_noise_of_any_traffic_is_refused() -> None:
    message = "allow_harm is 1e-06, and no traffic can show so small a difference"
    with pytest.raises(ConfigError, match=message):
        EngineSettings.parse({"rose": {"role": "serving", "pool": "p", "allow_harm": 1e-6}})
