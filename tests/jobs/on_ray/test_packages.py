"""A job's `runtime_env` brings packages that no host has, from a wheel and without a network.

Ray installs them with the pip of the environment that its nodes run in, into a copy of that environment. The
environment of these tests was made by uv and has no pip, so the nodes run in a small one that has.
"""

import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lib.cluster.ray_rig import RayRig

from tests.jobs.on_ray.ray_rig import JOB, OnRay

PROGRAM = f"""
import runpy, probe_reward
print("reward", probe_reward.VERSION, "from", probe_reward.__file__, flush=True)
runpy.run_path({str(JOB)!r}, run_name="__main__")
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnRay]:
    """On Ray nodes that run in an environment with pip, which finds all other packages by a `.pth` file."""
    folder = tmp_path_factory.mktemp("packages")
    home = folder / "env"
    subprocess.run(
        [sys.executable, "-m", "virtualenv", "--no-download", "--quiet", str(home)], check=True, timeout=300
    )
    python = home / "bin" / "python"
    [site] = home.glob("lib/python3*/site-packages")
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(python))  # Ray starts its nodes with it
        rig = RayRig(folder / "run", num_workers=1)
    try:
        with OnRay(folder, rig.address) as served:
            yield served
    finally:
        rig.cluster.shutdown()


def wheel(folder: Path, version: str) -> None:
    """Makes the smallest wheel, of a package that is nowhere else."""
    folder.mkdir(exist_ok=True)
    info = f"probe_reward-{version}.dist-info"
    files = {
        "probe_reward.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: probe-reward\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / f"probe_reward-{version}-py3-none-any.whl", "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)


def job(served: OnRay, version: str) -> dict[str, Any]:
    """A job whose program imports the package."""
    code = served.folder / "code"
    code.mkdir(exist_ok=True)
    (code / "train.py").write_text(PROGRAM)
    pip = {
        "packages": [f"probe-reward=={version}"],
        "pip_install_options": ["--no-index", "--find-links", str(served.folder / "wheels")],
    }
    return {
        "command": ["python", "train.py", str(served.folder)],
        "runtime_env": {"working_dir": str(code), "pip": pip},
        "placement": "pack",
    }


@pytest.mark.slow
def test_each_rank_imports_a_package_that_its_job_alone_has_installed(served: OnRay) -> None:
    for name, version in (("a", "1.0.7"), ("b", "2.1")):
        wheel(served.folder / "wheels", version)
        assert served.submit(name, **job(served, version)).error is None
        assert served.wait_state(name, "done")["iterations"] == [5, 5], served.command("logs", name).stdout
        logs = served.command("logs", name).stdout
        found = [line for line in logs.splitlines() if f"reward {version} from " in line]
        assert len(found) == 2, logs
        assert all("/runtime_resources/pip/" in line for line in found), "Ray's copy of the environment"


@pytest.mark.slow
def test_a_job_whose_package_is_in_no_folder_fails_with_pips_words(served: OnRay) -> None:
    wheel(served.folder / "wheels", "1.0.7")
    assert served.submit("missing", **job(served, "9.9")).error is None
    note = served.wait_state("missing", "failed")["note"]
    assert "runtime_env can't be prepared" in note and "probe-reward==9.9" in note
