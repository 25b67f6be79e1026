"""Which rollout requests have stood still for too long.

A request's clock runs while it has an engine slot, and either no step of the engine runs, because the gate
refuses it, or serving has the memory that the request needs while others step. The caller reports the ids
and the steps; nothing is aborted here. Source: ROSE §4.1, no progress for a fixed timeout.
"""

from collections.abc import Collection


class StallTracker:
    """Clocks of requests without progress, for one thread.

    Holding a slot while serving keeps the GPU or its memory does count: that is the stall. Waiting for a slot
    does not count: the router bounds the queue. Nor does waiting behind other requests' prefill, or for
    memory that they have: on another engine, or on this one again, the request would be the last in line once
    more. Time in which the engine is
    deactivated does not count: the router knows about that.
    """

    def __init__(self, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self._timeout_s = timeout_s
        self._since: dict[str, float] = {}  # in active seconds, like all that follow; oldest slots first
        self._inactive_s = 0.0
        self._deactivated_at: float | None = None

    def observe(self, slotted: Collection[str], now: float) -> None:
        """Sets which ids have a slot now: new ones start their clocks, and absent ones are forgotten."""
        at = self._active_s(now)
        for gone in self._since.keys() - set(slotted):
            del self._since[gone]
        for request_id in slotted:
            self._since.setdefault(request_id, at)

    def stepped(self, now: float, refused: Collection[str] = ()) -> None:
        """Restarts the clocks at the end of a step that computed tokens of any request, but not those of the
        requests whose memory serving has: they were not in line for a step."""
        at = self._active_s(now)
        for request_id in self._since.keys() - set(refused):
            self._since[request_id] = at

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
        """Returns the ids whose clocks have reached the timeout, those that wait longest first."""
        at = self._active_s(now)
        late = [rid for rid, since in self._since.items() if at - since >= self._timeout_s]
        return tuple(sorted(late, key=self._since.__getitem__))

    def _active_s(self, now: float) -> float:
        until = now if self._deactivated_at is None else self._deactivated_at
        return until - self._inactive_s
