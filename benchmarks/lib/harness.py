"""Holds what every benchmark file shares: its command line, its table and its JSON.

Owns the flags and the output format (CONTRIBUTING.md). Promises that figures reach the JSON exactly as they
are printed, with the machine beside them, and what share of it other processes used. Never measures.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lib.progress import shown_progress
from rose.errors import RoseError
from rose.measure.environment import collect_env
from rose.measure.figures import Figure, to_json
from rose.measure.windows import CpuUse

Measure = Callable[[argparse.Namespace], list[Figure]]


def run_benchmark(
    doc: str,
    measure: Measure,
    add_arguments: Callable[[argparse.ArgumentParser], object] | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Parses the flags, measures, prints the table and writes the JSON. Returns the exit status.

    ``doc``: the benchmark's docstring, its first line the claim. ``measure`` gets the parsed flags; a
    RoseError from it becomes one line and status 1.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few repeats: wide spreads")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write env and figures here")
    parser.add_argument("--seed", type=int, default=0)
    if add_arguments is not None:
        add_arguments(parser)
    args = parser.parse_args(argv)
    cpu = CpuUse()
    cpu.start()
    try:
        with shown_progress(parser.prog):
            figures = measure(args)
    except RoseError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    # Over the moment in which nothing was measured, the kernel's clock ticks say nothing.
    foreign = cpu.foreign_share() if any(figure.value is not None for figure in figures) else None
    env = collect_env(seed=args.seed, quick=args.quick)
    console = Console()
    console.print(_table(figures), markup=False)
    console.print(env.describe(), markup=False)
    if foreign is not None:
        # A killed engine's children may die unseen, and then count as others'.
        console.print(f"other processes used up to {foreign:.0%} of the machine's CPU", markup=False)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        report = to_json(env, figures)
        report["env"]["foreign_cpu_share"] = foreign
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def median_figure(
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    target: str | None = None,
    peers: dict[str, float | None] | None = None,
) -> Figure:
    """Returns a figure with the median of repeats, and their smallest and largest as its spread."""
    return Figure(
        name=name,
        value=statistics.median(values),
        unit=unit,
        target=target,
        peers=peers if peers is not None else {},
        spread=(min(values), max(values)),
    )


def _table(figures: Sequence[Figure]) -> Table:
    table = Table()
    kinds = list(dict.fromkeys(figure.kind for figure in figures))  # never two in one column
    for column in ("figure", *kinds, "unit", "target", "spread", "beside it"):
        table.add_column(column, justify="right" if column in kinds else "left", overflow="fold")
    for figure in figures:
        table.add_row(
            figure.name,
            *(_short(figure.value) if figure.kind == kind else "" for kind in kinds),
            figure.unit,
            figure.target if figure.target is not None else "",
            "" if figure.spread is None else f"{figure.spread[0]:.4g} to {figure.spread[1]:.4g}",
            "; ".join(f"{name} {_short(value)}" for name, value in figure.peers.items()),
        )
    return table


def _short(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4g}"
