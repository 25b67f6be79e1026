"""What `make wheels` packs: a wheel, built from the source distribution, works outside of the checkout."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PACKED = {
    "rose": "rose",
    "scheduler": "rose/scheduler",
    "transfer": "rose/transfer",
    "benchmarks/measure": "rose/measure",
}
"""Where the sources' folders lie in a wheel."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of an unpacked wheel that was built from an unpacked source distribution."""
    folder = tmp_path_factory.mktemp("package")
    _build("build_sdist", ROOT, folder)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    _build("build_wheel", next(each for each in folder.iterdir() if each.is_dir()), folder)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def _build(what: str, source: Path, target: Path) -> None:
    compiler = target / "fast-compiler"
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')  # optimizing takes most of the build's time
    compiler.chmod(0o755)
    code = f"import sys, setuptools.build_meta as b; b.{what}(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(target)],
        cwd=source,
        env={**os.environ, "CC": str(compiler), "CXX": str(compiler)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_wheel_has_every_module_and_every_file_beside_them(installed: Path) -> None:
    missing = [
        path
        for source, packed in PACKED.items()
        for path in (ROOT / source).rglob("*")
        if path.is_file()
        and path.suffix not in (".so", ".pyc")
        and not (installed / packed / path.relative_to(ROOT / source)).exists()
    ]
    assert missing == []


def test_commands_run_from_a_wheel(installed: Path, tmp_path: Path) -> None:
    program = (
        "import rose, rose._delta, rose._shm, rose._vmm, rose.cli; print(rose.__file__); "
        "rose.cli.main(['--version'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == str(installed / "rose" / "__init__.py")
