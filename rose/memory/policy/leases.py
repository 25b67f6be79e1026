"""Leases on idle rollout slabs that still hold prefix cache.

Owns who may stay until when. Promises constant-time changes and an expiry order that is also the LRU order.
Pure: takes ``now``. Never evicts anything itself.
"""


class LeaseTable:
    """One lease per slab, all of the same length. Slabs are any ints that the caller tells them apart by.

    Source: ROSE §4.1: a turn mostly follows the last within 10 s, so cache that idles longer is worth less
    than room.
    """

    def __init__(self, lease_s: float = 10.0) -> None:
        if lease_s <= 0:
            raise ValueError(f"lease_s must be positive, got {lease_s}")
        self.lease_s = lease_s
        # In order of expiry, because all leases are equally long and `now` never goes back.
        self._expiry_s: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._expiry_s)

    def start(self, slab: int, now: float) -> None:
        """Starts a slab's lease, or renews it. ``now`` never goes back."""
        self._expiry_s.pop(slab, None)
        self._expiry_s[slab] = now + self.lease_s

    def cancel(self, slab: int) -> bool:
        """The slab is in use again or reclaimed; False if it had no lease."""
        return self._expiry_s.pop(slab, None) is not None

    def expiry(self, slab: int) -> float | None:
        """When the slab's lease ends, None without one."""
        return self._expiry_s.get(slab)

    def expired(self, now: float) -> list[int]:
        """Slabs whose lease has ended, longest ended first. They stay listed until cancelled or renewed."""
        ended: list[int] = []
        for slab, expiry in self._expiry_s.items():
            if expiry > now:
                break
            ended.append(slab)
        return ended

    def next_expiry(self) -> float | None:
        """When the first lease ends (maybe in the past), None without leases: what to set a timer to."""
        return next(iter(self._expiry_s.values()), None)

    def check_integrity(self) -> None:
        """Expiries never fall. Raises: AssertionError."""
        expiries = list(self._expiry_s.values())
        assert expiries == sorted(expiries), expiries
