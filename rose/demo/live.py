"""The demo's live view: one line that changes on a terminal, plain lines anywhere else.

Owns the drawing of a LiveState. Promises a line for each phase and each event, and the state of things twice
a second on a terminal, every ten seconds elsewhere. Measures nothing: the demo fills the state and calls
``update``.
"""

import time
from dataclasses import dataclass, field

from rich.console import Console
from rich.status import Status

from rose.measure.completions import Clock

SCREEN_PERIOD_S = 0.5
LINE_PERIOD_S = 10.0


@dataclass(slots=True, kw_only=True)
class LiveState:
    """What the view shows; the demo overwrites the fields as it learns them. None is not known yet."""

    phase: str = "starting"
    elapsed_s: float = 0.0
    left_s: float | None = None
    ttft_p99_s: float | None = None
    tpot_p99_s: float | None = None
    rollout_tok_s: float | None = None
    slabs_serving: int = 0
    slabs_rollout: int = 0
    slabs_free: int = 0
    rewards: list[float] = field(default_factory=list)
    weight_version: str | None = None
    events: list[str] = field(default_factory=list)
    """All events so far, oldest first."""


class LiveView:
    """A context manager around the view: ``with LiveView(console) as view: view.update(state)``."""

    def __init__(self, console: Console | None = None, *, now: Clock = time.monotonic) -> None:
        self._console = console if console is not None else Console()
        self._now = now
        self._status = Status("", console=self._console) if self._console.is_terminal else None
        self._period_s = LINE_PERIOD_S if self._status is None else SCREEN_PERIOD_S
        self._last_shown_s = float("-inf")
        self._last_phase: str | None = None
        self._num_events_printed = 0

    def __enter__(self) -> "LiveView":
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def update(self, state: LiveState) -> None:
        """Shows ``state``; cheap when it was shown a moment ago."""
        at = f"[{clock(state.elapsed_s)}]"
        for event in state.events[self._num_events_printed :]:
            self._print(f"{at} {event}")
        self._num_events_printed = len(state.events)
        if is_new := state.phase != self._last_phase:
            self._print(f"{at} {state.phase}")
            self._last_phase = state.phase
        if is_new or self._now() - self._last_shown_s >= self._period_s:
            self._last_shown_s = self._now()
            text = line(state)
            if self._status is not None:
                left = f", about {clock(state.left_s)} left" if state.left_s is not None else ""
                self._status.update(f"{clock(state.elapsed_s)}{left}  {text}")
            elif text:
                self._print(f"{at} {text}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def line(state: LiveState) -> str:
    """What is known of the run; empty where that is nothing yet."""
    parts = []
    if state.ttft_p99_s is not None and state.tpot_p99_s is not None:
        parts.append(f"TTFT P99 {state.ttft_p99_s * 1e3:.0f} ms, TPOT P99 {state.tpot_p99_s * 1e3:.0f} ms")
    if state.rollout_tok_s is not None:
        parts.append(f"rollout {state.rollout_tok_s:,.0f} tok/s")
    if state.slabs_serving + state.slabs_rollout + state.slabs_free > 0:
        parts.append(
            f"slabs: serving {state.slabs_serving}, rollout {state.slabs_rollout}, free {state.slabs_free}"
        )
    if state.rewards:
        parts.append(f"reward {state.rewards[-1]:.2f} after {len(state.rewards)} steps")
    if state.weight_version is not None:
        parts.append(f"weights {state.weight_version}")
    return " | ".join(parts)


def clock(seconds: float) -> str:
    """Minutes and seconds, e.g. 3:07."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"
