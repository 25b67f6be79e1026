"""What a window of load leaves behind: a record of each serving request, and the window's totals.

Owns the records' shapes and their per-request arithmetic. Promises that all times are seconds on
CLOCK_MONOTONIC, which every process of a host shares. Never measures or judges.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

_DERIVED = ("ttft_s", "tpot_s", "max_itl_s")


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """One streamed request as its client saw it; filled in place, so a cancelled stream keeps its part."""

    request_id: str = ""
    prompt: Sequence[int] = ()
    max_tokens: int
    scheduled_s: float = 0.0
    sent_s: float = 0.0
    ended_s: float = 0.0
    """Also when it was cancelled."""
    token_times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """One for each token, where they were asked for."""
    status: int = 0
    """HTTP status; 0 when no answer came."""
    error: str | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None
    num_cached_tokens: int | None = None
    """The prompt's tokens from the cache, where the usage was asked for and the engine tells it."""
    rose: dict[str, Any] = field(default_factory=dict)
    """What the router says beside the answer."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def is_complete(self) -> bool:
        """Whether the server answered in full: an aborted or cut-off request is not complete."""
        return self.status == 200 and self.error is None and self.finish_reason in ("stop", "length")

    @property
    def ttft_s(self) -> float | None:
        """First token minus *scheduled* arrival, so a late client can't flatter the server."""
        return self.token_times_s[0] - self.scheduled_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None below two tokens."""
        n = len(self.token_times_s)
        return (self.token_times_s[-1] - self.token_times_s[0]) / (n - 1) if n > 1 else None

    @property
    def max_itl_s(self) -> float | None:
        """Longest wait between two tokens; None below two tokens."""
        times = self.token_times_s
        return max((b - a for a, b in pairwise(times)), default=None)

    def to_json_line(self) -> str:
        """One line of JSON, with ttft_s, tpot_s and max_itl_s added for readers that aren't us."""
        row = asdict(self) | {name: getattr(self, name) for name in _DERIVED}
        return json.dumps(row, separators=(",", ":"))

    @classmethod
    def from_json_line(cls, line: str) -> "RequestRecord":
        """Inverse of to_json_line."""
        row: dict[str, Any] = json.loads(line)
        return cls(**{name: value for name, value in row.items() if name not in _DERIVED})


def read_records(path: Path) -> tuple[RequestRecord, ...]:
    """The requests that a replay process wrote."""
    return tuple(RequestRecord.from_json_line(line) for line in path.read_text().splitlines())


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What was measured in one window."""

    name: str
    start_s: float
    duration_s: float
    requests: tuple[RequestRecord, ...] = ()
    rollout_tokens: int = 0
    rollout_aborts: Mapping[str, int] = field(default_factory=dict)
    """Aborted rollout turns by stop reason."""
    serving_busy_s: float = 0.0
    """Time in which the serving engine's worker ran steps."""
    rollout_busy_s: float = 0.0
    foreign_cpu_share: float = 0.0
    """CPU used by processes that aren't ours, as a share of all cores over the window."""

    @property
    def longest_send_delay_s(self) -> float:
        """The longest time by which the client itself was late with a request; it counts in the TTFT."""
        return max((request.sent_s - request.scheduled_s for request in self.requests), default=0.0)
