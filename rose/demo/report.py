"""The demo's report: one HTML file that needs nothing else, one picture, and a one-page terminal summary.

Owns the page. Promises no network access, no script, and the same numbers as the JSON figures.
Never computes a figure itself.
"""

import html
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rose.demo import charts
from rose.demo.figures import (
    MIN_ATTAINMENT,
    MIN_HARVEST,
    Figures,
    busy_share,
    harvest,
    latency,
    objectives,
    rollout_rate,
)
from rose.demo.figures import worse_attainment as worse
from rose.demo.records import DemoResult, PhaseName
from rose.demo.verdicts import Verdict, judge
from rose.measure.environment import Environment
from rose.measure.figures import Figure
from rose.measure.records import Window

LOOKS = {
    PhaseName.SERVING_ALONE: ("serving alone", "alone"),
    PhaseName.ROLLOUT_ALONE: ("rollouts alone", "alone"),
    PhaseName.NAIVE: ("naive co-location", "naive"),
    PhaseName.ALTERNATE: ("strict alternation", "naive"),
    PhaseName.STATIC: ("static split", "naive"),
    PhaseName.ROSE: ("ROSE, full load", "rose"),
    PhaseName.TRAINING: ("ROSE, RL training", "rose"),
}
"""Each phase's name and colour, in the order of tables and charts."""
SHARING = tuple(LOOKS)[:-1]
"""Phases with a harvest: in the training, rollouts also run elsewhere, and wait for the trainer."""
DISTURBED_SHARE = 0.05
"""Windows in which other processes took more CPU than this are marked."""

_DARK = {
    **{"page": "#12161c", "card": "#1b2129", "ink": "#e6eaf0", "muted": "#9aa6b5", "grid": "#313a46"},
    **{"serving": "#6b9bf2", "rollout": "#f0a04b", "free": "#2d3641", "slo": "#ff6b76", "alone": "#93a1b3"},
    **{"naive": "#d98abb", "rose": "#45c0a0", "met": "#4cc47f", "open": "#e0bd5c"},
}
_STYLE = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.5;
  font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; font-size: 16px; }
main { max-width: 1120px; margin: 0 auto; padding: 2.2rem 1.2rem 3rem; }
h1 { font-size: 1.6rem; line-height: 1.3; margin: 0 0 .6rem; }
h2 { font-size: 1.25rem; margin: 2.4rem 0 .8rem; }
h3 { font-size: 1rem; margin: 0 0 .2rem; } p { margin: 0 0 .7rem; }
.lead, .foot, figcaption { color: var(--muted); } figcaption, .foot { font-size: .85rem; }
.grid { display: grid; gap: 1rem; grid-template-columns: repeat(2, minmax(0, 1fr)); }
.card { background: var(--card); border: 1px solid var(--grid); border-radius: 10px; padding: 1rem 1.1rem;
  margin: 0; min-width: 0; } .wide { grid-column: 1 / -1; } .card:has(table) { overflow-x: auto; }
.verdict { border-left: 5px solid var(--state); } .verdict p { margin: .3rem 0 0; font-size: .93rem; }
.met { --state: var(--met); } .missed { --state: var(--slo); } .open { --state: var(--open); }
.badge { color: var(--state); font-weight: 700; font-size: .8rem; text-transform: uppercase; }
svg { display: block; width: 100%; height: auto; margin: .4rem 0; font-family: inherit; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; }
th, td { text-align: right; padding: .38rem .5rem; border-bottom: 1px solid var(--grid);
  font-variant-numeric: tabular-nums; vertical-align: top; }
th { color: var(--muted); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
@media (max-width: 720px) { .grid { grid-template-columns: minmax(0, 1fr); } main { padding: 1.2rem .7rem; } }
@media print { body { background: #fff; } .card { break-inside: avoid; } }
"""
_STATES = {True: ("met", "met"), False: ("missed", "fell short"), None: ("open", "not judged")}


def write_report(result: DemoResult, figures: Figures, env: Environment, path: Path) -> None:
    """Writes the HTML report of a run to ``path``, creating its folder, and beside it the picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_page(result, figures, env, path.with_suffix(".png")))


def print_summary(result: DemoResult, figures: Figures, env: Environment, console: Console) -> None:
    """One terminal page: the result, the verdicts, the phases."""
    console.print(headline(figures), style="bold", markup=False)
    verdicts = Table(show_header=False, box=None, padding=(0, 1))
    styles = {True: "green", False: "bold red", None: "yellow"}
    for verdict in judge(result, figures):
        label = _STATES[verdict.is_met][1]
        verdicts.add_row(f"[{styles[verdict.is_met]}]{label}[/]", f"[bold]{verdict.title}.[/] {verdict.text}")
    console.print(verdicts)
    phases = Table(box=None)
    for head in _PHASE_HEAD[:_NUM_NARROW]:
        phases.add_column(head, justify="left" if head == "phase" else "right", no_wrap=head == "phase")
    for row in _phase_rows(result):
        phases.add_row(*row[:_NUM_NARROW])
    console.print(phases)
    label, value, unit, _, beside = _figure_row(figures["wire_bytes_per_changed_element"])
    for line in (f"{label}: {value} {unit} ({beside})", *result.notes, env.describe()):
        console.print(line, markup=False, highlight=False)


def headline(figures: Figures) -> str:
    """The run's result in one sentence."""
    rose, naive = figures["demo_rose_attainment"].value, figures["demo_naive_attainment"].value
    speed, static = figures["harvested_fraction"].value, figures["harvested_fraction"].peers["static_split"]
    if rose is None or naive is None or speed is None or static is None:
        return "This run did not measure co-location with and without ROSE."
    return (
        f"Under ROSE, {rose:.1%} of the serving requests met their latency objectives while rollouts ran at "
        f"{speed:.0%} of the speed that they have alone; naive co-location kept {naive:.1%}, and a static "
        f"split left rollouts {static:.0%}."
    )


_PHASE_HEAD = (
    *("phase", "in SLOs", "TTFT P50, ms", "P99", "TPOT P50, ms", "P99", "rollout tok/s", "of alone"),
    *("length, s", "requests", "failed", "serving busy", "aborted turns", "other CPU"),
)
_NUM_NARROW = 8
"""The columns that a terminal has room for."""
_FIGURE_HEAD = ("figure", "value", "unit", "target", "beside it")


def _phase_rows(result: DemoResult) -> list[tuple[str, ...]]:
    return [_phase_row(result, name, window) for name in LOOKS for window in result.windows(name)]


def _phase_row(result: DemoResult, name: PhaseName, window: Window) -> tuple[str, ...]:
    latencies = [latency(result, which, percent, name) for which in ("ttft", "tpot") for percent in (50, 99)]
    foreign = window.foreign_cpu_share
    return (
        LOOKS[name][0],
        _short(worse(result, name), ".1%"),
        *(_short(None if each is None else 1e3 * each, ",.1f") for each in latencies),
        _short(rollout_rate(result, name), ",.0f"),
        _short(harvest(result, name), ".0%"),
        f"{window.duration_s:.0f}",
        str(len(window.requests)),
        str(sum(not request.is_complete for request in window.requests)),
        _short(busy_share(result, name), ".0%"),
        ", ".join(f"{count} {reason}" for reason, count in window.rollout_aborts.items()) or "0",
        f"{foreign:.1%}{', disturbed' if foreign > DISTURBED_SHARE else ''}",
    )


def _short(value: float | None, form: str) -> str:
    return format(value, form) if value is not None else "–"


def _number(value: float | None) -> str:
    return f"{value:,.4g}" if value is not None else "not measured"


def _figure_row(figure: Figure) -> tuple[str, ...]:
    beside = "; ".join(
        f"{name} {_number(value)}" for name, value in figure.peers.items() if value is not None
    )
    return (figure.name, _number(figure.value), figure.unit, figure.target or "", beside)


def _page(result: DemoResult, figures: Figures, env: Environment, png: Path) -> str:
    verdicts = judge(result, figures)
    met = sum(verdict.is_met is True for verdict in verdicts)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in result.notes)
    mode = " This was a quick run: small samples, wide spreads." if result.is_quick else ""
    light, dark = (
        "".join(f"--{name}: {color};" for name, color in colors.items()) for colors in (charts.LIGHT, _DARK)
    )
    parts = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>ROSE demo report</title>'
        f"<style>:root {{ color-scheme: light dark; {light} }}"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}{_STYLE}</style></head><body><main>",
        f"<h1>{html.escape(headline(figures))}</h1>",
        f'<p class="lead">{met} of {len(verdicts)} criteria met in {result.wall_s / 60:.1f} minutes. '
        "A serving engine and a rollout engine, two real vLLM processes, share one slab pool and one "
        f"core that stands for the GPU; serving comes first.{mode}</p>",
        f'<section class="grid">{"".join(map(_verdict_card, verdicts))}</section>',
        f'<h2>What happened</h2><section class="grid">{_chart_cards(result, png)}</section>',
        f"<h2>Phases</h2>{_table(_PHASE_HEAD, _phase_rows(result))}",
        f"<h2>Figures</h2>{_table(_FIGURE_HEAD, map(_figure_row, figures.values()))}",
        f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "",
        f'<p class="foot">{html.escape(env.describe())}</p></main></body></html>',
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


def _chart_cards(result: DemoResult, png: Path) -> str:
    """The charts of what was measured, each with its title and caption."""
    with charts.style() if result.phases else nullcontext():
        cards = list(_charts(result, png))
    return "".join(
        f'<figure class="card{width}"><h3>{title}</h3>{svg}'
        f"<figcaption>{_CAPTIONS[title]}</figcaption></figure>"
        for width, title, svg in cards
    )


def _charts(result: DemoResult, png: Path) -> Iterable[tuple[str, str, str]]:
    if result.phases:
        ways = [
            charts.Way(*LOOKS[name], worse(result, name), harvest(result, name), rollout_rate(result, name))
            for name in SHARING
        ]
        yield " wide", "Ways to share one GPU", charts.sharing_chart(ways, (MIN_ATTAINMENT, MIN_HARVEST), png)
    if (slo := objectives(result)) is not None:
        for name, slo_s in (("ttft", slo.ttft_s), ("tpot", slo.tpot_s)):
            found = {
                phase: [latency(result, name, percent, phase) for percent in (50, 99)] for phase in LOOKS
            }
            rows = [
                (*LOOKS[phase], 1e3 * p50, 1e3 * p99)
                for phase, (p50, p99) in found.items()
                if p50 is not None and p99 is not None
            ]
            yield "", f"Serving {name.upper()}", charts.latency_chart(name.upper(), rows, slo_s * 1000)
    if any(not sync.is_base for sync in result.syncs):
        yield "", "Bytes per weight sync", charts.sync_chart(result.syncs)
    if len(result.rewards) > 1:
        yield "", "Reward per training step", charts.reward_chart(result.rewards)

    if len(result.slab_samples) > 1:
        chart = charts.slab_chart(result.slab_samples, result.slab_events)
        yield " wide", "Slabs of the shared pool", chart


_CAPTIONS = {
    "Ways to share one GPU": "The dashed lines are the targets. Of the shares of requests that met the TTFT "
    "and the TPOT objective, the smaller one counts. All phases have the same requests and rollouts.",
    "Serving TTFT": "Time to first token from the scheduled arrival, over requests that got one.",
    "Serving TPOT": "Mean time per output token after the first, per request.",
    "Bytes per weight sync": "Each publish beside the whole model and an index-and-value list of the same "
    "change.",
    "Slabs of the shared pool": "KV memory held by each model. The line is how far the rollout budget "
    "reaches above serving's slabs; marks above show when rollouts lost memory or turns.",
    "Reward per training step": "Multi-turn FrozenLake, trained with GRPO on rollouts from the shared GPU.",
}
