"""The demo's live view: one screen on a terminal, plain lines anywhere else.

Owns the drawing of a LiveState. Promises to draw at most twice a second on a terminal and to print
a line per phase change, per new event and every few seconds elsewhere. Starts no thread and
measures nothing: the demo fills the state and calls ``update``.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rose.measure.completions import Clock

SCREEN_PERIOD_S = 0.5
LINE_PERIOD_S = 10.0
BAR_CELLS = 28
SPARK_CELLS = 40
SHOWN_EVENTS = 6
_SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True, kw_only=True)
class LiveState:
    """What the view shows; the demo overwrites the fields as it learns them. None is not known yet."""

    phase: str = "starting"
    elapsed_s: float = 0.0
    left_s: float | None = None
    serving_rps: float | None = None
    ttft_p99_s: float | None = None
    tpot_p99_s: float | None = None
    rollout_tok_s: float | None = None
    slabs_serving: int = 0
    slabs_rollout: int = 0
    slabs_free: int = 0
    rewards: list[float] = field(default_factory=list)
    weight_version: str | None = None
    events: list[str] = field(default_factory=list)
    """All events so far, oldest first; the view shows the last few."""


class LiveView:
    """A context manager around the view: ``with LiveView(console) as view: view.update(state)``."""

    def __init__(self, console: Console | None = None, *, now: Clock = time.monotonic) -> None:
        self._console = console if console is not None else Console()
        self._now = now
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._last_drawn_s = float("-inf")
        self._last_phase: str | None = None
        self._num_events_printed = 0

    def __enter__(self) -> "LiveView":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, state: LiveState) -> None:
        """Show ``state``; cheap when the last drawing is fresh."""
        is_new_phase = state.phase != self._last_phase
        if self._live is not None:
            if is_new_phase or self._now() - self._last_drawn_s >= SCREEN_PERIOD_S:
                self._note_drawn(state)
                self._live.update(render(state), refresh=True)
            return
        for event in state.events[self._num_events_printed :]:
            self._print(f"[{clock(state.elapsed_s)}] {event}")
        self._num_events_printed = len(state.events)
        if is_new_phase or self._now() - self._last_drawn_s >= LINE_PERIOD_S:
            self._note_drawn(state)
            if (text := line(state, names_phase=is_new_phase)) is not None:
                self._print(text)

    def _note_drawn(self, state: LiveState) -> None:
        self._last_drawn_s = self._now()
        self._last_phase = state.phase

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def render(state: LiveState) -> RenderableType:
    """The screen."""
    left = f", about {clock(state.left_s)} left" if state.left_s is not None else ""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column()
    rows.add_row("serving", _serving_text(state))
    rows.add_row("rollout", _rate_text(state))
    rows.add_row("slabs", _slab_bar(state))
    rows.add_row("reward", _reward_text(state))
    rows.add_row("weights", state.weight_version if state.weight_version is not None else "–")
    events = [Text(f"  {event}", style="dim") for event in state.events[-SHOWN_EVENTS:]]
    title = Text.assemble("ROSE demo  ", (state.phase, "bold"), f"  {clock(state.elapsed_s)}{left}")
    return Panel(Group(rows, *events), title=title, title_align="left", border_style="dim")


def line(state: LiveState, *, names_phase: bool) -> str | None:
    """The same in one plain line, which names the phase as it begins; None where there is nothing to say."""
    parts = [state.phase] if names_phase else []
    if state.serving_rps is not None:
        parts.append(f"serving {_serving_text(state)}")
    if state.rollout_tok_s is not None:
        parts.append(f"rollout {_rate_text(state)}")
    if state.slabs_serving + state.slabs_rollout + state.slabs_free > 0:
        parts.append(f"slabs {_slab_text(state)}")
    if state.rewards:
        parts.append(f"reward {state.rewards[-1]:.2f}")
    if state.weight_version is not None:
        parts.append(f"weights {state.weight_version}")
    return f"[{clock(state.elapsed_s)}] {' | '.join(parts)}" if parts else None


def clock(seconds: float) -> str:
    """Minutes and seconds, e.g. 3:07."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"


def sparkline(values: Sequence[float], cells: int = SPARK_CELLS) -> str:
    """The last ``cells`` values as bars between their own smallest and largest."""
    shown = list(values[-cells:])
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    span = high - low
    if span == 0:
        return _SPARKS[0] * len(shown)
    return "".join(
        _SPARKS[min(len(_SPARKS) - 1, int((value - low) / span * len(_SPARKS)))] for value in shown
    )


def bar_cells(counts: Sequence[int], cells: int = BAR_CELLS) -> list[int]:
    """Split ``cells`` in proportion to ``counts``; rounded so that they sum to ``cells``."""
    total = sum(counts)
    if total == 0:
        return [0] * len(counts)
    edges = [round(sum(counts[: index + 1]) * cells / total) for index in range(len(counts))]
    return [edge - start for start, edge in zip([0, *edges], edges, strict=False)]


def _slab_bar(state: LiveState) -> Text:
    counts = (state.slabs_serving, state.slabs_rollout, state.slabs_free)
    serving, rollout, free = bar_cells(counts)
    return Text.assemble(
        ("█" * serving, "blue"), ("█" * rollout, "yellow"), ("░" * free, "dim"), f"  {_slab_text(state)}"
    )


def _slab_text(state: LiveState) -> str:
    return f"serving {state.slabs_serving}, rollout {state.slabs_rollout}, free {state.slabs_free}"


def _serving_text(state: LiveState) -> str:
    rps = f"{state.serving_rps:.2f} req/s" if state.serving_rps is not None else "–"
    return f"{rps}, TTFT P99 {_ms(state.ttft_p99_s)}, TPOT P99 {_ms(state.tpot_p99_s)}"


def _rate_text(state: LiveState) -> str:
    return f"{state.rollout_tok_s:,.0f} tok/s" if state.rollout_tok_s is not None else "–"


def _reward_text(state: LiveState) -> str:
    if not state.rewards:
        return "–"
    return f"{sparkline(state.rewards)}  {state.rewards[-1]:.2f} after {len(state.rewards)} steps"


def _ms(seconds: float | None) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds is not None else "–"
