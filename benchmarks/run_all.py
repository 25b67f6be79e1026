"""`make bench`: every benchmark's quick form, and one table of all figures against their targets.

Owns: the order (by name) and the table. Promises: one benchmark's failure doesn't hide the others; the exit
status is 0 only if every benchmark ran. A missed target is shown, not failed: quick runs are noisy.
Never: measures anything itself.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).resolve().parent
TIMEOUT_S = 1800.0
_TARGET = re.compile(r"\s*(<=|>=|==|<|>|≤|≥|=)?\s*(-?\d+(?:\.\d+)?(?:[eE]-?\d+)?)\s*(%?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkOutcome:
    """What one benchmark file gave."""

    name: str
    exit_status: int
    figures: list[dict[str, Any]]


def main() -> int:
    """Runs them all, one after the other; prints the table."""
    arguments = _parser().parse_args()
    files = sorted(FOLDER.glob("bench_*.py"))
    files = [file for file in files if arguments.only is None or arguments.only in file.stem]
    if not files:
        print("no benchmark matches", file=sys.stderr)
        return 2
    outcomes = [run_benchmark(file, is_quick=not arguments.full) for file in files]
    print_table(outcomes, Console())
    if arguments.json is not None:
        report = {each.name: {"exit_status": each.exit_status, "figures": each.figures} for each in outcomes}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return int(any(each.exit_status != 0 for each in outcomes))


def run_benchmark(file: Path, *, is_quick: bool) -> BenchmarkOutcome:
    """Runs one file in its own process; its own table goes to the terminal."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "figures.json"
        argv = [sys.executable, str(file), *(["--quick"] if is_quick else []), "--json", str(report)]
        print(f"== {file.name}", flush=True)
        try:
            exit_status = subprocess.run(argv, timeout=TIMEOUT_S, check=False, cwd=FOLDER.parent).returncode
        except subprocess.TimeoutExpired:
            print(f"{file.name}: stopped after {TIMEOUT_S:.0f} s", file=sys.stderr)
            exit_status = 124
        figures = json.loads(report.read_text())["figures"] if report.exists() else []
        # A benchmark that ends well without figures has measured nothing.
        return BenchmarkOutcome(name=file.stem, exit_status=exit_status or int(not figures), figures=figures)


def print_table(outcomes: list[BenchmarkOutcome], console: Console) -> None:
    """One row per figure; simulated and measured ones are marked, for they can't be compared."""
    table = Table(title="benchmarks")
    for column in ("benchmark", "figure", "value", "unit", "target", "met", "kind"):
        table.add_column(column, justify="right" if column == "value" else "left", overflow="fold")
    for outcome in outcomes:
        for figure in outcome.figures:
            value, target = figure["value"], figure.get("target")
            met = meets(value, target)
            table.add_row(
                outcome.name.removeprefix("bench_"),
                figure["name"],
                f"{value:.4g}" if isinstance(value, (int, float)) else "not measured",
                str(figure.get("unit") or ""),
                "" if target is None else str(target),
                {True: "yes", False: "NO", None: ""}[met],
                str(figure.get("kind", "")),
            )
        if outcome.exit_status != 0:
            table.add_row(outcome.name.removeprefix("bench_"), f"FAILED, status {outcome.exit_status}")
    console.print(table, markup=False)


def meets(value: object, target: object) -> bool | None:
    """Returns whether ``value`` meets a target such as ">= 0.6", and None where that cannot be told."""
    match = _TARGET.match(str(target)) if isinstance(target, str) else None
    if match is None or isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    sign, bound = match[1], float(match[2]) / (100 if match[3] else 1)
    if sign in (">=", "≥"):
        return value >= bound
    if sign in ("<=", "≤"):
        return value <= bound
    if sign in (">", "<"):
        return value > bound if sign == ">" else value < bound
    return value == bound if sign is not None else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Runs every benchmarks/bench_*.py in its quick form.")
    parser.add_argument("--full", action="store_true", help="the full form instead; takes long")
    parser.add_argument("--only", metavar="TEXT", help="only files whose name contains TEXT")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures there")
    return parser


if __name__ == "__main__":
    sys.exit(main())
