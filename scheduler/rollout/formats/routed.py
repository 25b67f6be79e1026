"""Routing replay: which experts of a mixture model processed each token of a turn, over all its attempts.

Owns: RoutedExperts. Promises: however a turn is cut into attempts, the merged rows are those of all its
tokens but the last, which no engine has processed, each once and in order; or there are no rows. The next
worker computes again what a lost worker had processed, and the answer names these tokens. Never does: I/O,
decode the rows of a turn that was not cut.
"""

import base64
import io

import numpy as np
from numpy.typing import NDArray

PROMPT_START = "routed_experts_prompt_start"
"""The field of a request that names the first token whose row is wanted."""
Rows = NDArray[np.integer]
"""Token, layer, choice: the number of an expert."""


class RoutedExperts:
    """The rows of one turn; the row of token i of prompt and answer says how that token was processed.

    Workers send the rows with the last event of an attempt, as a base64 of numpy's format, unless they were
    killed.
    """

    def __init__(self, first: int = 0) -> None:
        """`first`: the first token whose row the client wants."""
        self._first = first
        self.restart()

    def restart(self) -> None:
        """Drops all rows: the turn starts again."""
        self._start = self._first
        """The first token of the rows of the attempt that was begun last."""
        self._whole: str | None = None
        """These rows, once they have come."""
        self._before: list[Rows] = []
        self._recomputed: list[tuple[int, int]] = []

    def resume(self, num_tokens: int) -> int:
        """Begins an attempt behind `num_tokens` of prompt and answer. Returns the first token whose row it
        has to return."""
        rows, self._whole = decoded(self._whole), None
        if rows is not None:
            self._before.append(rows[: max(0, num_tokens - 1 - self._start)])
            self._start += len(self._before[-1])
        if self._start < num_tokens - 1:
            self._note_recomputed(self._start, num_tokens - 1)
        return self._start

    def _note_recomputed(self, first: int, end: int) -> None:
        """Adds a range. It begins at or behind the beginnings of all before it: attempts only go on."""
        if self._recomputed and first <= self._recomputed[-1][1]:
            before, before_end = self._recomputed.pop()
            first, end = before, max(before_end, end)
        self._recomputed.append((first, end))

    def take(self, rows: str) -> None:
        """Takes the attempt's rows."""
        self._whole = rows

    def merged(self, num_tokens: int) -> str | None:
        """Returns the rows of all of the turn's `num_tokens` but the last; None if some are missing."""
        if not self._before:
            return self._whole
        pieces = [*self._before, last] if (last := decoded(self._whole)) is not None else []
        if len({piece.shape[1:] for piece in pieces}) != 1:
            return None  # workers that serve different models under one name, or the last rows are missing
        joined = np.concatenate(pieces)
        return _encoded(joined) if len(joined) == num_tokens - 1 - self._first else None

    @property
    def have_come(self) -> bool:
        """Whether the attempt that was begun last has told its rows."""
        return self._whole is not None

    @property
    def recomputed(self) -> list[tuple[int, int]]:
        """The tokens, as disjoint ranges in order (first, end), whose rows come from their prefill by a later
        attempt. Another worker may have processed them before, perhaps with other weights, and chosen other
        experts. Empty without rows."""
        return self._recomputed if self.have_come else []


def decoded(text: str | None) -> Rows | None:
    """Returns the rows; None if there are none, or they are malformed."""
    if text is None:
        return None
    try:
        stream = io.BytesIO(base64.b64decode(text))
        rows: Rows = np.lib.format.read_array(stream, allow_pickle=False)  # type: ignore[no-untyped-call]
    except (ValueError, EOFError):
        return None
    return rows if rows.ndim == 3 else None


def _encoded(rows: Rows) -> str:
    buffer = io.BytesIO()
    np.save(buffer, rows, allow_pickle=False)
    return base64.b64encode(buffer.getbuffer()).decode()
