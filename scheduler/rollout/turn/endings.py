"""How an attempt can end.

Owns: EndKind, Ending, what a worker's HTTP error means.
Promises: plain values.
Never does: decide what follows (dataplane.py).
"""

from dataclasses import dataclass
from enum import StrEnum

_BUSY_STATUSES = (429, 503)
_REQUEST_TIMEOUT = 408


class EndKind(StrEnum):
    FINISHED = "finished"
    RECLAIMED = "reclaimed"
    """The engine aborted it: its memory went back to serving."""
    ENGINE_STALL = "engine_stall"
    """The engine aborted it: the gate admitted no step for too long."""
    DEACTIVATED = "deactivated"
    """The engine aborted it: its weights leave the GPU until the next rollout phase."""
    OUTDATED = "outdated"
    """The worker got other weights than the turn's session is pinned to."""
    STALLED = "stalled"
    """No token came for too long."""
    LOST = "lost"
    """The worker died, or the connection broke."""
    BUSY = "busy"
    FAILED = "failed"
    """The worker answered with an error of its own."""
    REFUSED = "refused"
    """The worker found fault with the request: the client's mistake, no use in trying elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    kind: EndKind
    detail: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    status: int = 0
    model: str | None = None


def error_ending(status: int, detail: str) -> Ending:
    """What a worker's HTTP error means for the turn."""
    if status in _BUSY_STATUSES:
        kind = EndKind.BUSY
    elif 400 <= status < 500 and status != _REQUEST_TIMEOUT:
        kind = EndKind.REFUSED
    else:
        kind = EndKind.FAILED
    return Ending(kind=kind, detail=detail, status=status)
