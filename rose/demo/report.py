"""The demo's report: one HTML file that needs nothing else, one picture, and a one-page terminal summary.

Owns the page. Promises no network access, no script, and the same numbers as the JSON figures.
Never computes a figure itself.
"""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rose.demo import charts
from rose.demo.figures import (
    CRITERIA,
    MIN_ATTAINMENT,
    MIN_HARVEST,
    Figures,
    busy_share,
    harvest,
    judge,
    rollout_rate,
    worse_attainment,
)
from rose.demo.records import DemoResult, PhaseName
from rose.measure.environment import Environment
from rose.measure.figures import LATENCIES, latency_s
from rose.measure.records import Window

_ALONE, _WITHOUT, _UNDER = "#8592a3", "#b3568f", "#1f8a70"
LOOKS = {
    PhaseName.SERVING_ALONE: ("serving alone", _ALONE),
    PhaseName.ROLLOUT_ALONE: ("rollouts alone", _ALONE),
    PhaseName.NAIVE: ("naive co-location", _WITHOUT),
    PhaseName.ALTERNATE: ("strict alternation", _WITHOUT),
    PhaseName.STATIC: ("static split", _WITHOUT),
    PhaseName.ROSE: ("ROSE, full load", _UNDER),
    PhaseName.TRAINING: ("ROSE, RL training", _UNDER),
}
"""Each phase's name and colour, in the order of tables and charts."""
SHARING = tuple(LOOKS)[:-1]
"""Phases with a harvest: in the training, rollouts also run elsewhere, and wait for the trainer."""
DISTURBED_SHARE = 0.05
"""Windows in which other processes took more CPU than this are marked."""

_STYLE = """
* { box-sizing: border-box; }
body { margin: 0; background: #f5f6f8; color: #1c2430; line-height: 1.5;
  font: 16px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 2.2rem 1.2rem 3rem; }
h1 { font-size: 1.6rem; line-height: 1.3; margin: 0 0 .6rem; } h2 { font-size: 1.15rem; margin: 0 0 .4rem; }
.lead, .foot, figcaption { color: #647082; } figcaption, .foot { font-size: .85rem; }
.card { background: #fff; border: 1px solid #e2e6ec; border-radius: 10px; padding: 1rem 1.1rem;
  margin: 1rem 0 0; overflow-x: auto; }
svg { display: block; width: 100%; height: auto; margin: .4rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; }
th, td { text-align: right; padding: .38rem .5rem; border-bottom: 1px solid #e2e6ec;
  font-variant-numeric: tabular-nums; vertical-align: top; }
td:not(:first-child):not(:last-child) { white-space: nowrap; }
th { color: #647082; } th:first-child, td:first-child { text-align: left; }
"""
_STATES = {True: "met", False: "fell short", None: "not judged"}


def write_report(result: DemoResult, figures: Figures, env: Environment, path: Path) -> None:
    """Writes the HTML report of a run to ``path``, creating its folder, and beside it the picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_page(result, figures, env, path.with_suffix(".png")))


def print_summary(result: DemoResult, figures: Figures, env: Environment, console: Console) -> None:
    """One terminal page: the result, the criteria, the phases."""
    console.print(headline(figures), style="bold", markup=False)
    if warning := disturbance(result):
        console.print(warning, style="bold red", markup=False)
    for head, rows in ((_CRITERIA_HEAD[:-1], _criteria(result, figures)), (_PHASE_HEAD, _phases(result))):
        table = Table(box=None)
        for index, name in enumerate(head[:_NUM_NARROW]):
            table.add_column(name, justify="right" if index else "left", no_wrap=name == "phase")
        for row in rows:
            table.add_row(*row[: min(len(head), _NUM_NARROW)])
        console.print(table)
    for line in (_wire(figures), *result.notes, env.describe()):
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


def disturbance(result: DemoResult) -> str:
    """Returns a warning if a phase was disturbed by other processes, else an empty text."""
    disturbed = [phase for phase in result.phases if phase.foreign_cpu_share > DISTURBED_SHARE]
    if not disturbed:
        return ""
    shares = ", ".join(
        f"{phase.foreign_cpu_share:.0%} in {LOOKS[PhaseName(phase.name)][0]}" for phase in disturbed
    )
    return (
        f"DISTURBED: other processes used more than {DISTURBED_SHARE:.0%} of this machine's CPU: {shares}. "
        "Latencies and speeds of this run are not ROSE's alone; run the demo again on an idle machine."
    )


_PHASE_HEAD = (
    *("phase", "in SLOs", "TTFT P50, ms", "P99", "TPOT P50, ms", "P99", "rollout tok/s", "of alone"),
    *("length, s", "requests", "failed", "serving busy", "aborted turns", "other CPU"),
)
_NUM_NARROW = 8
"""The columns that a terminal has room for."""
_CRITERIA_HEAD = ("criterion", "measured", "asked", "", "beside it")


def _criteria(result: DemoResult, figures: Figures) -> list[tuple[str, ...]]:
    met = judge(result, figures)
    return [
        (
            title,
            _short(figures[name].value, ",.4g"),
            figures[name].target or "",
            _STATES[met[name]],
            "; ".join(f"{peer} {_short(value, ',.4g')}" for peer, value in figures[name].peers.items()),
        )
        for name, title in CRITERIA.items()
    ]


def _wire(figures: Figures) -> str:
    wire = figures["wire_bytes_per_changed_element"]
    beside = ", ".join(f"{name} {_short(value, ',.4g')}" for name, value in wire.peers.items())
    return f"A weight sync sends {_short(wire.value, ',.4g')} bytes per changed element ({beside})."


def _phases(result: DemoResult) -> list[tuple[str, ...]]:
    return [_phase_row(result, name, window) for name in LOOKS for window in result.windows(name)]


def _phase_row(result: DemoResult, name: PhaseName, window: Window) -> tuple[str, ...]:
    latencies = [latency_s(window.requests, which, percent) for which in LATENCIES for percent in (50, 99)]
    foreign = window.foreign_cpu_share
    return (
        LOOKS[name][0],
        _short(worse_attainment(result, name), ".1%"),
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


def _page(result: DemoResult, figures: Figures, env: Environment, png: Path) -> str:
    num_met = sum(is_met is True for is_met in judge(result, figures).values())
    warning = html.escape(disturbance(result))
    mode = " This was a quick run: small samples, wide spreads." if result.is_quick else ""
    parts = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>ROSE demo report</title>'
        f"<style>{_STYLE}</style></head><body><main><h1>{html.escape(headline(figures))}</h1>",
        f'<p class="lead">{num_met} of {len(CRITERIA)} criteria met in {result.wall_s / 60:.1f} minutes. '
        "A serving engine and a rollout engine, two real vLLM processes, share one slab pool and one "
        f"core that stands for the GPU; serving comes first.{mode}</p>",
        *([f"<p><strong>{warning}</strong></p>"] if warning else []),
        *_charts(result, png),
        _card("Criteria", _table(_CRITERIA_HEAD, _criteria(result, figures)), _wire(figures)),
        _card("Phases", _table(_PHASE_HEAD, _phases(result)), "P50 and P99 are over answered requests."),
        *(f'<p class="foot">{html.escape(each)}</p>' for each in (*result.notes, env.describe())),
        "</main></body></html>",
    )
    return "\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells of plain text."""
    titles = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"


def _card(title: str, content: str, caption: str) -> str:
    text = html.escape(caption)
    return f'<figure class="card"><h2>{title}</h2>{content}<figcaption>{text}</figcaption></figure>'


def _charts(result: DemoResult, png: Path) -> list[str]:
    """The charts of what was measured. Importing matplotlib waits until there is something to draw."""
    if not result.phases:
        return []
    import matplotlib

    ways = [
        charts.Way(
            *LOOKS[name], worse_attainment(result, name), harvest(result, name), rollout_rate(result, name)
        )
        for name in SHARING
    ]
    with matplotlib.rc_context(charts.STYLE):
        sharing = charts.sharing_chart(ways, (MIN_ATTAINMENT, MIN_HARVEST), png)
        found = [_card("Ways to share one GPU", sharing, _SHARING_CAPTION)]
        if len(result.slab_samples) > 1:
            slabs = charts.slab_chart(result.slab_samples, result.slab_events)
            found.append(_card("Slabs of the shared pool", slabs, _SLABS_CAPTION))
        if len(result.steps) > 1:
            reward = charts.reward_chart(result.steps)
            found.append(_card("Reward per training step", reward, _REWARD_CAPTION))
    return found


_SHARING_CAPTION = (
    "The dashed lines are the targets. Of the shares of requests that met the TTFT and the TPOT objective, "
    "the smaller one counts. All phases have the same requests and rollouts."
)
_SLABS_CAPTION = (
    "KV memory held by each model. The line is how far the rollout budget reaches above serving's slabs; "
    "marks above show when rollouts lost memory or turns."
)
_REWARD_CAPTION = "Multi-turn FrozenLake, trained with GRPO on rollouts from the shared GPU."
