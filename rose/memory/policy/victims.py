"""Which slabs an engine gives up in a cut, and which requests have to end for it.

Slabs go in this order: idle ones without cache, those whose lease has expired, cached ones by last use, and
at last those of requests that are aborted. The choice of requests is greedy: each pick frees the most slabs
per ended request. Pure.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import nlargest

MAX_CANDIDATES = 64
"""Sets of requests weighed per pick. There are more only where hundreds of requests are strewn over hundreds
of slabs, and then an emergency cut must not think for seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionUse:
    """What the slab at one position of an engine holds."""

    position: int
    request_ids: frozenset[str] = frozenset()
    """Requests with a block in it."""
    lease_expiry: float | None = None
    """When its idle prefix cache may go; None if it holds no cache worth keeping."""
    is_pinned: bool = False
    """True if it is never given up, as the slab of the padding block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimPlan:
    """The positions to empty, in the order of the fields. ``shortfall`` slabs can't be had at all."""

    idle: tuple[int, ...]
    expired: tuple[int, ...]
    cached: tuple[int, ...]
    aborted_positions: tuple[int, ...]
    """The positions that the aborts free, at most as many as needed."""
    aborted_requests: tuple[str, ...]
    shortfall: int

    @property
    def positions(self) -> tuple[int, ...]:
        """Every position that the engine gives up."""
        return self.idle + self.expired + self.cached + self.aborted_positions


def choose_victims(*, needed: int, uses: Iterable[PositionUse], now: float) -> ReclaimPlan:
    """Plans how an engine gives up ``needed`` slabs."""
    if needed < 0:
        raise ValueError(f"needed must be 0 or more slabs, got {needed}")
    movable = [use for use in uses if not use.is_pinned]
    unused = [use for use in movable if not use.request_ids]
    leased = sorted((use.lease_expiry, use.position) for use in unused if use.lease_expiry is not None)
    missing = needed
    tiers: list[tuple[int, ...]] = []
    for candidates in (
        [use.position for use in unused if use.lease_expiry is None],
        [position for expiry, position in leased if expiry <= now],
        # Leases are equally long, so the first to expire is the least recently used.
        [position for expiry, position in leased if expiry > now],
    ):
        tiers.append(tuple(candidates[:missing]))
        missing -= len(tiers[-1])
    requests, positions = _choose_aborts((use for use in movable if use.request_ids), missing)
    return ReclaimPlan(
        idle=tiers[0],
        expired=tiers[1],
        cached=tiers[2],
        aborted_positions=tuple(positions[:missing]),
        aborted_requests=tuple(requests),
        shortfall=max(missing - len(positions), 0),
    )


class _Holdings:
    """The positions in use, grouped by the exact set of requests that use them; it shrinks as requests
    end."""

    def __init__(self, uses: Iterable[PositionUse]) -> None:
        self.positions_of: dict[frozenset[str], list[int]] = defaultdict(list)
        self._groups_with: dict[str, set[frozenset[str]]] = defaultdict(set)
        for use in uses:
            self._add(use.request_ids, [use.position])

    def groups_within(self, requests: frozenset[str]) -> list[frozenset[str]]:
        """Returns the groups whose positions come free when ``requests`` end."""
        touched = set[frozenset[str]]().union(*(self._groups_with[request] for request in requests))
        return [group for group in touched if group <= requests]

    def end(self, requests: frozenset[str]) -> list[int]:
        """Takes requests out; returns the positions that come free, ascending."""
        freed: list[int] = []
        for group in set[frozenset[str]]().union(*(self._groups_with[request] for request in requests)):
            positions, left = self.positions_of.pop(group), group - requests
            for request in left:
                self._groups_with[request].discard(group)
            if left:
                self._add(left, positions)
            else:
                freed += positions
        for request in requests:
            del self._groups_with[request]
        return sorted(freed)

    def _add(self, group: frozenset[str], positions: list[int]) -> None:
        self.positions_of[group] += positions
        for request in group:
            self._groups_with[request].add(group)


def _choose_aborts(uses: Iterable[PositionUse], needed: int) -> tuple[list[str], list[int]]:
    """Chooses requests to end; returns them and the positions that come free, in the order of choice.

    The choice is greedy, because freeing a number of slabs with the fewest requests is NP-hard (minimum
    k-union). Candidates are the sets of requests that share a slab, because only the end of all of them frees
    it.
    """
    holdings = _Holdings(uses)
    requests: list[str] = []
    positions: list[int] = []
    while len(positions) < needed and holdings.positions_of:
        best = _best_candidate(holdings, needed - len(positions))
        requests += sorted(best)
        positions += holdings.end(best)
    return requests, positions


def _best_candidate(holdings: _Holdings, missing: int) -> frozenset[str]:
    """Picks the set that frees the most of the missing slabs per request; then the smallest set; then the
    least overshoot; then by name."""

    def at_least(group: frozenset[str]) -> tuple[float, int]:
        positions = holdings.positions_of[group]
        return len(positions) / len(group), -min(positions)

    def worth(group: frozenset[str]) -> tuple[float, int, int, list[str]]:
        num_freed = sum(len(holdings.positions_of[each]) for each in holdings.groups_within(group))
        return min(num_freed, missing) / len(group), -len(group), -num_freed, sorted(group)

    candidates: Iterable[frozenset[str]] = holdings.positions_of
    if len(holdings.positions_of) > MAX_CANDIDATES:
        candidates = nlargest(MAX_CANDIDATES, holdings.positions_of, key=at_least)
    return max(candidates, key=worth)
