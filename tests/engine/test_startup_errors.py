"""Bad settings end an engine before it loads a model, with one line that says why."""

import json
from pathlib import Path

import pytest
from real_engine import READY_S, RealEngine
from references import ModelDirs

from rose.types import Role

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_bad_setting_or_a_missing_pool_ends_the_engine_with_one_clear_line(
    engines_dir: Path, models: ModelDirs
) -> None:
    typo = json.dumps({"rose": {"lease": 3}})
    cases = {
        "--additional-config: unknown key 'rose.lease'; did you mean 'lease_s'?": RealEngine(
            models.untied[0], Role.ROLLOUT, engines_dir, "--additional-config", typo
        ),
        "pool nobody has no daemon": RealEngine(models.untied[0], Role.ROLLOUT, engines_dir, pool="nobody"),
    }
    try:
        for message, engine in cases.items():
            assert engine.process.wait(READY_S) not in (0, None)
            lines = [line for line in engine.process.log_tail(200).splitlines() if message in line]
            assert lines, engine.process.log_tail()
            assert "Loading safetensors" not in engine.process.log_tail(200)
    finally:
        for engine in cases.values():
            engine.stop()
