"""The GPU kit runs without a GPU: every part, on the stand-in driver."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_part_runs_on_the_stand_in_driver_and_says_what_it_found(tmp_path: Path) -> None:
    report = tmp_path / "kit.json"
    command = [sys.executable, str(ROOT / "benchmarks/gpu/run.py"), "--dry-run", "--json", str(report)]
    done = subprocess.run(command, check=False, text=True, capture_output=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads(report.read_text())
    outcomes = {part["part"]: part["status"] for part in found["parts"]}
    assert set(outcomes.values()) <= {"passed", "skipped"}
    assert all(part["reason"] for part in found["parts"] if part["status"] == "skipped")
    values = {figure["name"]: figure["value"] for figure in found["figures"]}
    exact = [name for name in values if name.startswith(("poison_differing", "alias_wrong", "offset_wrong"))]
    assert exact and all(values[name] == 0 for name in (*exact, "contract_failed_tests"))
    assert values["poison_nan_share"] == 1
