"""Which rollout requests have made no progress for too long.

A request's clock runs while it has an engine slot and can't step: either the gate refuses the engine's steps,
or serving has the memory that the request needs while others step. The caller reports the ids and the steps,
and nothing is aborted here. Source: ROSE §4.1, no progress for a fixed timeout.
"""

from collections.abc import Collection


class StallTracker:
    """Clocks of requests without progress, for one thread.

    Holding a slot while serving keeps the GPU or its memory counts as a stall. Three kinds of waiting do not:

    - for a slot, because the router bounds the queue;
    - behind other requests' prefill, or for memory that they have, because the request would be the last in
      line again wherever it was sent;
    - while the engine is deactivated, because the router knows that.
    """

    def __init__(self, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self._timeout_s = timeout_s
        self._since: dict[str, float] = {}  # in seconds in which the engine was active; oldest slots first
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
        """Restarts the clocks at the end of a step that computed tokens of any request, except for
        ``refused``: requests whose memory serving has, and which were not in line for the step."""
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
