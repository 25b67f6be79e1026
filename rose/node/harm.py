"""`rose harm`: what rollouts cost serving, measured on its own traffic.

Prints one screen per serving engine, and changes nothing on it.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rose.arguments import CommandParser, run_command
from rose.messages import HarmEstimate, HarmStatus, HarmWindow
from rose.node.control import EngineControl

NAMES = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
EXAMPLE = "rose harm --worker http://127.0.0.1:8000 --json harm.json"


def main(argv: Sequence[str]) -> int:
    """Prints the report; returns 1 if a P99 is known to differ by more than the engine allows."""
    parser = CommandParser(
        "rose harm",
        "Shows by how much P50 and P99 of TTFT and TPOT differ with rollouts on, from serving's own traffic.",
        EXAMPLE,
    )
    parser.add_argument(
        "--worker", action="append", required=True, metavar="URL", help="a serving engine; may be repeated"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report here too")
    arguments = parser.parse_args(list(argv))
    reports = {}
    for url in arguments.worker:
        engine = EngineControl(url, "")
        try:
            reports[url] = engine.harm()
        finally:
            engine.close()
    console = Console()
    for url, report in reports.items():
        console.print(harm_page(url, report))
    if arguments.json is not None:
        whole = {url: report.model_dump(mode="json") for url, report in reports.items()}
        arguments.json.write_text(json.dumps(whole, indent=1) + "\n")
    return int(any(_is_broken(report) for report in reports.values()))


def harm_page(url: str, report: HarmStatus) -> RenderableType:
    """The last minute and the last hours of one engine, and a sentence that says what they mean."""
    table = Table(title=f"rose harm {url}", caption="slower with rollouts, and 95% bounds")
    columns = {"lately": report.recent, "this hour": report.hours[0] if report.hours else None}
    for column in ("", *columns, "hours before"):
        table.add_column(column, justify="right" if column else "left")
    for latency in NAMES:
        cells = [
            _cell(window.latencies.get(latency) if window is not None else None)
            for window in columns.values()
        ]
        table.add_row(latency.upper().replace("_", " "), *cells, _range(report.hours[1:], latency))
    counts = [str(window.num_requests) if window is not None else "-" for window in columns.values()]
    table.add_row("requests", *counts, str(sum(hour.num_requests for hour in report.hours[1:])))
    parts: list[RenderableType] = [table, Text(harm_sentence(report))]
    return Group(*parts, _tenants_table(report.tenants)) if report.tenants else Group(*parts)


def _tenants_table(tenants: Mapping[str, HarmWindow]) -> Table:
    table = Table(title="this hour by tenant")
    for column in ("", "requests", "TTFT P99", "TPOT P99"):
        table.add_column(column, justify="right" if column else "left")
    for tenant, window in tenants.items():
        cells = [_cell(window.latencies.get(name)) for name in ("ttft_p99", "tpot_p99")]
        table.add_row(Text(tenant), str(window.num_requests), *cells)
    return table


def harm_sentence(report: HarmStatus) -> str:
    """Says what the present hour's figures mean."""
    shut = f"Rollouts are shut out for {report.closed_share:.0%} of the time"
    shut += ", because the harm was above its bound." if report.is_retreating else ", to measure."
    if report.note is not None:
        return f"Nothing is known now: {report.note}."
    window = report.hours[0]
    tails = _tails(window)
    broken = [one for one in tails if one.low > report.allow_harm]
    worst = max(broken or tails, key=lambda one: one.value)
    if broken:
        text = f"Above the bound of {report.allow_harm:.0%}: a P99 is {worst.value:.1%} slower with rollouts."
    elif all(one.high <= report.allow_harm for one in tails):
        text = f"Within the bound: no P99 is more than {report.allow_harm:.0%} slower with rollouts."
    else:
        text = f"The worst P99 differs by {worst.value:+.1%} ({worst.low:+.1%} to {worst.high:+.1%})."
        if window.seconds_until_known:
            left = _duration(window.seconds_until_known)
            text += f" Knowing it to {report.allow_harm:.0%} takes about {left} more."
    return f"{text} {shut}"


def _is_broken(report: HarmStatus) -> bool:
    tails = _tails(report.hours[0]) if report.note is None and report.hours else []
    return any(one.low > report.allow_harm for one in tails)


def _tails(window: HarmWindow) -> list[HarmEstimate]:
    return [one for name, one in window.latencies.items() if name.endswith("99")]


def _cell(one: HarmEstimate | None) -> str:
    return "-" if one is None else f"{one.value:+.1%} ({one.low:+.1%} {one.high:+.1%})"


def _range(hours: Sequence[HarmWindow], latency: str) -> str:
    values = [hour.latencies[latency].value for hour in hours if latency in hour.latencies]
    return f"{min(values):+.1%} to {max(values):+.1%}" if values else "-"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


if __name__ == "__main__":
    sys.exit(run_command("harm", main, sys.argv[1:]))
