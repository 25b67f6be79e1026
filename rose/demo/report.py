"""The demo's report: one HTML file that needs nothing else, and a one-page terminal summary.

Owns the page. Promises no network access, no script, and the same numbers as the JSON figures.
Never computes a figure itself.
"""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rose.demo import charts, page
from rose.demo.figures import DemoFigures, Verdict, compute_figures, rollout_rate
from rose.demo.records import DemoResult, PhaseName
from rose.demo.verdicts import judge
from rose.measure.environment import Environment, collect_env
from rose.measure.figures import Figure, percentile, pooled_requests, tpots_s, ttfts_s

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

_STATES = {True: ("met", "met"), False: ("missed", "fell short"), None: ("open", "not judged")}


def write_report(result: DemoResult, path: Path, env: Environment | None = None) -> None:
    """Write the HTML report of a run to ``path``, creating its folder."""
    figures = compute_figures(result, env if env is not None else _env(result))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_page(result, figures, judge(result, figures)))


def print_summary(result: DemoResult, console: Console, env: Environment | None = None) -> None:
    """One terminal page: the verdicts, the latencies, the figures."""
    figures = compute_figures(result, env if env is not None else _env(result))
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


def figures_table(figures: DemoFigures) -> Table:
    """The figures as a terminal table with the environment below."""
    table = Table(box=None, caption=figures.env.describe(), caption_justify="left")
    for head in _FIGURE_HEAD:
        table.add_column(head, overflow="fold")
    for figure in figures.figures:
        table.add_row(*map(escape, _figure_row(figure)))
    return table


_LATENCY_HEAD = (
    "phase",
    "requests",
    "failed",
    "TTFT P50, ms",
    "TTFT P99, ms",
    "TPOT P50, ms",
    "TPOT P99, ms",
)
_FIGURE_HEAD = ("figure", "value", "unit", "target", "beside it")


def _env(result: DemoResult) -> Environment:
    return collect_env(seed=result.seed, quick=result.is_quick)


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
    mode = " This was a quick run: small samples, wide spreads." if result.is_quick else ""
    return page.document(
        "ROSE demo report",
        (
            "<h1>RL rollouts in a serving GPU's slack</h1>",
            f'<p class="lead"><strong>{html.escape(headline(figures))}</strong></p>',
            f'<p class="lead">{met} of {len(verdicts)} criteria met in {result.wall_s / 60:.1f} minutes. '
            "A serving engine and a rollout engine, two real vLLM processes, share one slab pool and one "
            f"core that stands for the GPU; serving comes first.{mode}</p>",
            f'<section class="verdicts">{"".join(map(_verdict_card, verdicts))}</section>',
            f'<h2>What happened</h2><section class="charts">{"".join(_chart_cards(result))}</section>',
            "<h2>Serving latency</h2>",
            page.table(_LATENCY_HEAD, _latency_rows(result)),
            f"<h2>Windows</h2>{page.table(_WINDOW_HEAD, _window_rows(result))}",
            f"<h2>Figures</h2>{page.table(_FIGURE_HEAD, map(_figure_row, figures.figures))}",
            page.bullets("Notes", result.notes),
            f'<p class="foot">{html.escape(figures.env.describe())}</p>',
        ),
    )


def _verdict_card(verdict: Verdict) -> str:
    state, label = _STATES[verdict.is_met]
    return (
        f'<article class="card verdict {state}"><span class="badge">{label}</span>'
        f"<h3>{html.escape(verdict.title)}</h3><p>{html.escape(verdict.text)}</p></article>"
    )


def _chart_cards(result: DemoResult) -> Iterable[str]:
    for name, values, slo_s in (("TTFT", ttfts_s, result.slo.ttft_s), ("TPOT", tpots_s, result.slo.tpot_s)):
        rows = []
        for phase, label, color in SERVING_PHASES:
            seconds = values(pooled_requests(result.windows(phase)))
            p50, p99 = percentile(seconds, 50), percentile(seconds, 99)
            if p50 is not None and p99 is not None:
                rows.append(charts.LatencyRow(label=label, color=color, p50_ms=p50 * 1000, p99_ms=p99 * 1000))
        if rows:
            yield page.card(
                f"Serving {name}", charts.latency_chart(name, rows, slo_s * 1000), _LATENCY_CAPTIONS[name]
            )
    bars = _rollout_bars(result)
    if bars:
        svg = charts.bar_chart("rollout", bars, "rollout tokens per second")
        yield page.card("Rollout tokens harvested", svg, _ROLLOUT_CAPTION)
    if any(not sync.is_base for sync in result.syncs):
        yield page.card("Bytes per weight sync", charts.sync_chart(result.syncs), _SYNC_CAPTION)
    if len(result.slab_samples) > 1:
        svg = charts.slab_chart(result.slab_samples, result.slab_events)
        yield page.card("Slabs of the shared pool", svg, _SLAB_CAPTION, is_wide=True)
    if len(result.rewards) > 1:
        svg = charts.reward_chart(result.rewards)
        yield page.card("Reward per training step", svg, _REWARD_CAPTION, is_wide=True)


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


def _rollout_bars(result: DemoResult) -> list[charts.Bar]:
    alone = rollout_rate(result.windows(PhaseName.ROLLOUT_ALONE))
    bars = []
    for phase, label, color in ROLLOUT_PHASES:
        rate = rollout_rate(result.windows(phase))
        if rate is not None:
            text = f"{rate:,.0f}" + (f"  ({rate / alone:.0%})" if alone else "")
            bars.append(charts.Bar(label=label, color=color, value=rate, text=text))
    return bars


_WINDOW_HEAD = (
    "window",
    "length, s",
    "requests",
    "rollout tokens",
    "serving busy",
    "aborted turns",
    "other CPU",
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
