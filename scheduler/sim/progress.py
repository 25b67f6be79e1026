"""What a simulation prints: how far it is, on stderr while it runs, and a table of its figures."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator

OnEnd = Callable[[int, int], object]
"""Called as jobs end, with how many have ended, and of how many."""


class ProgressLines:
    """A line every few seconds, and none for what is done by then."""

    def __init__(self, what: str, every_s: float = 5.0) -> None:
        self._what = what
        self._every_s = every_s
        self._begin_s = self._said_s = time.monotonic()

    def __call__(self, num_done: int, num: int) -> None:
        """Notes how many of how many jobs have ended."""
        now_s = time.monotonic()
        if now_s - self._said_s < self._every_s:
            return
        self._said_s = now_s
        said = f"{self._what}: {num_done} of {num} jobs have ended, {now_s - self._begin_s:.0f} s"
        print(said, file=sys.stderr, flush=True)


def table(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yields an indented line for each name and its figure, with the figures below each other."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, figure in rows:
        yield f"  {name:<{width}}  {figure}"
