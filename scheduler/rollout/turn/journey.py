"""One request on its way through the router.

Owns: Route, what the client asked of the routing; Journey, what has happened to the request so far; Refused.
Promises: plain values.
Never does: decide where a request goes next (placing/policy.py).
"""

import time
from collections import Counter
from dataclasses import dataclass, field

from rose.errors import RoseError
from rose.scheduler.rollout.turn.traces import TurnSpan


class Refused(RoseError):
    """A worker rejected the request. The client receives the worker's answer unchanged."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"worker answered {status}: {body[:200]}")
        self.status = status
        self.body = body


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How the client wants a call to be routed."""

    job: str
    explicit_session: str | None
    run_id: str | None
    """The training run whose weights it may use; None: any, NO_RUN: base weights alone."""
    deadline: float
    """Monotonic time in seconds."""
    model: str | None = None
    """Only workers that serve this model are eligible; None: all workers are."""
    trace_parent: str | None = None
    """The client's `traceparent` header."""


@dataclass(slots=True, kw_only=True)
class Journey:
    """One request's attempts so far: which workers to avoid, how often they failed, how long it took."""

    session: str
    route: Route
    prompt_tokens: int = 0
    """Estimated prompt tokens of the next attempt."""
    max_tokens: int | None = None
    avoid_until: dict[str, float] = field(default_factory=dict)
    silences: Counter[str] = field(default_factory=Counter)
    """How often each worker has stalled before an attempt's first token."""
    num_failures: int = 0
    least_context: int | None = None
    """The shortest context of a worker that may take the request, where the model's workers differ in it."""
    unloaded_since: float | None = None
    """Since when workers have said that they don't hold the adapter; None: the last one did not say so."""
    num_attempts: int = 0
    span: TurnSpan | None = None
    """Set where turns are traced."""
    began: float = field(default_factory=time.monotonic)
    queued_s: float = 0.0
    """Time spent waiting for a worker, summed over all attempts."""
    first_token_at: float | None = None
    num_first_tokens: int = 0
    """Tokens that arrived together with the first one."""
    served_model: str | None = None
    """The model's name as the last worker gave it."""
