"""Leases on positions whose slabs are idle but still hold prefix cache.

Changes take constant time, and the order of expiry is the order of last use. The table is pure: it takes
``now``, and evicts nothing.
"""


class LeaseTable:
    """One lease per position, all of the same length.

    Source: ROSE §4.1: most turns follow the last one within 10 s, so cache that is idle for longer is worth
    less than room.
    """

    def __init__(self, lease_s: float = 10.0) -> None:
        if lease_s <= 0:
            raise ValueError(f"lease_s must be positive, got {lease_s}")
        self.lease_s = lease_s
        # In order of expiry, because all leases are equally long and `now` never goes back.
        self._expiry_s: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._expiry_s)

    def start(self, position: int, now: float) -> None:
        """Starts or renews a lease. ``now`` never goes back."""
        self._expiry_s.pop(position, None)
        self._expiry_s[position] = now + self.lease_s

    def cancel(self, position: int) -> bool:
        """Ends a lease: the slab is in use again, or reclaimed. Returns False if there was none."""
        return self._expiry_s.pop(position, None) is not None

    def expiry(self, position: int) -> float | None:
        """Returns when the lease ends, None if there is none."""
        return self._expiry_s.get(position)

    def expired(self, now: float) -> list[int]:
        """Returns the positions whose lease has ended, the first to end first, until it is cancelled or
        renewed."""
        ended: list[int] = []
        for position, expiry in self._expiry_s.items():
            if expiry > now:
                break
            ended.append(position)
        return ended

    def next_expiry(self) -> float | None:
        """Returns when the first lease ends, which may be in the past; None if there are none."""
        return next(iter(self._expiry_s.values()), None)

    def check_integrity(self) -> None:
        """Expiries never fall. Raises: AssertionError."""
        expiries = list(self._expiry_s.values())
        assert expiries == sorted(expiries), expiries
