"""What an operator may write under ``rose`` in --additional-config, and what a typo answers."""

from typing import Any

import pytest

from rose.engine.settings import EngineSettings
from rose.errors import ConfigError
from rose.types import GateMode, Role


def test_an_engine_without_the_rose_key_is_left_alone() -> None:
    assert EngineSettings.parse({}) is None
    assert EngineSettings.parse({"other_plugin": {"role": "x"}}) is None


def test_defaults_and_names() -> None:
    settings = EngineSettings.parse({"rose": {"role": "rollout"}})
    assert settings is not None
    assert (settings.role, settings.pool, settings.gate) == (Role.ROLLOUT, None, GateMode.DUAL)
    assert settings.named(42).engine_id == "rollout-42"
    named = EngineSettings(role=Role.SERVING, engine_id="chat")
    assert named.named(42).engine_id == "chat"


def test_settings_survive_vllms_config() -> None:
    """patches.py writes them back as JSON for the engine core and the worker to parse."""
    settings = EngineSettings(role=Role.SERVING, pool="gpu0", gate=GateMode.IDLE, tpot_target_ms=40)
    assert EngineSettings.parse({"rose": settings.model_dump(mode="json")}) == settings


def test_milliseconds_stay_at_the_edge() -> None:
    settings = EngineSettings(
        role=Role.SERVING, slo_ttft_ms=250, slo_tpot_ms=80, tpot_target_ms=40, itl_cap_ms=90
    )
    assert (settings.slo().ttft_s, settings.slo().tpot_s) == (0.25, 0.08)
    gate = settings.gate_settings(GateMode.TPOT_ONLY)
    assert (gate.mode, gate.tpot_target_for(0.01)) == (GateMode.TPOT_ONLY, 0.04)
    assert gate.itl_cap_for(0.04) == 0.09
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
            {"role": "serving", "slo_tpot_ms": 50, "tpot_target_ms": 60},
            "--additional-config: 'rose': tpot_target_ms is 60, above slo_tpot_ms of 50",
        ),
        ({"role": "serving", "gate": "both"}, "'rose.gate': Input should be 'dual', 'ttft-only'"),
    ],
)
def test_a_bad_value_gives_one_line_with_key_and_fix(rose: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineSettings.parse({"rose": rose})
    assert message in str(error.value)
    assert "\n" not in str(error.value)
