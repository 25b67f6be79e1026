"""An SLO that serving alone misses: refused with the engine's arguments, or told when steps show it."""

import logging
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from lone_schedulers import POOL, lone_scheduler, pooled_scheduler
from made_profiles import made_steps, store_profile

from rose.config import Settings
from rose.engine.scheduling.recorder import profile_key
from rose.engine.status import Field
from rose.errors import ConfigError
from rose.memory.daemon.daemon import start_daemon
from rose.types import Role

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def _profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "cache"))


def test_an_slo_below_the_profile_ends_the_start_before_any_process_does(
    runtime_dir: Path, tmp_path: Path
) -> None:
    with pooled_scheduler(tmp_path, Role.SERVING, slo_tpot_ms=5) as scheduler:
        store_profile(profile_key(scheduler.vllm_config), Settings.from_environment().profile_dir)
    with (
        start_daemon(POOL, num_slabs=8, slab_bytes=1 << 20, headroom_slabs=1),
        pytest.raises(
            ConfigError, match=r"slo_tpot_ms is 5, but one decoded token takes up to 1\d\.\d ms"
        ) as e,
        lone_scheduler(tmp_path, Role.SERVING, pool=POOL, slo_tpot_ms=5),
    ):
        pass
    assert any(entry.name == "check_config" for entry in e.traceback)
    # A rollout engine and one without a pool keep no SLO.
    with lone_scheduler(tmp_path, Role.SERVING, slo_tpot_ms=5):
        pass


def test_without_a_profile_the_first_fit_of_its_own_steps_tells(
    runtime_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        pooled_scheduler(tmp_path, Role.SERVING, slo_tpot_ms=5) as scheduler,
        caplog.at_level(logging.ERROR, logger="rose"),
    ):
        caplog.clear()
        scheduler._tell_floors()
        assert scheduler.page.get(Field.TPOT_FLOOR_US) == 0 and not caplog.messages
        for step in made_steps(200):
            scheduler.recorder._online.observe(step)
        for _ in range(2):
            scheduler._tell_floors()
        # Without the doubled caution of a fit on steps that happened to come.
        assert 10_000 < scheduler.page.get(Field.TPOT_FLOOR_US) < 16_000
        (told,) = caplog.messages
        assert "serving can't reach its SLO, with rollouts or without: slo_tpot_ms is 5, but one" in told
