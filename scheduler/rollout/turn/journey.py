"""One request on its way: what its client asked of the routing, what became of it so far and when.

Owns: Route, Journey, and the worker's own refusal.
Promises: plain values.
Never does: decide where it goes next (dataplane.py).
"""

import time
from dataclasses import dataclass, field

from rose.errors import RoseError
from rose.scheduler.rollout.turn.traces import TurnSpan


class Refused(RoseError):
    """A worker found fault with the request; its answer goes to the client as it is."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"worker answered {status}: {body[:200]}")
        self.status = status
        self.body = body


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """What the client says about how to route a call."""

    job: str
    explicit_session: str | None
    run_id: str | None
    deadline: float
    model: str | None = None
    """Only workers that serve it; None: any."""
    trace_parent: str | None = None
    """The client's `traceparent`."""


@dataclass(slots=True, kw_only=True)
class Journey:
    """One request's tries so far: what to keep away from, how often workers failed it."""

    session: str
    route: Route
    prompt_tokens: int = 0
    """Of its next attempt, about."""
    max_tokens: int | None = None
    avoid_until: dict[str, float] = field(default_factory=dict)
    num_failures: int = 0
    num_attempts: int = 0
    span: TurnSpan | None = None
    """Where turns are traced."""
    began: float = field(default_factory=time.monotonic)
    queued_s: float = 0.0
    """Waited for a worker, all attempts together."""
    first_token_at: float | None = None
    num_first_tokens: int = 0
    """That came together with the first."""

    def took(self, num_tokens: int) -> None:
        """So many tokens have come."""
        if self.first_token_at is None:
            self.first_token_at, self.num_first_tokens = time.monotonic(), num_tokens
