"""`rose harm` shows serving's latencies with rollouts and without, and what rollouts earned.

Prints one screen per serving engine, measured on its own traffic, and changes nothing on it.
"""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rose.arguments import CommandParser, run_command
from rose.config import Settings
from rose.errors import WorkerError
from rose.http import url_argument
from rose.messages import HarmEstimate, HarmHistory, HarmStatus, HarmWindow, Harvest
from rose.node.control import CALL_TIMEOUT_S, EngineControl, urls_on_this_host

NAMES = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
SHOWN_HOURS = 3
DAY_S = 86400.0
BROKEN_STATUS = 3
"""The command's, where a bound is broken."""
FOUND_TIMEOUT_S = 10.0
"""For an engine that nobody named: it may hang, and hides no other one."""
EXAMPLE = "rose harm --worker http://127.0.0.1:8000 --json harm.json"


def main(argv: Sequence[str]) -> int:
    """Prints the report. Returns 1 if an engine did not answer, else BROKEN_STATUS if a bounded P99 is known
    to differ by more than the engine allows."""
    parser = _parser()
    arguments = parser.parse_args(list(argv))
    if arguments.json is not None and not arguments.json.parent.is_dir():
        parser.error(f"--json {arguments.json}: there is no folder {arguments.json.parent}; make it")
    settings = Settings.from_environment()
    reports, problems = _read_all(arguments.worker, settings)
    for problem in problems:
        print(f"rose: error: harm: {problem}", file=sys.stderr)
    if not reports and not problems:
        parser.error(f"no serving engine with a pool in {settings.runtime_dir}; name one with --worker URL")
    console = Console()
    for url, report in reports.items():
        console.print(harm_page(url, report, all_hours=arguments.hours))
    if arguments.json is not None:
        whole = {url: report.model_dump(mode="json") for url, report in reports.items()}
        arguments.json.write_text(json.dumps(whole, indent=1) + "\n")
    if problems:
        return 1
    return BROKEN_STATUS if any(_is_broken(report) for report in reports.values()) else 0


def _read_all(named: Sequence[str], settings: Settings) -> tuple[dict[str, HarmHistory], list[str]]:
    """Returns the reports of the engines that answer, and a line for each of the others."""
    reports, problems = {}, []
    for url in named or urls_on_this_host(settings):
        engine = EngineControl(url, "", CALL_TIMEOUT_S if named else FOUND_TIMEOUT_S)
        try:
            if named or engine.status().harm is not None:
                reports[url] = engine.harm()
        except WorkerError as error:
            problems.append(str(error))
        finally:
            engine.close()
    return reports, problems


def harm_page(url: str, report: HarmHistory, *, all_hours: bool = False) -> RenderableType:
    """Shows one engine: its latencies in the present hour with rollouts and without, what rollouts earned, a
    sentence that says what it means, and the hours before; ``all_hours`` adds the tenants of each."""
    now, *earlier = report.hours
    title = f"rose harm {url}: this hour, {_duration(now.seconds)}, gate {now.gate}"
    parts: list[RenderableType] = [Text(title, style="bold"), _latency_table(now, report)]
    parts.append(Text(_rests_on(now)))
    if now.harvest is not None:
        parts.append(Text(_earned(now.harvest)))
    parts.append(Text(harm_sentence(report)))
    if report.slo_problem is not None:
        parts.append(Text(f"SLO: {report.slo_problem}.", style="red"))
    shown = earlier if all_hours else earlier[:SHOWN_HOURS]
    parts.append(Text("\nslower with rollouts by hour", style="bold"))
    parts.append(_time_table([("lately", report.recent), *((_ended(hour), hour) for hour in shown)]))
    if len(shown) < len(earlier):
        parts.append(Text(f"{len(earlier) - len(shown)} more hours: rose harm --hours"))
    for title, hour in [("this hour", now), *((_ended(hour), hour) for hour in earlier if all_hours)]:
        if hour.tenants:
            parts += [Text(f"\n{title} by tenant", style="bold"), _tenants_table(hour)]
    return Group(*parts)


def _latency_table(window: HarmWindow, report: HarmStatus) -> Table:
    table = _table(("", "serving had", "it has", "slower with rollouts", "SLO"))
    slos_ms = {"ttft_p99": report.slo_ttft_ms, "tpot_p99": report.slo_tpot_ms}
    for name in NAMES:
        table.add_row(
            _title(name),
            _ms(window.without_rollouts_ms.get(name)),
            _ms(window.with_rollouts_ms.get(name)),
            _cell(window.latencies.get(name)),
            _ms(slos_ms[name]) if slos_ms.get(name) is not None else "",
        )
    return table


def _rests_on(window: HarmWindow) -> str:
    few = window.requests_s < window.seconds
    which = f"the last {_duration(window.requests_s)} alone" if few else "all of it"
    return (
        f"From {window.num_requests:,} requests ({which}) and {window.num_closed_slices:,} slices of time "
        "without rollouts, with 95% bounds."
    )


def _earned(harvest: Harvest) -> str:
    return (
        f"Rollouts earned {harvest.tokens:,} tokens ({_rate(harvest)} a second) in "
        f"{_duration(harvest.rollout_s)} of steps: {_idle_share(harvest)} of what serving left idle."
    )


def _idle_share(harvest: Harvest) -> str:
    idle_s = harvest.seconds - harvest.serving_s
    return f"{min(1.0, harvest.rollout_s / idle_s):.0%}" if idle_s > 0 else "-"


def _rate(harvest: Harvest | None) -> str:
    return "-" if harvest is None or harvest.seconds <= 0 else f"{harvest.tokens / harvest.seconds:,.0f}"


def _time_table(rows: Sequence[tuple[str, HarmWindow | None]]) -> Table:
    table = _table(("", "requests", "TTFT P99", "TPOT P99", "tok/s"))
    for title, window in rows:
        if window is None:
            table.add_row(title, *"----")
            continue
        cells = [_cell(window.latencies.get(name)) for name in ("ttft_p99", "tpot_p99")]
        table.add_row(title, f"{window.num_requests:,}", *cells, _rate(window.harvest))
    return table


def _tenants_table(window: HarmWindow) -> Table:
    """Returns two rows per tenant: one of its P50, and one of its P99."""
    table = _table(("tenant", "requests", "", "TTFT", "", "TPOT", ""))
    for tenant, one in window.tenants.items():
        for percent in (50, 99):
            cells = []
            for name in (f"ttft_p{percent}", f"tpot_p{percent}"):
                cells += [_ms(one.with_rollouts_ms.get(name)), _cell(one.latencies.get(name))]
            first = (Text(tenant), f"{one.num_requests:,}") if percent == 50 else ("", "")
            table.add_row(*first, f"P{percent}", *cells)
    return table


def _table(columns: Sequence[str]) -> Table:
    """The first column names the row; the others are aligned to the right."""
    table = Table(box=None, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def harm_line(report: HarmStatus) -> str:
    """Returns the short form of the report, for `rose top`."""
    parts, window = [], report.hour
    if window is not None:
        for name in ("ttft_p99", "tpot_p99"):
            alone, now = (ms.get(name) for ms in (window.without_rollouts_ms, window.with_rollouts_ms))
            if alone is not None:
                parts.append(f"{_title(name)} was {_ms(alone)}, is {_ms(now)};")
        if window.harvest is not None:
            parts.append(f"rollouts earned {_rate(window.harvest)} tok/s.")
    slo = [f"SLO: {report.slo_problem}."] if report.slo_problem is not None else []
    return " ".join([*parts, harm_sentence(report), *_worst_tenant(report), *slo])


def _worst_tenant(report: HarmStatus) -> list[str]:
    worst = report.worst_tenant
    if worst is None:
        return []
    return [f"Worst tenant: {worst.tenant}, {_title(worst.latency)} {_cell(worst.harm)}."]


def harm_sentence(report: HarmStatus) -> str:
    """Says what the present hour's figures mean, and whether the bound is kept."""
    window = report.hour
    shut = f"Rollouts are shut out for {_percent(report.closed_share)} of the time"
    shut += ", because the harm was above its bound." if report.is_retreating else ", to measure."
    bound = _percent(report.allow_harm)
    unbounded = f"The bound of {bound} is not kept: gate {report.gate} spends slack. "
    prefix = "" if report.is_bounded else unbounded
    tails = _tails(window) if window is not None else []
    if report.note is not None or window is None or not tails:
        return f"{prefix}Nothing is known now: {report.note or 'no P99 is estimated yet'}."
    broken = [one for one in tails if one.low > report.allow_harm]
    worst = max(broken or tails, key=lambda one: one.value)
    if broken and report.is_bounded:
        text = f"Above the bound of {bound}: a P99 is {worst.value:.1%} slower with rollouts."
    elif report.is_bounded and all(one.high <= report.allow_harm for one in tails):
        text = f"Within the bound: no P99 is more than {bound} slower with rollouts."
    else:
        text = f"The worst P99 differs by {worst.value:+.1%} ({worst.low:+.1%} to {worst.high:+.1%})."
        text += _time_to_know(window, bound) if not broken else ""
    return f"{prefix}{text} {shut}"


def _time_to_know(window: HarmWindow, bound: str) -> str:
    left_s, shown = window.seconds_until_known, window.shown_in_a_day
    if not left_s:
        return ""
    if left_s > DAY_S and shown is not None:
        return f" At this traffic a day shows {_percent(shown)} at best: set allow_harm to at least that."
    return f" Knowing it to {bound} takes about {_duration(left_s)} more."


def _is_broken(report: HarmStatus) -> bool:
    window = report.hour
    if not report.is_bounded or report.note is not None or window is None:
        return False
    return any(one.low > report.allow_harm for one in _tails(window))


def _tails(window: HarmWindow) -> list[HarmEstimate]:
    return [one for name, one in window.latencies.items() if name.endswith("99")]


def _title(name: str) -> str:
    return name.upper().replace("_", " ")


def _ended(window: HarmWindow) -> str:
    return f"until {time.strftime('%a %H:%M', time.localtime(window.ended_at_s))}"


def _cell(one: HarmEstimate | None) -> str:
    return "-" if one is None else f"{one.value:+.1%} ({one.low:+.1%} {one.high:+.1%})"


def _ms(value_ms: float | None) -> str:
    if value_ms is None:
        return "-"
    return f"{value_ms:,.0f} ms" if value_ms >= 100 else f"{value_ms:.3g} ms"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _parser() -> CommandParser:
    parser = CommandParser(
        "rose harm",
        "Shows the P50 and P99 of serving's TTFT and TPOT, what they would be without rollouts, and what "
        "rollouts earned, all from serving's own traffic. The exit status is 3 if a P99 is known to be "
        "above the bound (--allow-harm), and 1 if an engine does not answer.",
        EXAMPLE,
    )
    parser.add_argument(
        "--worker",
        type=url_argument,
        action="append",
        default=[],
        metavar="URL",
        help="a serving engine; may be repeated (default: all of this host)",
    )
    parser.add_argument("--hours", action="store_true", help="show every hour that is known, by tenant")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report here too")
    return parser


if __name__ == "__main__":
    sys.exit(run_command("harm", main, sys.argv[1:]))
