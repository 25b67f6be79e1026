"""Which rollout requests have stood still for too long.

A request's clock runs only while it has an engine slot and the engine is active. The caller reports the ids;
nothing is aborted here. Source: ROSE §4.1, no progress for a fixed timeout.
"""

from collections.abc import Collection, Iterable


class StallTracker:
    """Clocks of requests without progress, for one thread.

    Waiting for a slot does not count: the router bounds the queue. Holding a slot while serving keeps the GPU
    does count: that is the stall. Time in which the engine is deactivated does not count: the router knows
    about that.
    """

    def __init__(self, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self._timeout_s = timeout_s
        self._progress_at: dict[str, float] = {}  # in active seconds
        self._inactive_s = 0.0
        self._deactivated_at: float | None = None

    def observe(self, slotted: Collection[str], now: float) -> None:
        """Sets which ids have a slot now: new ones start their clocks, and absent ones are forgotten."""
        at = self._active_s(now)
        for gone in self._progress_at.keys() - set(slotted):
            del self._progress_at[gone]
        for request_id in slotted:
            self._progress_at.setdefault(request_id, at)

    def progress(self, request_ids: Iterable[str], now: float) -> None:
        """Restarts the clocks of requests that got prefill or decode tokens, and so have a slot."""
        at = self._active_s(now)
        for request_id in request_ids:
            self._progress_at[request_id] = at

    def forget(self, request_id: str) -> None:
        """Forgets a finished or aborted request; unknown ids, which never had a slot, are ignored."""
        self._progress_at.pop(request_id, None)

    def deactivate(self, now: float) -> None:
        """Stops all clocks until activate()."""
        if self._deactivated_at is None:
            self._deactivated_at = now

    def activate(self, now: float) -> None:
        """Lets the clocks go on from where they stopped."""
        if self._deactivated_at is not None:
            self._inactive_s += now - self._deactivated_at
            self._deactivated_at = None

    def stalled(self, now: float) -> tuple[str, ...]:
        """Returns the ids without progress for the timeout, the longest first."""
        at = self._active_s(now)
        late = [(since, rid) for rid, since in self._progress_at.items() if at - since >= self._timeout_s]
        return tuple(rid for _, rid in sorted(late))

    def _active_s(self, now: float) -> float:
        until = now if self._deactivated_at is None else self._deactivated_at
        return until - self._inactive_s
