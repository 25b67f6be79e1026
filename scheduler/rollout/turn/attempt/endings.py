"""How an attempt can end.

Owns: EndKind, Ending, and the meaning of a worker's HTTP errors and stop reasons.
Promises: plain values.
Never does: decide what follows from an ending (rerouting.py).
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus

from rose.http import NO_LEASE
from rose.scheduler.rollout.workers.worker import Worker
from rose.types import StopReason

_BUSY_STATUSES = (429, 503)
_TOO_LONG = re.compile(r"maximum context length|maximum model length|max_model_len")
"""How vLLM names its context in each of its errors (400) about a turn that does not fit."""
_REQUEST_TIMEOUT = 408
_WRONG_KEY = (
    "answered 401: it wants another key than this router's worker_api_key (ROSE_WORKER_API_KEY); set that to"
    " the worker's VLLM_API_KEY"
)


class EndKind(StrEnum):
    """The values are the `cause` label of rose_router_reroutes_total."""

    FINISHED = "finished"
    RECLAIMED = "reclaimed"
    """The engine aborted the request because its slabs went back to serving."""
    ENGINE_STALL = "engine_stall"
    """The engine aborted the request because serving kept the GPU for too long."""
    ABORTED = "aborted"
    """The engine aborted the request before its first token. vLLM sends no reason then, so this is a stall
    or a reclaim."""
    DEACTIVATED = "deactivated"
    """The engine aborted the request because its weights leave the GPU until the next rollout phase."""
    OUTDATED = "outdated"
    """The worker received weights of another run, or other weights than the turn is pinned to."""
    UNLOADED = "unloaded"
    """The worker does not hold the version of the LoRA adapter that its status names."""
    STALLED = "stalled"
    """The router saw no token for too long."""
    LOST = "lost"
    """The worker died, or the connection broke."""
    REMOVED = "removed"
    """An admin removed the worker while it answered."""
    TOO_LONG = "too_long"
    """The turn does not fit into the worker's context."""
    UNLEASED = "unleased"
    """The worker's lease to this router had no room for the turn, or was older than the GPU's loan."""
    BUSY = "busy"
    FAILED = "failed"
    """The worker answered with an error of its own."""
    REFUSED = "refused"
    """The worker rejected the request. The client made the mistake, so no other worker would accept it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    kind: EndKind
    detail: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    status: int = 0


_ABORTS = {
    StopReason.RECLAIMED.value: (EndKind.RECLAIMED, "gave the request's slabs back to serving"),
    StopReason.STALLED.value: (EndKind.ENGINE_STALL, "reported a stall"),
    StopReason.DEACTIVATED.value: (EndKind.DEACTIVATED, "was deactivated"),
}


def abort_ending(worker_id: str, stop_reason: object) -> Ending | None:
    """Returns the ending that a stop reason of ROSE's engines means; None for any other stop reason."""
    if not isinstance(stop_reason, str) or stop_reason not in _ABORTS:
        return None
    kind, what = _ABORTS[stop_reason]
    return Ending(kind=kind, detail=f"{worker_id} {what}")


def lost_ending(worker: Worker, reason: str) -> Ending:
    """Returns the ending of an attempt whose worker is gone, or the connection to it."""
    if worker.is_removed:
        return Ending(kind=EndKind.REMOVED, detail=f"{worker.id} was removed")
    return Ending(kind=EndKind.LOST, detail=f"{worker.id}{reason}")


def error_ending(worker_id: str, status: int, detail: str) -> Ending:
    """Returns what a worker's HTTP error means for the turn."""
    if status == HTTPStatus.UNAUTHORIZED:  # the client's key was checked before: this one is the router's
        kind, detail = EndKind.FAILED, f"{worker_id} {_WRONG_KEY}"
    elif status == HTTPStatus.SERVICE_UNAVAILABLE and f'"{NO_LEASE}"' in detail:
        kind = EndKind.UNLEASED
    elif status in _BUSY_STATUSES:
        kind = EndKind.BUSY
    elif status == HTTPStatus.BAD_REQUEST and _TOO_LONG.search(detail):
        kind = EndKind.TOO_LONG
    elif 400 <= status < 500 and status != _REQUEST_TIMEOUT:
        kind = EndKind.REFUSED
    else:
        kind = EndKind.FAILED
    return Ending(kind=kind, detail=detail, status=status)
