"""A result beside the paper's: the number, where it stands in ROSE, and why the two differ.

Owns the form of bench_e2e's rows. Computes nothing but medians and percentiles.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from rich.table import Table
from sim.e2e.fleet import Tape
from sim.e2e.systems import World

from rose.measure.figures import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure, simulated; a value for each seed."""

    name: str
    source: str
    """The figure, table or section of ROSE."""
    values: Sequence[float]
    unit: str
    paper: float | None
    why: str
    target: str | None = None
    beside: dict[str, float | None] = field(default_factory=dict)

    @property
    def value(self) -> float:
        return statistics.median(self.values)

    def figure(self) -> Figure:
        """Returns the row in the benchmarks' form."""
        return Figure(
            name=self.name,
            value=self.value,
            unit=self.unit,
            target=self.target,
            kind="simulated",
            peers={f"ROSE {self.source}": self.paper} | self.beside,
            spread=(min(self.values), max(self.values)) if len(self.values) > 1 else None,
        )


def numbered(rows: Sequence[Row]) -> dict[str, int]:
    """Returns each reason once, with its number."""
    return {why: number for number, why in enumerate(dict.fromkeys(row.why for row in rows), start=1)}


def rows_table(rows: Sequence[Row]) -> Table:
    """Returns the paper's numbers beside the simulated ones. `note`: the number of the reason below."""
    table = Table(title="ROSE's figures and tables, simulated at paper scale; nothing here is measured")
    for column in ("ROSE", "figure", "unit", "paper", "simulated", "note"):
        is_number = column in ("paper", "simulated", "note")
        table.add_column(column, overflow="fold", justify="right" if is_number else "left")
    notes = numbered(rows)
    for row in rows:
        number = str(notes[row.why])
        table.add_row(row.source, row.name, row.unit, _short(row.paper), _short(row.value), number)
    return table


def notes(rows: Sequence[Row]) -> str:
    """Returns why the paper's numbers and ours differ, one numbered line for each reason."""
    return "\n".join(f"{number}. {why}" for why, number in numbered(rows).items())


def markdown(themes: Mapping[str, Sequence[Row]]) -> str:
    """Returns one table of a results page for each theme, with targets and spreads, and its notes below."""
    return "\n".join(
        f"## {theme}\n\n{_table(rows)}\n{notes(rows)}\n" for theme, rows in themes.items() if rows
    )


def _table(rows: Sequence[Row]) -> str:
    lines = [
        "| ROSE | Figure | Paper | Simulated | Spread | Target | Beside it, simulated | Note |",
        "|" + "---|" * 8,
    ]
    reasons = numbered(rows)
    for row in rows:
        spread = f"{min(row.values):.3g} to {max(row.values):.3g}" if len(row.values) > 1 else "-"
        beside = "; ".join(f"{name} {_short(value)}" for name, value in row.beside.items())
        cells = [row.source, f"`{row.name}`, {row.unit}", _short(row.paper), _short(row.value), spread]
        cells += [row.target or "-", beside or "-", str(reasons[row.why])]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def ratios(slower: Sequence[float], faster: Sequence[float]) -> list[float]:
    """Seed by seed."""
    return [before / after for before, after in zip(slower, faster, strict=True)]


def p99_ms(tapes: Sequence[Tape], latency: str) -> float:
    """The 99th percentile over all requests of these engines; infinite if that many got no answer."""
    values = [each for tape in tapes for each in getattr(tape.latencies, latency)]
    return 1e3 * float(np.percentile(values, 99, method="higher"))


def attainment(world: World, tapes: Sequence[Tape]) -> float:
    """The share of requests within both SLOs."""
    slo = world.workload.pair.slo
    counts = [len(tape.latencies.ttfts_s) for tape in tapes]
    met = [tape.latencies.attainment(slo) * count for tape, count in zip(tapes, counts, strict=True)]
    return sum(met) / sum(counts)
