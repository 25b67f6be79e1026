"""The report's charts, as inline SVG that follows the page's light or dark colours.

Owns how a demo run looks. Promises text that stays text (selectable, in the page's font) and no
colour of its own: every colour is a CSS variable of the page. Never computes figures.
"""

import functools
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec

from rose.demo.records import RewardPoint, SlabEvent, SlabEventKind, SlabSample, SyncPoint

# matplotlib wants colours, the page wants variables: each variable has a marker colour that no
# chart would use otherwise, and the SVG's text is rewritten afterwards.
_VARIABLES = {
    "#010101": "var(--ink)",
    "#020202": "var(--muted)",
    "#030303": "var(--grid)",
    "#040404": "var(--serving)",
    "#050505": "var(--rollout)",
    "#060606": "var(--free)",
    "#070707": "var(--slo)",
    "#080808": "var(--alone)",
    "#090909": "var(--naive)",
    "#0a0a0a": "var(--rose)",
    "#0b0b0b": "var(--card)",
}
_MARKERS = {variable[6:-1]: marker for marker, variable in _VARIABLES.items()}
INK, MUTED, GRID = _MARKERS["ink"], _MARKERS["muted"], _MARKERS["grid"]
SERVING, ROLLOUT, FREE = _MARKERS["serving"], _MARKERS["rollout"], _MARKERS["free"]
SLO_LINE, ALONE, NAIVE, ROSE = _MARKERS["slo"], _MARKERS["alone"], _MARKERS["naive"], _MARKERS["rose"]
CARD = _MARKERS["card"]

P = ParamSpec("P")

_STYLE = {
    "svg.fonttype": "none",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
_EVENT_LOOKS = (
    (SlabEventKind.CUT, "cuts", "v"),
    (SlabEventKind.FREEZE, "freezes", "s"),
    (SlabEventKind.LEASE_EXPIRED, "leases expired", "D"),
    (SlabEventKind.ABORT, "aborts", "X"),
)
REWARD_WINDOW = 5
HALF, WIDE = 5.4, 11.0
"""Figure widths in inches, for text of about 13 px in half a page and in a whole one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyRow:
    """P50 and P99 of one phase, in milliseconds."""

    label: str
    color: str
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar with what is written at its end."""

    label: str
    color: str
    value: float
    text: str


def _styled(draw: Callable[P, str]) -> Callable[P, str]:
    """Runs a chart under our style: matplotlib reads it whenever an element is made, and again on saving."""

    @functools.wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> str:
        import matplotlib

        with matplotlib.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return styled


@_styled
def reward_chart(rewards: Sequence[RewardPoint]) -> str:
    """Reward per training step with its moving mean, and the share of solved episodes."""
    figure, axes = _canvas("reward", WIDE, 2.9)
    steps = [point.step for point in rewards]
    means = [point.reward_mean for point in rewards]
    axes.plot(
        steps, [p.success for p in rewards], color=MUTED, linewidth=1.2, linestyle=":", label="success share"
    )
    axes.plot(steps, means, "o", color=ROLLOUT, markersize=5, alpha=0.45, label="reward per step")
    axes.plot(
        steps, _moving_mean(means), color=ROLLOUT, linewidth=2.2, label=f"mean of {REWARD_WINDOW} steps"
    )
    axes.set_xlabel("training step")
    axes.set_ylabel("reward")
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend_above(axes)
    return _svg(figure)


@_styled
def latency_chart(name: str, rows: Sequence[LatencyRow], slo_ms: float) -> str:
    """P50 and P99 of each phase on one line each, against the SLO."""
    figure, axes = _canvas(f"latency-{name}", HALF, 0.5 * len(rows) + 1.15)
    right = max([slo_ms, *(row.p99_ms for row in rows)]) * 1.16
    for index, row in enumerate(rows):
        axes.plot([row.p50_ms, row.p99_ms], [index, index], color=row.color, linewidth=2.5, zorder=2)
        axes.plot(
            row.p50_ms, index, "o", color=row.color, markerfacecolor=CARD, markersize=8, mew=2, zorder=3
        )
        axes.plot(row.p99_ms, index, "o", color=row.color, markersize=8, zorder=3)
        value = f"{row.p99_ms:,.0f}" if row.p99_ms >= 100 else f"{row.p99_ms:.1f}"
        axes.annotate(value, (row.p99_ms, index), (8, 0), textcoords="offset points", va="center", fontsize=9)
    axes.axvline(slo_ms, color=SLO_LINE, linestyle="--", linewidth=1.5, zorder=1)
    axes.text(slo_ms, -0.62, f"SLO {slo_ms:,.0f} ms", color=SLO_LINE, ha="center", va="bottom", fontsize=9)
    axes.set_yticks(range(len(rows)), [row.label for row in rows], color=INK)
    axes.set_ylim(len(rows) - 0.5, -0.6)
    axes.set_xlim(0, right)
    axes.set_xlabel(f"{name} in ms: ring P50, dot P99")
    axes.grid(axis="y", visible=False)
    return _svg(figure)


@_styled
def bar_chart(name: str, bars: Sequence[Bar], unit: str) -> str:
    """Horizontal bars, each with its value written at the end."""
    figure, axes = _canvas(name, HALF, 0.62 * len(bars) + 0.85)
    top = max([bar.value for bar in bars], default=0.0) or 1.0
    axes.barh(range(len(bars)), [bar.value for bar in bars], color=[bar.color for bar in bars], height=0.6)
    for index, bar in enumerate(bars):
        axes.text(bar.value + top * 0.015, index, bar.text, va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars], color=INK)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0, top * 1.3)
    axes.set_xlabel(unit)
    axes.grid(axis="y", visible=False)
    return _svg(figure)


@_styled
def slab_chart(samples: Sequence[SlabSample], events: Sequence[SlabEvent]) -> str:
    """Slabs of each model over time, with cuts, freezes, leases and aborts in a strip above."""
    kinds = [look for look in _EVENT_LOOKS if any(event.kind is look[0] for event in events)]
    strip = max(1, len(kinds))
    figure, (marks, axes) = _canvas("slabs", WIDE, 3.3 + 0.26 * strip, rows=(0.26 * strip, 3.0))
    start_s = samples[0].t_s
    times = [sample.t_s - start_s for sample in samples]
    layers = (
        ("serving", SERVING, [s.serving for s in samples]),
        ("rollout", ROLLOUT, [s.rollout for s in samples]),
        ("free", FREE, [s.free for s in samples]),
    )
    axes.stackplot(
        times,
        *(values for _, _, values in layers),
        colors=[color for _, color, _ in layers],
        labels=[label for label, _, _ in layers],
        step="post",
        linewidth=0,
    )
    total = max(s.serving + s.rollout + s.free for s in samples)
    budget = [s.serving + min(s.budget, total - s.serving) for s in samples]
    axes.step(times, budget, where="post", color=INK, linewidth=1.3, label="rollout budget")
    axes.set_ylim(0, total)
    axes.set_xlim(times[0], times[-1])
    axes.set_xlabel("seconds")
    axes.set_ylabel("slabs")
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=9, handlelength=1.2)
    _mark_events(marks, kinds, events, start_s, (times[0], times[-1]))
    return _svg(figure)


@_styled
def sync_chart(syncs: Sequence[SyncPoint]) -> str:
    """Bytes of each delta publish beside dense and COO, on a logarithmic axis."""
    figure, axes = _canvas("sync", HALF, 2.75)
    deltas = [sync for sync in syncs if not sync.is_base]
    numbers = [int(sync.version.rpartition("/")[2]) for sync in deltas]
    for label, color, values in (
        ("dense", MUTED, [sync.dense_bytes for sync in deltas]),
        ("COO", NAIVE, [sync.coo_bytes for sync in deltas]),
        ("on the wire", ROSE, [sync.wire_bytes for sync in deltas]),
    ):
        axes.plot(numbers, values, color=color, linewidth=2, marker="o", markersize=3.5, label=label)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: human_bytes(value))
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.tick_params(which="minor", length=0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("weight version")
    axes.set_ylabel("bytes per sync")
    _legend_above(axes)
    return _svg(figure)


def human_bytes(count: float) -> str:
    """Bytes with a decimal unit, e.g. 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _mark_events(
    axes: Any,
    kinds: Sequence[tuple[SlabEventKind, str, str]],
    events: Sequence[SlabEvent],
    start_s: float,
    limits_s: tuple[float, float],
) -> None:
    for row, (kind, _, marker) in enumerate(kinds):
        at_s = [event.t_s - start_s for event in events if event.kind is kind]
        axes.plot(at_s, [row] * len(at_s), marker, color=SLO_LINE, markersize=6, alpha=0.8, clip_on=False)
    counts = {kind: sum(event.count for event in events if event.kind is kind) for kind, _, _ in kinds}
    labels = [f"{label} ({counts[kind]})" for kind, label, _ in kinds]
    axes.set_yticks(range(len(kinds)), labels, color=INK, fontsize=9)
    if not kinds:
        axes.text(sum(limits_s) / 2, 0, "no cut, freeze, expired lease or abort", ha="center", color=MUTED)
    axes.set_ylim(max(len(kinds), 1) - 0.5, -0.5)
    axes.set_xlim(*limits_s)
    axes.grid(axis="x", visible=False)
    axes.tick_params(labelbottom=False)
    axes.spines[["left", "bottom"]].set_visible(False)


def _canvas(name: str, width: float, height: float, rows: Sequence[float] = ()) -> tuple[Any, Any]:
    """A figure without pyplot's global state; ``name`` keeps element ids apart on one page."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.set_label(name)
    if not rows:
        return figure, figure.subplots()
    return figure, figure.subplots(len(rows), 1, height_ratios=rows)


def _legend_above(axes: Any) -> None:
    axes.legend(
        loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, fontsize=9, handlelength=1.6, borderaxespad=0.2
    )


def _moving_mean(values: Sequence[float]) -> list[float]:
    windows = [values[max(0, i + 1 - REWARD_WINDOW) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _svg(figure: Any) -> str:
    """The figure as an <svg> element that scales with its container."""
    import matplotlib

    out = io.StringIO()
    name = figure.get_label()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    # matplotlib's own style sheet would reach every element of the page.
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(
        r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', rf'<svg viewBox="\1" role="img" class="{name}">', svg, count=1
    )
    svg = re.sub(r' id="(?:figure|axes|patch|line2d|text|matplotlib|xtick|ytick|legend)[^"]*"', "", svg)
    for marker, variable in _VARIABLES.items():
        svg = svg.replace(marker, variable)
    return re.sub(r"font-family: [^;\"]*", "font-family: inherit", svg)
