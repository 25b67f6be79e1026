"""The repository is small enough to be read: its lines, folders and circles, and a turn's calls in the
router.

Everything is counted in one git checkout (--tree, this one by default), over the files that git tracks. Links
are not followed, and generated files don't count.

  lines_total, lines_product  lines of all text files, and of the product (rose, transfer, scheduler, csrc,
                    benchmarks/measure and the build files)
  files_a_room      the most source files in one folder of the product, `__init__.py` aside
  mutual_imports    groups of files, or of sibling packages, of the product that import each other in a circle
  names_of_several  public class names that several modules of the product and the benchmarks define
  longest_function, max_file  Python functions and source files, tests and benchmarks included
  readme_words      words of README.md
  turn_returns      the most modules from which control returns to one and the same module of the router, on
                    the way of one streamed turn; traced in this process, whatever --tree says
  suite_min, fast_min  minutes that pytest's last line says, from logs of `make test` and `make test-fast`

    python benchmarks/bench_house.py --json house.json
    python benchmarks/bench_house.py --suite-log suite.log --fast-log fast.log --json house.json
"""

import argparse
import asyncio
import re
import sys
from pathlib import Path

from lib.harness import run_benchmark
from lib.house.circles import circles
from lib.house.tree import Largest, Tree
from lib.house.trips import trace_turn
from lib.router.rig import stub

from rose.errors import ConfigError
from rose.measure.figures import Figure

ROOT = Path(__file__).resolve().parents[1]
_SUMMARY = re.compile(r"^=* ?.*\b(passed|failed)\b.* in (\d+(?:\.\d+)?)s\b", re.MULTILINE)
SUITES = {"suite_min": "<= 20", "fast_min": "<= 3"}


def measure(args: argparse.Namespace) -> list[Figure]:
    """Counts, then traces one turn; --quick changes nothing."""
    figures = tree_figures(Tree(args.tree))
    with stub(num_chunks=4) as (worker, _):
        trip = asyncio.run(trace_turn(worker))
    module, num_returns = trip.most_returns()
    print(f"turn_returns: to {module}, from {', '.join(sorted(trip.called[module]))}")
    for caller, called in sorted(trip.back):
        print(f"calls back into a module that waits for it: {caller} -> {called}")
    figures.append(
        Figure(
            name="turn_returns",
            value=float(num_returns),
            unit="modules",
            target="<= 5",
            peers={"calls back": float(len(trip.back))},
        )
    )
    logs = {"suite_min": args.suite_log, "fast_min": args.fast_log}
    return figures + [
        Figure(name=name, value=suite_minutes(log), unit="min", target=SUITES[name])
        for name, log in logs.items()
        if log is not None
    ]


def tree_figures(tree: Tree) -> list[Figure]:
    """Returns what can be counted without running anything; prints the circles it finds."""
    found = circles(tree.parsed)
    for group in found:
        print(f"import each other in a circle: {', '.join(group)}")
    doubled = tree.names_of_several()
    if doubled:
        print(f"name classes of several modules: {', '.join(doubled)}")
    return [
        _count("lines_total", tree.num_lines(), "lines", 73_000),
        _count("lines_product", tree.num_lines(product_only=True), "lines", 42_000),
        _largest("files_a_room", tree.largest_room(), "files", 16),
        _count("mutual_imports", len(found), "circles", 0),
        _count("names_of_several", len(doubled), "names", 0),
        _largest("longest_function", tree.longest_function(), "lines", 60),
        _largest("max_file", tree.longest_file(), "lines", 400),
        _count("readme_words", tree.num_words("README.md"), "words", 900),
    ]


def suite_minutes(log: Path) -> float:
    """Returns the minutes that pytest took. Raises: ConfigError where the log lacks pytest's last line."""
    try:
        found = _SUMMARY.findall(log.read_text())
    except OSError as error:
        raise ConfigError(f"{log} can't be read: {error}") from error
    if not found:
        raise ConfigError(f"{log} has no summary of pytest's, such as '== 9 passed in 1.20s =='")
    return float(found[-1][1]) / 60


def _count(name: str, value: int, unit: str, most: int) -> Figure:
    return Figure(name=name, value=float(value), unit=unit, target=f"<= {most}")


def _largest(name: str, size: Largest, unit: str, most: int) -> Figure:
    print(f"{name}: {size.where}")
    return _count(name, size.value, unit, most)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tree", type=Path, default=ROOT, help="a git checkout (default: this one)")
    parser.add_argument("--suite-log", type=Path, metavar="PATH", help="what `make test` printed")
    parser.add_argument("--fast-log", type=Path, metavar="PATH", help="what `make test-fast` printed")


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, _add_arguments))
