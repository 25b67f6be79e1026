"""A table that stays readable where the terminal is too narrow for it.

Rows become lines of a table if all of them fit, and otherwise blocks of labelled values, so nothing is cut
off.
"""

from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

_INDENT = 2


class FittedTable:
    """Rows of plain strings; the first column names the row."""

    def __init__(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        left: Sequence[str] = (),
        title: str = "",
    ) -> None:
        """``left``: the columns that are aligned to the left, apart from the first."""
        self._columns = columns
        self._rows = rows
        self._left = {columns[0], *left}
        self._title = title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self._table()
        needed = Measurement.get(console, options.update(width=10_000), table).maximum
        if needed <= options.max_width:
            yield table
            return
        if self._title:
            yield Text(self._title, style="italic")
        for row in self._rows:
            yield Text(row[0], style="bold")
            pairs = zip(self._columns[1:], row[1:], strict=True)
            # No line breaks between a label and its value.
            cells = (f"{label} {value}".replace(" ", "\N{NO-BREAK SPACE}") for label, value in pairs if value)
            yield Padding(Text("  ".join(cells)), (0, 0, 0, _INDENT))

    def _table(self) -> Table:
        # A Text, because rich would take an IPv6 address in a str for markup.
        title = Text(self._title, style="italic") if self._title else None
        table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
        for column in self._columns:
            table.add_column(column, justify="left" if column in self._left else "right", no_wrap=True)
        for row in self._rows:
            table.add_row(*map(Text, row))
        return table
