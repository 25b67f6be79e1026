"""Checks and measures on a GPU what the tests show on a stand-in driver: one command, unattended.

Each part runs in a process of its own, for ten minutes at most; a part that fails does not stop the others.
These are forked off one that has loaded torch and never asks it for a device.
Each prints one table. The summary says which parts passed, failed or were skipped, and why. The status is 0
if none failed. The first parts need torch and a CUDA driver alone.

    python benchmarks/gpu/run.py --json gpu.json
    python benchmarks/gpu/run.py --part poison
    python benchmarks/gpu/run.py --dry-run      without a GPU: every part runs, on the stand-in
"""

import argparse
import importlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
sys.path[:0] = [str(FOLDER.parent), str(ROOT)]

from lib.harness import run_benchmark  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from rose.config import default_variable, forget_variables  # noqa: E402
from rose.measure.environment import collect_env  # noqa: E402

PART_TIMEOUT_S = 590.0
PROCESSES = get_context("forkserver")
PROCESSES.set_forkserver_preload(["gpu.rig"])


@dataclass(frozen=True, slots=True, kw_only=True)
class KitPart:
    """One thing to run: a function of a module in this folder."""

    module: str
    function: str = "measure"
    needs: tuple[str, ...] = ()
    """Modules without which it is skipped."""


PARTS = {
    "contract": KitPart(
        module="suites", function="measure_contract", needs=("pytest_rerunfailures", "hypothesis")
    ),
    "costs": KitPart(module="driver_costs"),
    "moves": KitPart(module="slab_moves", function="measure_moves"),
    "guards": KitPart(module="slab_moves", function="measure_guards"),
    "aliasing": KitPart(module="slab_moves", function="measure_aliasing"),
    "cut": KitPart(module="slab_moves", function="measure_cut"),
    "beside": KitPart(module="beside_kernels"),
    "poison": KitPart(module="poison"),
    "offsets": KitPart(module="offsets"),
    "delta": KitPart(module="delta_kernels", needs=("cuda.bindings",)),
    "contexts": KitPart(module="contexts"),
    "shares": KitPart(module="shares", needs=("cuda.bindings",)),
    "board": KitPart(module="suites", function="measure_board"),
    "engines": KitPart(module="engines", needs=("vllm",)),
    "kvcached": KitPart(module="suites", function="measure_kvcached", needs=("kvcached",)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOutcome:
    """What became of a part."""

    part: str
    status: str
    """``passed``, ``failed`` or ``skipped``."""
    reason: str
    seconds: float
    figures: list[dict[str, Any]]


def main() -> int:
    arguments = _parser().parse_args()
    names = [arguments.part] if arguments.part is not None else list(PARTS)
    with tempfile.TemporaryDirectory(prefix="rose-gpu-kit-") as folder:
        _set_variable("PYTHONPATH", os.pathsep.join([str(FOLDER.parent), str(ROOT)]))
        if arguments.dry_run:
            _set_variable("LD_LIBRARY_PATH", str(_build_stand_in(Path(folder))))
        outcomes = [_run(name, arguments, Path(folder)) for name in names]
    _summarize(outcomes)
    if arguments.json is not None:
        _write(arguments, outcomes)
    return int(any(outcome.status == "failed" for outcome in outcomes))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=list(PARTS), help="only this part")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write env, figures and outcomes here")
    parser.add_argument("--quick", action="store_true", help="few repeats: wide spreads")
    parser.add_argument("--dry-run", action="store_true", help="on the stand-in driver; implies --quick")
    return parser


def _set_variable(name: str, value: str) -> None:
    """Sets a variable of the parts, whatever the operator has set."""
    forget_variables(name)
    default_variable(name, value)


def _build_stand_in(folder: Path) -> Path:
    """Compiles the stand-in driver; returns the folder that it is in."""
    sys.path.append(str(ROOT / "tests" / "memory"))
    importlib.import_module("vmm_worlds").build_stand_in(folder)
    return folder


def _run(name: str, arguments: argparse.Namespace, folder: Path) -> PartOutcome:
    """Runs a part in its own process."""
    part = PARTS[name]
    missing = [module for module in part.needs if not _has(module)]
    if missing:
        reason = f"{', '.join(missing)} not installed"
        return PartOutcome(part=name, status="skipped", reason=reason, seconds=0.0, figures=[])
    report, log = folder / f"{name}.json", folder / f"{name}.log"
    print(f"== {name}", flush=True)
    start = time.monotonic()
    process = PROCESSES.Process(target=_measure, args=(part, arguments, report, log))
    process.start()
    process.join(PART_TIMEOUT_S)
    is_late = process.exitcode is None
    if is_late:
        process.kill()
        process.join()
    status = process.exitcode
    lines = log.read_text().strip().splitlines() if log.exists() else []
    reason = (lines or [f"status {status}"])[-1] if status else ""
    if is_late:
        reason = f"stopped after {PART_TIMEOUT_S:.0f} s"
    if status:
        sys.stderr.write(log.read_text()[-4000:])
    figures = json.loads(report.read_text())["figures"] if report.exists() else []
    return PartOutcome(
        part=name,
        status="failed" if status else "passed",
        reason=reason or _missed(figures),
        seconds=round(time.monotonic() - start, 1),
        figures=figures,
    )


def _missed(figures: list[dict[str, Any]]) -> str:
    """Names the figures that miss their targets."""
    from run_all import meets

    missed = [each["name"] for each in figures if meets(each["value"], each["target"]) is False]
    return f"misses its target: {', '.join(missed)}" if missed else ""


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _measure(part: KitPart, arguments: argparse.Namespace, report: Path, log: Path) -> None:
    """Measures one part in this process, and ends it."""
    with log.open("w") as errors:
        os.dup2(errors.fileno(), sys.stderr.fileno())
    measure = getattr(importlib.import_module(f"gpu.{part.module}"), part.function)
    from gpu.rig import GpuRig

    is_quick = arguments.quick or arguments.dry_run
    rig = GpuRig(is_dry=arguments.dry_run, is_quick=is_quick)
    argv = ["--json", str(report), *(["--quick"] if is_quick else [])]
    sys.exit(run_benchmark(measure.__doc__, lambda _: measure(rig), argv=argv))


def _summarize(outcomes: list[PartOutcome]) -> None:
    table = Table(title="GPU kit")
    for column in ("part", "status", "seconds", "reason"):
        table.add_column(column, justify="right" if column == "seconds" else "left", overflow="fold")
    for outcome in outcomes:
        table.add_row(outcome.part, outcome.status, f"{outcome.seconds:.0f}", outcome.reason)
    Console().print(table, markup=False)


def _write(arguments: argparse.Namespace, outcomes: list[PartOutcome]) -> None:
    env = collect_env(seed=0, quick=arguments.quick or arguments.dry_run).to_json()
    commit = ROOT / "COMMIT"  # in a bundle, which has no git
    if env["commit"] is None and commit.exists():
        env["commit"] = commit.read_text().strip()
    env["is_dry_run"] = arguments.dry_run
    figures = [figure for outcome in outcomes for figure in outcome.figures]
    parts = [{key: value for key, value in asdict(each).items() if key != "figures"} for each in outcomes]
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps({"env": env, "figures": figures, "parts": parts}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
