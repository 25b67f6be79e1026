"""Two columns for a terminal: what was simulated, and its figure with a unit."""

from collections.abc import Iterable, Iterator


def table(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yields an indented line for each row, with the figures below each other."""
    rows = list(rows)
    width = max(len(name) for name, _ in rows)
    for name, figure in rows:
        yield f"  {name:<{width}}  {figure}"
