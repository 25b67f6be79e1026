"""The GPU kit is packed, and runs without a GPU: every part, on the stand-in driver."""

import json
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from gpu import bundle

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
    (engines,) = [part for part in found["parts"] if part["part"] == "engines"]
    assert engines["reason"] in ("", "vllm not installed")  # else it names figures that miss their targets
    assert ("slab_moves" in values) is (engines["status"] == "passed")


def test_the_bundle_has_the_plugins_of_pytest_that_the_tests_need() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {each.partition(">=")[0] for each in extras["dev"] if each.startswith("pytest")}
    assert names - {"pytest-xdist"} <= set(bundle.TESTING)


@pytest.mark.slow
def test_the_bundle_has_the_wheels_and_little_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheels come from a folder in place of the package index. There they take about 50 MiB."""
    index, folder = tmp_path / "index", tmp_path / "kit"
    index.mkdir()
    with zipfile.ZipFile(index / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    bundle._download(["tiny==1.0"], "3.12", folder / "wheels")
    for name in ("requirements.txt", "COMMIT"):
        (folder / name).write_text(name)
    packed = tmp_path / "kit.tar.gz"
    bundle._pack(packed, folder, is_own_python=True)
    with tarfile.open(packed) as found:
        names = set(found.getnames())
    wanted = {"wheels/tiny-1.0-py3-none-any.whl", "requirements.txt", "COMMIT", "benchmarks/gpu/install.sh"}
    assert wanted <= names and not any(name.startswith("pip") for name in names)
    assert packed.stat().st_size < bundle.LARGEST_BYTES - (50 << 20)
