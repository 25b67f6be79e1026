"""The demo's report: one HTML file that needs nothing else, and a one-page terminal summary.

Owns the page. Promises no network access, no script, and the same numbers as the JSON figures.
Never computes a figure itself.
"""

import html
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rose.demo import charts
from rose.demo.figures import DemoFigures, Verdict, rollout_rate
from rose.demo.records import DemoResult, PhaseName
from rose.demo.verdicts import judge
from rose.measure.figures import Figure, percentile, pooled_requests, tpots_s, ttfts_s
from rose.measure.records import RequestRecord

SERVING_PHASES = (
    (PhaseName.SERVING_ALONE, "serving alone", charts.ALONE),
    (PhaseName.NAIVE, "naive co-location", charts.NAIVE),
    (PhaseName.ALTERNATE, "strict alternation", charts.NAIVE),
    (PhaseName.ROSE, "ROSE, full load", charts.ROSE),
    (PhaseName.TRAINING, "ROSE, RL training", charts.ROSE),
)
ROLLOUT_PHASES = (
    (PhaseName.ROLLOUT_ALONE, "rollout alone", charts.ALONE),
    (PhaseName.NAIVE, "naive co-location", charts.NAIVE),
    (PhaseName.ALTERNATE, "strict alternation", charts.NAIVE),
    (PhaseName.ROSE, "ROSE", charts.ROSE),
)
DISTURBED_SHARE = 0.05
"""Windows in which other processes took more CPU than this are marked."""

_STYLE = """
:root { color-scheme: light dark; --page: #f5f6f8; --card: #ffffff; --ink: #1c2430; --muted: #647082;
  --grid: #e2e6ec; --serving: #3b6fd4; --rollout: #e0872a; --free: #dfe4ea; --slo: #c22f3d;
  --alone: #8592a3; --naive: #b3568f; --rose: #1f8a70; --met: #1f8a4c; --missed: #c22f3d; --open: #8a6d1f; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --card: #1b2129; --ink: #e6eaf0;
  --muted: #9aa6b5; --grid: #313a46; --serving: #6b9bf2; --rollout: #f0a04b; --free: #2d3641; --slo: #ff6b76;
  --alone: #93a1b3; --naive: #d98abb; --rose: #45c0a0; --met: #4cc47f; --missed: #ff6b76; --open: #e0bd5c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; font-size: 16px; }
main { max-width: 1120px; margin: 0 auto; padding: 2.2rem 1.2rem 3rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 .8rem; }
h3 { font-size: 1rem; margin: 0 0 .2rem; }
p { margin: 0 0 .7rem; } .lead, .foot, figcaption { color: var(--muted); }
.lead { max-width: 48rem; } figcaption, .foot { font-size: .85rem; }
.verdicts, .charts { display: grid; gap: 1rem; grid-template-columns: repeat(2, minmax(0, 1fr)); }
.card { background: var(--card); border: 1px solid var(--grid); border-radius: 10px; padding: 1rem 1.1rem;
  margin: 0; min-width: 0; } .wide { grid-column: 1 / -1; }
.verdict { border-left: 5px solid var(--state); } .verdict p { margin: .3rem 0 0; font-size: .93rem; }
.met { --state: var(--met); } .missed { --state: var(--missed); } .open { --state: var(--open); }
.badge { color: var(--state); font-weight: 700; font-size: .8rem;
  text-transform: uppercase; letter-spacing: .04em; }
svg { display: block; width: 100%; height: auto; margin: .4rem 0; font-family: inherit; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { text-align: right; padding: .38rem .5rem; border-bottom: 1px solid var(--grid);
  font-variant-numeric: tabular-nums; vertical-align: top; }
.card:has(table) { overflow-x: auto; } td:last-child { overflow-wrap: anywhere; }
th { color: var(--muted); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
tr:last-child td { border-bottom: 0; }
@media (max-width: 720px) { .verdicts, .charts { grid-template-columns: minmax(0, 1fr); }
  main { padding: 1.2rem .7rem; } th, td { padding: .3rem .2rem; } .card:has(table) { padding: .6rem; }
  table { font-size: .72rem; } }
@media print { body { background: #fff; } .card { break-inside: avoid; } }
"""
_STATES = {True: ("met", "met"), False: ("missed", "fell short"), None: ("open", "not judged")}


def write_report(result: DemoResult, figures: DemoFigures, path: Path) -> None:
    """Write the HTML report of a run to ``path``, creating its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_page(result, figures, judge(result, figures)))


def print_summary(result: DemoResult, figures: DemoFigures, console: Console) -> None:
    """One terminal page: the verdicts, the latencies, the figures."""
    verdicts = Table(title="ROSE demo", title_style="bold", show_header=False, box=None, padding=(0, 1))
    verdicts.add_column(width=10)
    verdicts.add_column()
    styles = {True: "green", False: "bold red", None: "yellow"}
    for verdict in judge(result, figures):
        label = _STATES[verdict.is_met][1]
        verdicts.add_row(f"[{styles[verdict.is_met]}]{label}[/]", f"[bold]{verdict.title}.[/] {verdict.text}")
    console.print(headline(figures), style="bold", markup=False)
    console.print(verdicts)
    latencies = Table(box=None)
    for head in _LATENCY_HEAD:
        is_name = head == "phase"
        latencies.add_column(head, justify="left" if is_name else "right", no_wrap=is_name)
    for row in _latency_rows(result):
        latencies.add_row(*row)
    console.print(latencies)
    for name in ("rollout_tokens_per_s", "wire_bytes_per_changed_element"):
        label, value, unit, _, beside = _figure_row(figures[name])
        console.print(f"{label}: {value} {unit} ({beside})", markup=False, highlight=False)
    for line in (*(f"note: {note}" for note in result.notes), figures.env.describe()):
        console.print(line, markup=False, highlight=False)


def headline(figures: DemoFigures) -> str:
    """The run's result in one sentence."""
    rose, naive = figures.value("demo_rose_attainment"), figures.value("demo_naive_attainment")
    harvest = figures.value("harvested_fraction")
    if rose is None or naive is None or harvest is None:
        return "This run did not measure co-location with and without ROSE."
    return (
        f"Under ROSE, {rose:.1%} of the serving requests met their latency objectives while rollouts ran at "
        f"{harvest:.0%} of the speed that they have alone; naive co-location kept {naive:.1%}."
    )


_MS_HEAD = tuple(f"{name} {percent}, ms" for name in ("TTFT", "TPOT") for percent in ("P50", "P99"))
_LATENCY_HEAD = ("phase", "requests", "failed", *_MS_HEAD)
_FIGURE_HEAD = ("figure", "value", "unit", "target", "beside it")


def _latency_rows(result: DemoResult) -> list[tuple[str, ...]]:
    rows = []
    for phase, label, _ in SERVING_PHASES:
        requests = pooled_requests(result.windows(phase))
        if not requests:
            continue
        cells = [
            percentile(values, percent)
            for values in (ttfts_s(requests), tpots_s(requests))
            for percent in (50, 99)
        ]
        failed = sum(not request.is_complete for request in requests)
        rows.append((label, str(len(requests)), str(failed), *(_ms(cell) for cell in cells)))
    return rows


def _ms(seconds: float | None) -> str:
    return f"{seconds * 1000:,.1f}" if seconds is not None else "–"


def _number(value: float | None) -> str:
    return f"{value:,.4g}" if value is not None else "not measured"


def _figure_row(figure: Figure) -> tuple[str, ...]:
    beside = [f"{name} {_number(value)}" for name, value in figure.peers.items() if value is not None]
    if figure.spread is not None:
        beside.append(f"windows {_number(figure.spread[0])} to {_number(figure.spread[1])}")
    target = figure.target if figure.target is not None else ""
    return (figure.name, _number(figure.value), figure.unit, target, "; ".join(beside))


def _page(result: DemoResult, figures: DemoFigures, verdicts: Sequence[Verdict]) -> str:
    met = sum(verdict.is_met is True for verdict in verdicts)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in result.notes)
    mode = " This was a quick run: small samples, wide spreads." if result.is_quick else ""
    parts = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>ROSE demo report</title><style>{_STYLE}</style></head><body><main>",
        "<h1>RL rollouts in a serving GPU's slack</h1>",
        f'<p class="lead"><strong>{html.escape(headline(figures))}</strong></p>',
        f'<p class="lead">{met} of {len(verdicts)} criteria met in {result.wall_s / 60:.1f} minutes. '
        "A serving engine and a rollout engine, two real vLLM processes, share one slab pool and one "
        f"core that stands for the GPU; serving comes first.{mode}</p>",
        f'<section class="verdicts">{"".join(map(_verdict_card, verdicts))}</section>',
        f'<h2>What happened</h2><section class="charts">{_chart_cards(result)}</section>',
        f"<h2>Serving latency</h2>{_table(_LATENCY_HEAD, _latency_rows(result))}",
        f"<h2>Windows</h2>{_table(_WINDOW_HEAD, _window_rows(result))}",
        f"<h2>Figures</h2>{_table(_FIGURE_HEAD, map(_figure_row, figures.figures))}",
        f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "",
        f'<p class="foot">{html.escape(figures.env.describe())}</p></main></body></html>',
    )
    return "\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells of plain text."""
    titles = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="card"><table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table></div>'


def _verdict_card(verdict: Verdict) -> str:
    state, label = _STATES[verdict.is_met]
    return (
        f'<article class="card verdict {state}"><span class="badge">{label}</span>'
        f"<h3>{html.escape(verdict.title)}</h3><p>{html.escape(verdict.text)}</p></article>"
    )


def _chart_cards(result: DemoResult) -> str:
    """The charts of what was measured, each with its title and caption."""
    cards: list[tuple[str, str, str, str]] = []
    with charts.style() if result.phases else nullcontext():
        for name, values, slo_s in (
            ("TTFT", ttfts_s, result.slo.ttft_s),
            ("TPOT", tpots_s, result.slo.tpot_s),
        ):
            if rows := _latencies(result, values):
                svg = charts.latency_chart(name, rows, slo_s * 1000)
                cards.append(("", f"Serving {name}", svg, _LATENCY_CAPTIONS[name]))
        if bars := _rollout_bars(result):
            svg = charts.bar_chart(bars, "rollout tokens per second")
            cards.append(("", "Rollout tokens harvested", svg, _ROLLOUT_CAPTION))
        if any(not sync.is_base for sync in result.syncs):
            cards.append(("", "Bytes per weight sync", charts.sync_chart(result.syncs), _SYNC_CAPTION))
        if len(result.slab_samples) > 1:
            svg = charts.slab_chart(result.slab_samples, result.slab_events)
            cards.append((" wide", "Slabs of the shared pool", svg, _SLAB_CAPTION))
        if len(result.rewards) > 1:
            svg = charts.reward_chart(result.rewards)
            cards.append((" wide", "Reward per training step", svg, _REWARD_CAPTION))
    return "".join(
        f'<figure class="card{width}"><h3>{title}</h3>{svg}<figcaption>{caption}</figcaption></figure>'
        for width, title, svg, caption in cards
    )


def _latencies(
    result: DemoResult, values: Callable[[Iterable[RequestRecord]], list[float]]
) -> list[charts.Row]:
    """One row for each phase that has such latencies."""
    rows = []
    for phase, label, color in SERVING_PHASES:
        seconds = values(pooled_requests(result.windows(phase)))
        p50_s, p99_s = percentile(seconds, 50), percentile(seconds, 99)
        if p50_s is not None and p99_s is not None:
            rows.append((label, color, 1e3 * p50_s, 1e3 * p99_s))
    return rows


_LATENCY_CAPTIONS = {
    "TTFT": "Time to first token from the scheduled arrival, over requests that got one.",
    "TPOT": "Mean time per output token after the first, per request.",
}
_REWARD_CAPTION = "Multi-turn FrozenLake, trained with GRPO on rollouts from the shared GPU."
_ROLLOUT_CAPTION = "Same closed-loop workload in each phase; per cent of rollout alone."
_SYNC_CAPTION = "Each publish beside the whole model and an index-and-value list of the same change."
_SLAB_CAPTION = (
    "KV memory held by each model. The line is how far the rollout budget reaches above serving's slabs; "
    "marks above show when memory or turns were taken back from the rollout model."
)


def _rollout_bars(result: DemoResult) -> list[tuple[str, str, float, str]]:
    alone = rollout_rate(result.windows(PhaseName.ROLLOUT_ALONE))
    bars = []
    for phase, label, color in ROLLOUT_PHASES:
        rate = rollout_rate(result.windows(phase))
        if rate is not None:
            text = f"{rate:,.0f}" + (f"  ({rate / alone:.0%})" if alone else "")
            bars.append((label, color, rate, text))
    return bars


_WINDOW_HEAD = tuple(
    ["window", "length, s", "requests", "rollout tokens", "serving busy", "aborted turns", "other CPU"]
)


def _window_rows(result: DemoResult) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for phase in result.phases:
        aborts = ", ".join(f"{count} {reason}" for reason, count in phase.rollout_aborts.items())
        busy = f"{phase.serving_busy_s / phase.duration_s:.0%}" if phase.duration_s > 0 else "–"
        foreign = f"{phase.foreign_cpu_share:.1%}"
        rows.append(
            (
                phase.name.replace("_", " "),
                f"{phase.duration_s:.0f}",
                str(len(phase.requests)),
                f"{phase.rollout_tokens:,}",
                busy,
                aborts if aborts else "0",
                f"{foreign}, disturbed" if phase.foreign_cpu_share > DISTURBED_SHARE else foreign,
            )
        )
    return rows
