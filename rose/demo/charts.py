"""The report's charts, as inline SVG that follows the page's light or dark colours.

Owns how a demo run looks. Promises text that stays text (selectable, in the page's font) and no colour of its
own: every colour of an SVG is a CSS variable of the page. Never computes figures.
"""

import io
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.demo.records import RewardPoint, SyncPoint
from rose.measure.slabs import SlabEvent, SlabEventKind, SlabSample

LIGHT: Mapping[str, str] = {
    **{"page": "#f5f6f8", "card": "#ffffff", "ink": "#1c2430", "muted": "#647082", "grid": "#e2e6ec"},
    **{"serving": "#3b6fd4", "rollout": "#e0872a", "free": "#dfe4ea", "slo": "#c22f3d", "alone": "#8592a3"},
    **{"naive": "#b3568f", "rose": "#1f8a70", "met": "#1f8a4c", "open": "#8a6d1f"},
}
"""The page's colours by variable, no two alike: charts are drawn with them, and their SVGs name variables."""
_C = LIGHT

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rose",
    "font.family": "DejaVu Sans",
    "text.color": _C["ink"],
    "axes.edgecolor": _C["grid"],
    "axes.labelcolor": _C["muted"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": _C["grid"],
    "xtick.color": _C["muted"],
    "ytick.color": _C["muted"],
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
_EVENT_LOOKS = {
    SlabEventKind.CUT: ("cuts", "v"),
    SlabEventKind.FREEZE: ("freezes", "s"),
    SlabEventKind.LEASE_EXPIRED: ("leases expired", "D"),
    SlabEventKind.ABORT: ("aborts", "X"),
}
REWARD_WINDOW = 5
HALF, WIDE = 5.4, 11.0
"""Figure widths in inches, for text of about 13 px in half a page and in a whole one."""


def style() -> AbstractContextManager[None]:
    """Our look, for all charts made within it: matplotlib reads it for every element, and again on saving."""
    import matplotlib

    context: AbstractContextManager[None] = matplotlib.rc_context(_STYLE)
    return context


@dataclass(frozen=True, slots=True)
class Way:
    """One way to use the GPU: what serving and rollouts have of it; None where one of them does not run."""

    label: str
    color: str
    attainment: float | None
    harvest: float | None
    tokens_per_s: float | None


def sharing_chart(ways: Sequence[Way], targets: tuple[float, float], png: Path) -> str:
    """Draws what each way keeps of serving's objectives and of the rollouts' speed, and both targets.

    Writes the same picture to ``png``.
    """
    figure, panels = _canvas(WIDE, 0.45 * len(ways) + 0.8, ncols=2, sharey=True)
    kept = [(way.attainment, "" if way.attainment is None else f"{way.attainment:.0%}") for way in ways]
    made = [
        (w.harvest, "" if w.harvest is None else f"{w.harvest:.0%}, {w.tokens_per_s:,.0f}/s") for w in ways
    ]
    titles = ("serving requests within their objectives", "rollout tokens, of rollouts alone")
    for axes, cells, target, title in zip(panels, (kept, made), targets, titles, strict=True):
        colors = [_C[way.color] for way in ways]
        drawn = axes.barh(range(len(ways)), [value or 0.0 for value, _ in cells], color=colors, height=0.6)
        axes.bar_label(drawn, [text for _, text in cells], padding=4, fontsize=9)
        axes.axvline(target, color=_C["slo"], linestyle="--", linewidth=1.5, zorder=1)
        _name_rows(axes, [way.label for way in ways])
        axes.set(xlim=(0, 1.35 * max(1.0, *(value or 0.0 for value, _ in cells))), xlabel=title)
        axes.set_xticks([0, 0.5, 1], ["0%", "50%", "100%"])
    figure.savefig(png, dpi=150, facecolor=_C["card"])
    return _svg(figure)


def reward_chart(rewards: Sequence[RewardPoint]) -> str:
    """Draws the reward per training step with its moving mean, and the share of solved episodes."""
    figure, axes = _canvas(HALF, 2.75)
    steps, means = [point.step for point in rewards], [point.reward_mean for point in rewards]
    windows = [means[max(0, i + 1 - REWARD_WINDOW) : i + 1] for i in range(len(means))]
    moving = [sum(window) / len(window) for window in windows]
    axes.plot(steps, [point.success for point in rewards], ":", color=_C["muted"], label="success share")
    axes.plot(steps, means, "o", color=_C["rollout"], alpha=0.45, label="reward per step")
    axes.plot(steps, moving, color=_C["rollout"], linewidth=2.2, label=f"mean of {REWARD_WINDOW} steps")
    axes.set(xlabel="training step", ylabel="reward")
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend_above(axes)
    return _svg(figure)


def latency_chart(name: str, rows: Sequence[tuple[str, str, float, float]], slo_ms: float) -> str:
    """Draws a line for each phase (label, colour, P50, P99 in milliseconds), and the SLO."""
    figure, axes = _canvas(HALF, 0.5 * len(rows) + 1.15)
    for index, (_, variable, p50_ms, p99_ms) in enumerate(rows):
        color = _C[variable]
        axes.plot([p50_ms, p99_ms], [index, index], color=color, linewidth=2.5, zorder=2)
        axes.plot(p50_ms, index, "o", color=color, markerfacecolor=_C["card"], markersize=8, mew=2, zorder=3)
        axes.plot(p99_ms, index, "o", color=color, markersize=8, zorder=3)
        text = f"{p99_ms:,.0f}" if p99_ms >= 100 else f"{p99_ms:.1f}"
        axes.annotate(text, (p99_ms, index), (8, 0), textcoords="offset points", va="center", fontsize=9)
    axes.axvline(slo_ms, color=_C["slo"], linestyle="--", linewidth=1.5, zorder=1)
    axes.text(slo_ms, -0.62, f"SLO {slo_ms:,.0f} ms", color=_C["slo"], ha="center", va="bottom", fontsize=9)
    _name_rows(axes, [label for label, *_ in rows])
    right_ms = max([slo_ms, *(p99_ms for *_, p99_ms in rows)])
    axes.set(xlim=(0, 1.16 * right_ms), xlabel=f"{name} in ms: ring P50, dot P99")
    return _svg(figure)


def slab_chart(samples: Sequence[SlabSample], events: Sequence[SlabEvent]) -> str:
    """Draws the slabs of each model over time, with cuts, freezes, leases and aborts in a strip above."""
    kinds = [kind for kind in _EVENT_LOOKS if any(event.kind is kind for event in events)]
    strip = 0.26 * max(1, len(kinds))
    figure, (marks, axes) = _canvas(WIDE, 3.3 + strip, nrows=2, height_ratios=(strip, 3.0))
    start_s = samples[0].t_s
    times = [sample.t_s - start_s for sample in samples]
    layers = [[sample.serving for sample in samples], [sample.rollout for sample in samples]]
    layers.append([sample.free for sample in samples])
    labels = ("serving", "rollout", "free")
    axes.stackplot(
        times, *layers, labels=labels, colors=[_C[each] for each in labels], step="post", linewidth=0
    )
    total = max(map(sum, zip(*layers, strict=True)))
    budget = [min(sample.serving + sample.budget, total) for sample in samples]
    axes.step(times, budget, where="post", color=_C["ink"], linewidth=1.3, label="rollout budget")
    axes.set(ylim=(0, total), xlim=(times[0], times[-1]), xlabel="seconds", ylabel="slabs")
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.16), handlelength=1.2)
    names = []
    for row, kind in enumerate(kinds):
        found = [event for event in events if event.kind is kind]
        label, marker = _EVENT_LOOKS[kind]
        names.append(f"{label} ({sum(event.count for event in found)})")
        at_s = [event.t_s - start_s for event in found]
        marks.plot(at_s, [row] * len(at_s), marker, color=_C["slo"], alpha=0.8, clip_on=False)
    _name_rows(marks, names if names else ["no cut, freeze or abort"])
    marks.set_xlim(times[0], times[-1])
    marks.grid(visible=False)
    marks.tick_params(labelbottom=False)
    marks.spines[["left", "bottom"]].set_visible(False)
    return _svg(figure)


def sync_chart(syncs: Sequence[SyncPoint]) -> str:
    """Draws the bytes of each delta publish beside dense and COO, on a logarithmic axis."""
    figure, axes = _canvas(HALF, 2.75)
    deltas = [sync for sync in syncs if not sync.is_base]
    numbers = [int(sync.version.rpartition("/")[2]) for sync in deltas]
    for label, color, values in (
        ("dense", "muted", [sync.dense_bytes for sync in deltas]),
        ("COO", "naive", [sync.coo_bytes for sync in deltas]),
        ("on the wire", "rose", [sync.wire_bytes for sync in deltas]),
    ):
        axes.plot(numbers, values, color=_C[color], linewidth=2, marker="o", markersize=3.5, label=label)
    axes.set(yscale="log", xlabel="weight version", ylabel="bytes per sync")
    axes.yaxis.set_major_formatter(lambda value, _: human_bytes(value))
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.xaxis.get_major_locator().set_params(integer=True)
    _legend_above(axes)
    return _svg(figure)


def human_bytes(count: float) -> str:
    """Bytes with a decimal unit, e.g. 1.5 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _canvas(width: float, height: float, **grid: Any) -> tuple[Any, Any]:
    """A figure without pyplot's global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(**grid)


def _name_rows(axes: Any, labels: Sequence[str]) -> None:
    """One label a row, from the top."""
    axes.set_yticks(range(len(labels)), labels, color=_C["ink"])
    axes.set_ylim(len(labels) - 0.5, -0.6)
    axes.grid(axis="y", visible=False)


def _legend_above(axes: Any) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, handlelength=1.6, borderaxespad=0.2)


def _svg(figure: Any) -> str:
    """The figure as an <svg> element that scales with its container."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    # matplotlib's own style sheet would reach every element of the page.
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*?viewBox="([^"]+)"[^>]*>', r'<svg viewBox="\1" role="img">', svg, count=1)
    svg = re.sub(r' id="(?:figure|axes|patch|line2d|text|matplotlib|xtick|ytick|legend)[^"]*"', "", svg)
    for name, color in LIGHT.items():
        svg = svg.replace(color, f"var(--{name})")
    return re.sub(r"font-family: [^;\"]*", "font-family: inherit", svg)
