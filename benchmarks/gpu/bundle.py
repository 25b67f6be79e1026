"""Packs the GPU kit for a machine without network: the repository, its extensions, and the wheels it needs.

The machine has torch and its CUDA libraries; the bundle makes an environment beside them, in 60 MiB or less.

    python benchmarks/gpu/bundle.py --python 3.12 --torch 2.11+cu130

On the machine:

    mkdir kit && cd kit && tar xf ../rose-gpu-kit.tar.gz
    sh benchmarks/gpu/install.sh && venv/bin/python benchmarks/gpu/run.py --json gpu.json
"""

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LARGEST_BYTES = 60 << 20
TESTING = (
    *("pytest", "pytest-asyncio", "pytest-rerunfailures", "pytest-timeout", "hypothesis"),
    *("pybind11", "setuptools>=77"),
)
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=own, help=f"the machine's Python (default: {own})")
    parser.add_argument("--torch", default="2.11+cu130", help="the machine's torch (default: 2.11+cu130)")
    parser.add_argument("--output", type=Path, default=ROOT / "dist" / "rose-gpu-kit.tar.gz")
    arguments = parser.parse_args()
    cuda = re.search(r"\+cu(\d+)(\d)$", arguments.torch)
    if re.fullmatch(r"3\.1[1-3]", arguments.python) is None:
        parser.error(f"--python {arguments.python}: must be 3.11, 3.12 or 3.13")
    if cuda is None:
        parser.error(f"--torch {arguments.torch}: must name its CUDA version, as in 2.11+cu130")
    requirements = [*_dependencies(), *TESTING, f"cuda-bindings=={cuda[1]}.{cuda[2]}.*"]
    with tempfile.TemporaryDirectory(prefix="rose-kit-") as name:
        folder = Path(name)
        _download(requirements, arguments.python, folder / "wheels")
        (folder / "requirements.txt").write_text("\n".join(requirements) + "\n")
        (folder / "COMMIT").write_text(_git("rev-parse", "--short=12", "HEAD"))
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        _pack(arguments.output, folder, is_own_python=arguments.python == own)
    num_bytes = arguments.output.stat().st_size
    print(f"{arguments.output}: {num_bytes / (1 << 20):.1f} MiB")
    if num_bytes > LARGEST_BYTES:
        print(f"bundle: larger than {LARGEST_BYTES >> 20} MiB", file=sys.stderr)
        return 1
    return 0


def _dependencies() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [str(each) for each in project["dependencies"]]


def _download(requirements: list[str], python: str, folder: Path) -> None:
    # uv makes environments without pip, and downloads no wheels for another Python.
    venv.create(folder.with_name("pip"), with_pip=True)
    command = [str(folder.with_name("pip") / "bin" / "python"), "-m", "pip", "download"]
    command += ["-q", "--only-binary=:all:", "--dest", str(folder)]
    command += ["--python-version", python, *(f"--platform={platform}" for platform in PLATFORMS)]
    subprocess.run([*command, *requirements], check=True)


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, text=True, capture_output=True)
    return done.stdout


def _pack(output: Path, folder: Path, *, is_own_python: bool) -> None:
    """Packs what git tracks, without kept results and the site's pages, and what was made in ``folder``."""
    files = [
        each for each in _git("ls-files").splitlines() if not each.startswith((".ci/", "benchmarks/results/"))
    ]
    if is_own_python:
        files += [str(path.relative_to(ROOT)) for path in (ROOT / "rose").glob("_*.so")]
    with tarfile.open(output, "w:gz") as bundle:
        for file in files:
            if (ROOT / file).is_symlink() or (ROOT / file).exists():
                bundle.add(ROOT / file, file)
        for name in ("wheels", "requirements.txt", "COMMIT"):
            bundle.add(folder / name, name)


if __name__ == "__main__":
    sys.exit(main())
