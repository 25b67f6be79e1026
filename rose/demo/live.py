"""What the demo says while it runs: a line for each part when it begins, with what comes next.

Owns the console. On a terminal, the current state stands below the last line, and is renewed twice a second.
Measures nothing.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.status import Status

from rose.measure.completions import Clock

PERIOD_S = 0.5


@dataclass(frozen=True, slots=True)
class DemoPart:
    """What is done, and about how long it takes."""

    title: str
    takes_s: float


class LiveView:
    """A context manager: ``begin`` each part in turn, and call ``update`` often meanwhile."""

    def __init__(self, console: Console, parts: Sequence[DemoPart], *, now: Clock = time.monotonic) -> None:
        self._console = console
        self._parts = parts
        self._now = now
        self._status = Status("", console=console) if console.is_terminal else None
        self._started_s = self._shown_s = now()
        self._num_begun = 0

    @property
    def elapsed_s(self) -> float:
        return self._now() - self._started_s

    def __enter__(self) -> "LiveView":
        if self._status is not None:
            self._status.start()
        minutes = sum(part.takes_s for part in self._parts) / 60
        self.say(f"{len(self._parts)} parts follow; together they take about {minutes:.0f} minutes")
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def begin(self) -> None:
        """Names the next part, its time, and what follows it."""
        part, *later = self._parts[self._num_begun :]
        self._num_begun += 1
        following = f"; then {later[0].title}" if later else ""
        of = f"{self._num_begun} of {len(self._parts)}"
        self.say(f"{of}: {part.title}, about {part.takes_s:.0f} s{following}")

    def say(self, text: str) -> None:
        """Prints a line with the time."""
        self._console.print(
            f"[{clock(self.elapsed_s)}] {text}", markup=False, highlight=False, soft_wrap=True
        )

    def update(self, state: str) -> None:
        """Shows ``state`` on a terminal; cheap when it was called a moment ago."""
        if self._status is not None and self._now() - self._shown_s >= PERIOD_S:
            self._shown_s = self._now()
            self._status.update(f"{clock(self.elapsed_s)}  {state}")


def clock(seconds: float) -> str:
    """Minutes and seconds, e.g. 3:07."""
    whole = max(0, round(seconds))
    return f"{whole // 60}:{whole % 60:02d}"
