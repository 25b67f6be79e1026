"""Which rollout requests have stood still for too long.

Owns per-request clocks that run only while the request holds an engine slot and the engine is active.
Never aborts anything: its caller reports the ids (ROSE §4.1: no progress for a fixed timeout).
"""

from collections.abc import Collection, Iterable


class StallTracker:
    """Clocks of requests without progress; pure in `now`, one thread.

    Waiting for a slot does not count: nothing was promised yet, and the router bounds the queue. A slot
    held while serving keeps the GPU counts: that is the stall. Time in which the engine is deactivated
    (asleep, budget withdrawn) does not: its owner already tells the router.
    """

    def __init__(self, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, got {timeout_s}")
        self._timeout_s = timeout_s
        self._progress_at: dict[str, float] = {}  # in active seconds
        self._inactive_s = 0.0
        self._deactivated_at: float | None = None

    def observe(self, slotted: Collection[str], now: float) -> None:
        """Takes the ids that hold a slot now: new ones start their clock, absent ones are forgotten."""
        at = self._active_s(now)
        for gone in self._progress_at.keys() - set(slotted):
            del self._progress_at[gone]
        for request_id in slotted:
            self._progress_at.setdefault(request_id, at)

    def progress(self, request_ids: Iterable[str], now: float) -> None:
        """Restarts the clocks of requests that got prefill or decode tokens; they hold a slot by that."""
        at = self._active_s(now)
        for request_id in request_ids:
            self._progress_at[request_id] = at

    def forget(self, request_id: str) -> None:
        """Drops a finished or aborted request; unknown ids are fine (it never held a slot)."""
        self._progress_at.pop(request_id, None)

    def deactivate(self, now: float) -> None:
        """Stops all clocks until activate()."""
        if self._deactivated_at is None:
            self._deactivated_at = now

    def activate(self, now: float) -> None:
        """Lets the clocks run on from where they stopped."""
        if self._deactivated_at is not None:
            self._inactive_s += now - self._deactivated_at
            self._deactivated_at = None

    def stalled(self, now: float) -> tuple[str, ...]:
        """The ids without progress for the timeout, longest first."""
        at = self._active_s(now)
        late = [(since, rid) for rid, since in self._progress_at.items() if at - since >= self._timeout_s]
        return tuple(rid for _, rid in sorted(late))

    def _active_s(self, now: float) -> float:
        until = now if self._deactivated_at is None else self._deactivated_at
        return until - self._inactive_s
