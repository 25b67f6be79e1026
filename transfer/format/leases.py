"""Signs of life of others, judged by this process's own clock.

Owns when each sign was last seen to change. No message holds a time, so clocks of other hosts don't matter;
in exchange, a sign must be watched for a while before it is known to be dead. Pure.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

BEAT_S = 3.0
"""How often a trainer renews its run's sign."""
RUN_LEASE_S = 15.0
"""A run whose sign did not change for this long has no trainer any more."""
RUN_GONE_S = 600.0
"""A follower of "auto" leaves its run when the sign did not change for this long. A trainer that hangs for
less keeps its followers: they never go back to a run that they left.
"""
ACK_EVERY_S = 30.0
"""How often a worker renews its acknowledgement, unless it is loading weights."""
ACK_LEASE_S = 900.0
"""An acknowledgement that did not change for so long is of a worker that left. Longer than the subscriber
waits for a worker to load weights (WORKER_TIMEOUT_S), because meanwhile it renews nothing.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    sign: Hashable
    at_s: float
    has_changed: bool


class WatchedSigns:
    """The signs that look() was shown, by name. A sign that is not shown any more ages like one that stands
    still, and is forgotten after two leases.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._seen: dict[str, _Seen] = {}

    def look(self, signs: Mapping[str, Hashable], now_s: float) -> None:
        """Notes what the signs are now."""
        for name, sign in signs.items():
            seen = self._seen.get(name)
            if seen is None or seen.sign != sign:
                self._seen[name] = _Seen(sign=sign, at_s=now_s, has_changed=seen is not None)
        self._seen = {
            name: seen
            for name, seen in self._seen.items()
            if name in signs or now_s - seen.at_s <= 2 * self._lease_s
        }

    def is_dead(self, name: str, now_s: float) -> bool:
        """Returns whether the sign was watched for the whole lease and stood still, or was never shown."""
        seen = self._seen.get(name)
        return seen is None or now_s - seen.at_s > self._lease_s

    def is_live(self, name: str, now_s: float) -> bool:
        """Returns whether the sign was seen to change within the lease."""
        return not self.is_dead(name, now_s) and self._seen[name].has_changed
