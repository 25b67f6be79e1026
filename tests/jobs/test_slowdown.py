"""`rose sched slowdown` on real processes."""

import os
from pathlib import Path

import pytest

from rose.config import load_yaml
from rose.errors import ConfigError
from rose.jobs.slowdown import main
from rose.scheduler.gpu.slowdown import Share
from rose.scheduler.gpu.substages import SubStageKind
from rose.scheduler.sim.gpu_spec import SlowdownFile

pytest.importorskip("torch")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core can't be split")
@pytest.mark.slow
def test_pairs_are_measured_and_the_file_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "slowdown.json"
    assert main(["-o", str(path), "--seconds", "0.05", "--kinds", SubStageKind.ROLLOUT_SMALL.value]) == 0
    table = load_yaml(path, SlowdownFile).to_table()
    assert table.hardware.endswith("cores")
    half = Share(compute=0.5, memory=0.5)
    assert table.slowdown(SubStageKind.ROLLOUT_SMALL, SubStageKind.ROLLOUT_SMALL, half) is not None
    assert table.slowdown(SubStageKind.ROLLOUT_SMALL, SubStageKind.TRAIN, half) is None


def test_bad_input_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "slowdown.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="exists; remove it"):
        main(["-o", str(path)])
    with pytest.raises(ConfigError, match=r"there is no folder .*none; make it"):
        main(["-o", str(tmp_path / "none" / "slowdown.json"), "--seconds", "0.001"])
    with pytest.raises(SystemExit):
        main(["-o", str(tmp_path / "other.json"), "--seconds", "0"])
