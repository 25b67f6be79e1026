"""The report's charts, as inline SVG.

Owns how a demo run looks. Promises text that stays text, selectable and in the page's font. Never computes
figures.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rose.demo.figures import REWARD_WINDOW
from rose.demo.records import TrainingStep
from rose.measure.slabs import SlabEvent, SlabEventKind, SlabSample

INK, MUTED, GRID, CARD = "#1c2430", "#647082", "#e2e6ec", "#ffffff"
SERVING, ROLLOUT, FREE, TARGET = "#3b6fd4", "#e0872a", "#dfe4ea", "#c22f3d"
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rose",
    "font.family": "DejaVu Sans",
    "text.color": INK,
    **dict.fromkeys(("axes.labelcolor", "xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), GRID),
    **dict.fromkeys(("axes.axisbelow", "axes.grid"), True),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0),
    "legend.fontsize": 9,
}
"""matplotlib's settings, to be in force while charts are made and saved."""
_EVENT_LOOKS = {
    SlabEventKind.CUT: ("cuts", "v"),
    SlabEventKind.FREEZE: ("freezes", "s"),
    SlabEventKind.LEASE_EXPIRED: ("leases expired", "D"),
    SlabEventKind.ABORT: ("aborts", "X"),
}
WIDTH = 11.0
"""In inches, for text of about 13 px in a whole page."""


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
    figure, panels = _canvas(0.45 * len(ways) + 0.8, ncols=2, sharey=True)
    kept = [(way.attainment, "" if way.attainment is None else f"{way.attainment:.0%}") for way in ways]
    made = [
        (w.harvest, "" if w.harvest is None else f"{w.harvest:.0%}, {w.tokens_per_s:,.0f}/s") for w in ways
    ]
    titles = ("serving requests within their objectives", "rollout tokens, of rollouts alone")
    for axes, cells, target, title in zip(panels, (kept, made), targets, titles, strict=True):
        colors = [way.color for way in ways]
        drawn = axes.barh(range(len(ways)), [value or 0.0 for value, _ in cells], color=colors, height=0.6)
        axes.bar_label(drawn, [text for _, text in cells], padding=4, fontsize=9)
        axes.axvline(target, color=TARGET, linestyle="--", linewidth=1.5, zorder=1)
        _name_rows(axes, [way.label for way in ways])
        axes.set(xlim=(0, 1.35 * max(1.0, *(value or 0.0 for value, _ in cells))), xlabel=title)
        axes.set_xticks([0, 0.5, 1], ["0%", "50%", "100%"])
    figure.savefig(png, dpi=150, facecolor=CARD)
    return _svg(figure)


def reward_chart(training: Sequence[TrainingStep]) -> str:
    """Draws the reward per training step with its moving mean, and the share of solved episodes."""
    figure, axes = _canvas(2.75)
    steps, means = [each.step for each in training], [each.reward_mean for each in training]
    windows = [means[max(0, i + 1 - REWARD_WINDOW) : i + 1] for i in range(len(means))]
    moving = [sum(window) / len(window) for window in windows]
    axes.plot(steps, [each.success_share for each in training], ":", color=MUTED, label="success share")
    axes.plot(steps, means, "o", color=ROLLOUT, alpha=0.45, label="reward per step")
    axes.plot(steps, moving, color=ROLLOUT, linewidth=2.2, label=f"mean of {REWARD_WINDOW} steps")
    axes.set(xlabel="training step", ylabel="reward")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, handlelength=1.6, borderaxespad=0.2)
    return _svg(figure)


def slab_chart(samples: Sequence[SlabSample], events: Sequence[SlabEvent]) -> str:
    """Draws the slabs of each model over time, with cuts, freezes, leases and aborts in a strip above."""
    kinds = [kind for kind in _EVENT_LOOKS if any(event.kind is kind for event in events)]
    strip = 0.26 * max(1, len(kinds))
    figure, (marks, axes) = _canvas(3.3 + strip, nrows=2, height_ratios=(strip, 3.0))
    start_s = samples[0].t_s
    times = [sample.t_s - start_s for sample in samples]
    holders = ("serving", "rollout", "free")
    layers = [[getattr(sample, holder) for sample in samples] for holder in holders]
    axes.stackplot(times, *layers, labels=holders, colors=(SERVING, ROLLOUT, FREE), step="post", linewidth=0)
    total = max(map(sum, zip(*layers, strict=True)))
    budget = [min(sample.serving + sample.budget, total) for sample in samples]
    axes.step(times, budget, where="post", color=INK, linewidth=1.3, label="rollout budget")
    axes.set(ylim=(0, total), xlim=(times[0], times[-1]), xlabel="seconds", ylabel="slabs")
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.16), handlelength=1.2)
    names = []
    for row, kind in enumerate(kinds):
        found = [event for event in events if event.kind is kind]
        label, marker = _EVENT_LOOKS[kind]
        names.append(f"{label} ({sum(event.count for event in found)})")
        at_s = [event.t_s - start_s for event in found]
        marks.plot(at_s, [row] * len(at_s), marker, color=TARGET, alpha=0.8, clip_on=False)
    _name_rows(marks, names if names else ["no cut, freeze or abort"])
    marks.set_xlim(times[0], times[-1])
    marks.grid(visible=False)
    marks.tick_params(labelbottom=False)
    marks.spines[["left", "bottom"]].set_visible(False)
    return _svg(figure)


def _canvas(height: float, **grid: Any) -> tuple[Any, Any]:
    """A figure without pyplot's global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots(**grid)


def _name_rows(axes: Any, labels: Sequence[str]) -> None:
    """One label a row, from the top."""
    axes.set_yticks(range(len(labels)), labels, color=INK)
    axes.set_ylim(len(labels) - 0.5, -0.6)
    axes.grid(axis="y", visible=False)


def _svg(figure: Any) -> str:
    """The figure as an <svg> element."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return out.getvalue()[out.getvalue().index("<svg") :]
