"""`rose doctor`: what is installed on this machine, what each part enables, and how to get what is missing.

The checks are independent, so that one broken part can't hide the others. The exit status is 0 exactly when
`rose demo` can run. Nothing is installed or changed.
"""

import importlib
import json
import os
import platform
import resource
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rose.arguments import CommandParser
from rose.engine.vllm_version import is_supported, supported_range
from rose.errors import install_hint
from rose.node.checks import GPU_DRIVER, installed_vllm

MIN_PYTHON = (3, 11)
MIN_SHM_BYTES = 64 * 1024 * 1024
"""vLLM's message queues between API server and engine core live in /dev/shm."""
MIN_OPEN_FILES = 1024
EXTENSIONS = ("rose._shm", "rose._vmm", "rose._delta")
TRAINER = ("torch", "trl", "gymnasium", "accelerate", "matplotlib")
REINSTALL = f"{install_hint('cpu')} (it needs g++ and Python's headers)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row: whether a part is there, what it is for, and how to get it."""

    name: str
    is_ok: bool
    detail: str
    enables: str
    fix: str = ""
    is_required: bool = False
    """Whether `rose demo` needs it."""
    is_optional: bool = False
    """Whether only some users need it."""


def main(argv: Sequence[str]) -> int:
    """Prints the findings; returns 1 if something that `rose demo` needs is missing."""
    arguments = _parser().parse_args(list(argv))
    findings = examine()
    can_run = all(finding.is_ok for finding in findings if finding.is_required)
    if arguments.json:
        rows = [asdict(finding) for finding in findings]
        print(json.dumps({"can_run_main_job": can_run, "findings": rows}, indent=2))
    else:
        _print(findings, can_run)
    return 0 if can_run else 1


def examine() -> list[Finding]:
    """Makes every check, in the order of the table."""
    checks: tuple[Callable[[], Finding], ...] = (
        _python,
        _platform,
        _extensions,
        _vllm,
        _torch,
        _gpu,
        _shared_memory,
        _open_files,
        _mooncake,
        _trainer,
        _ray,
        _redis,
    )
    return [check() for check in checks]


def _python() -> Finding:
    return Finding(
        name="Python",
        is_ok=sys.version_info >= MIN_PYTHON,
        detail=platform.python_version(),
        enables="everything",
        fix="install Python 3.11 or newer",
        is_required=True,
    )


def _platform() -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    return Finding(
        name="platform",
        is_ok=sys.platform == "linux",
        detail=f"{platform.system()} {platform.machine()}, {usable} CPUs usable",
        enables="memfd, futex and pidfd, which the pool is made of",
        fix="use Linux",
        is_required=True,
    )


def _extensions() -> Finding:
    broken = []
    for name in (*EXTENSIONS, "rose.transfer.format.codec"):  # which knows whether its extension is too old
        try:
            importlib.import_module(name)
        except ImportError as error:
            broken.append(f"{name}: {error}")
    return Finding(
        name="C++ extensions",
        is_ok=not broken,
        detail="; ".join(broken) or ", ".join(name.removeprefix("rose.") for name in EXTENSIONS),
        enables="the slab pool and the delta codec",
        fix=REINSTALL,
        is_required=True,
    )


def _vllm() -> Finding:
    installed = installed_vllm()
    return Finding(
        name="vLLM",
        is_ok=installed is not None and is_supported(installed[1]),
        detail=" ".join(installed) if installed is not None else "not installed",
        enables="engines",
        fix=f"versions {supported_range()}; {install_hint('cpu', 'cuda')}",
        is_required=True,
    )


def _torch() -> Finding:
    version = _version("torch")
    return Finding(
        name="PyTorch",
        is_ok=version is not None,
        detail=version or "not installed",
        enables="engines and the trainer",
        fix=f"comes with vLLM; {install_hint('cpu', 'cuda')}",
        is_required=True,
    )


def _gpu() -> Finding:
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*"))
    is_there = GPU_DRIVER.exists()
    return Finding(
        name="CUDA driver",
        is_ok=is_there,
        detail=f"{GPU_DRIVER.read_text().splitlines()[0]}; {len(gpus)} GPUs" if is_there else "none",
        enables="engines on GPUs (without one they run on the CPU)",
        fix=f"only for GPUs: install NVIDIA's driver; {install_hint('cuda')}",
        is_optional=True,
    )


def _shared_memory() -> Finding:
    path = Path("/dev/shm")
    free = shutil.disk_usage(path).free if path.is_dir() else 0
    return Finding(
        name="/dev/shm",
        is_ok=free >= MIN_SHM_BYTES,
        detail=f"{free // 2**20} MiB free",
        enables="vLLM's queues between its processes",
        fix="in a container: --shm-size=1g",
        is_required=True,
    )


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Finding(
        name="open files",
        is_ok=soft >= MIN_OPEN_FILES,
        detail=f"limit {soft} (hard {hard})",
        enables="memfds and sockets of many engines",
        fix=f"ulimit -n {MIN_OPEN_FILES}",
    )


def _mooncake() -> Finding:
    version = _version("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
    problem = "not installed" if version is None else _mooncake_problem()
    return Finding(
        name="Mooncake",
        is_ok=problem is None,
        detail=" ".join(part for part in (version, problem) if part),
        enables="the production weight relay; without it the embedded relay is used",
        fix=f"{install_hint('mooncake')}; sudo apt-get install -y "
        "libibverbs1 librdmacm1 libnuma1 libcurl4 liburing2 libnl-3-200",
    )


def _mooncake_problem() -> str | None:
    """Why its store can't be loaded (its system libraries, mostly), or None."""
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return str(error)
    return None


def _trainer() -> Finding:
    missing = [name for name in TRAINER if find_spec(name) is None]
    return Finding(
        name="trainer",
        is_ok=not missing,
        detail=f"not installed: {', '.join(missing)}" if missing else f"trl {_version('trl')}",
        enables="rose demo (TRL's GRPO on FrozenLake, the report's plots)",
        fix=install_hint("train"),
        is_required=True,
    )


def _ray() -> Finding:
    return _optional_package("ray", "Ray", "engines and jobs on a cluster")


def _redis() -> Finding:
    return _optional_package("redis", "Redis client", "the job control channel across hosts")


def _optional_package(distribution: str, name: str, enables: str) -> Finding:
    version = _version(distribution)
    return Finding(
        name=name,
        is_ok=version is not None,
        detail=version if version is not None else "not installed",
        enables=f"{enables} (optional)",
        fix=f"pip install {distribution}",
        is_optional=True,
    )


def _version(*distributions: str) -> str | None:
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None


def _print(findings: Sequence[Finding], can_run: bool) -> None:
    table = Table(title="rose doctor", title_justify="left")
    for column in ("part", "state", "found", "enables"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(finding.name, _state(finding), finding.detail, finding.enables)
    console = Console(markup=True, highlight=False)
    console.print(table)
    for finding in findings:
        if not finding.is_ok:
            # Not through rich's markup, which would swallow the brackets of '.[cpu]'.
            console.print(f"{finding.name}: {finding.fix}", markup=False, soft_wrap=True)
    verdict = "The demo can run: rose demo" if can_run else "The demo can't run: fix what is MISSING."
    console.print(verdict, style="green" if can_run else "red")


def _state(finding: Finding) -> str:
    if finding.is_ok:
        return "[green]ok[/green]"
    if finding.is_required:
        return "[red]MISSING[/red]"
    return "[yellow]missing[/yellow]" if not finding.is_optional else "not here"


def _parser() -> CommandParser:
    parser = CommandParser(
        "rose doctor",
        "Shows what is installed, what is missing, and what will work. The exit status is 0 if `rose demo` "
        "can run.",
        "rose doctor --json",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
