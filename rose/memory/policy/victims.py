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
class SlabUse:
    """What one backed slab of an engine holds."""

    slab: int
    """Any number that tells the engine's slabs apart: the slab's own, or its position."""
    request_ids: frozenset[str] = frozenset()
    """Requests with a block in it."""
    lease_expiry: float | None = None
    """When its idle prefix cache may go; None if it holds no cache worth keeping."""
    is_pinned: bool = False
    """True if it is never given up, as the slab of the padding block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReclaimPlan:
    """What to take, in the order of the fields. ``shortfall`` slabs can't be had at all."""

    idle: tuple[int, ...]
    expired: tuple[int, ...]
    cached: tuple[int, ...]
    aborted_slabs: tuple[int, ...]
    """The slabs that the aborts free, at most as many as needed."""
    aborted_requests: tuple[str, ...]
    shortfall: int

    @property
    def slabs(self) -> tuple[int, ...]:
        """Every slab that the engine gives up."""
        return self.idle + self.expired + self.cached + self.aborted_slabs


def choose_victims(*, needed: int, uses: Iterable[SlabUse], now: float) -> ReclaimPlan:
    """Plans how an engine gives up ``needed`` slabs."""
    if needed < 0:
        raise ValueError(f"needed must be 0 or more slabs, got {needed}")
    movable = [use for use in uses if not use.is_pinned]
    unused = [use for use in movable if not use.request_ids]
    leased = sorted((use.lease_expiry, use.slab) for use in unused if use.lease_expiry is not None)
    missing = needed
    tiers: list[tuple[int, ...]] = []
    for candidates in (
        [use.slab for use in unused if use.lease_expiry is None],
        [slab for expiry, slab in leased if expiry <= now],
        # Leases are equally long, so the first to expire is the least recently used.
        [slab for expiry, slab in leased if expiry > now],
    ):
        tiers.append(tuple(candidates[:missing]))
        missing -= len(tiers[-1])
    requests, slabs = _choose_aborts((use for use in movable if use.request_ids), missing)
    return ReclaimPlan(
        idle=tiers[0],
        expired=tiers[1],
        cached=tiers[2],
        aborted_slabs=tuple(slabs[:missing]),
        aborted_requests=tuple(requests),
        shortfall=max(missing - len(slabs), 0),
    )


class _Holdings:
    """The slabs in use, grouped by the exact set of requests that use them; shrinks as requests end."""

    def __init__(self, uses: Iterable[SlabUse]) -> None:
        self.slabs_of: dict[frozenset[str], list[int]] = defaultdict(list)
        self._groups_with: dict[str, set[frozenset[str]]] = defaultdict(set)
        for use in uses:
            self._add(use.request_ids, [use.slab])

    def groups_within(self, requests: frozenset[str]) -> list[frozenset[str]]:
        """The groups whose slabs come free when ``requests`` end."""
        touched = set[frozenset[str]]().union(*(self._groups_with[request] for request in requests))
        return [group for group in touched if group <= requests]

    def end(self, requests: frozenset[str]) -> list[int]:
        """Takes requests out; returns the slabs that come free, ascending."""
        freed: list[int] = []
        for group in set[frozenset[str]]().union(*(self._groups_with[request] for request in requests)):
            slabs, left = self.slabs_of.pop(group), group - requests
            for request in left:
                self._groups_with[request].discard(group)
            if left:
                self._add(left, slabs)
            else:
                freed += slabs
        for request in requests:
            del self._groups_with[request]
        return sorted(freed)

    def _add(self, group: frozenset[str], slabs: list[int]) -> None:
        self.slabs_of[group] += slabs
        for request in group:
            self._groups_with[request].add(group)


def _choose_aborts(uses: Iterable[SlabUse], needed: int) -> tuple[list[str], list[int]]:
    """Requests to end and the slabs that come free, in the order of choice.

    The fewest requests for a number of slabs is NP-hard (minimum k-union), hence greedy. Candidates are the
    sets of requests that share some slab: ending less than such a set frees nothing of that slab.
    """
    holdings = _Holdings(uses)
    requests: list[str] = []
    slabs: list[int] = []
    while len(slabs) < needed and holdings.slabs_of:
        best = _best_candidate(holdings, needed - len(slabs))
        requests += sorted(best)
        slabs += holdings.end(best)
    return requests, slabs


def _best_candidate(holdings: _Holdings, missing: int) -> frozenset[str]:
    """The set that frees the most of the missing slabs per request; then the smallest set; then the least
    overshoot; then by name."""

    def at_least(group: frozenset[str]) -> tuple[float, int]:
        slabs = holdings.slabs_of[group]
        return len(slabs) / len(group), -min(slabs)

    def worth(group: frozenset[str]) -> tuple[float, int, int, list[str]]:
        num_freed = sum(len(holdings.slabs_of[each]) for each in holdings.groups_within(group))
        return min(num_freed, missing) / len(group), -len(group), -num_freed, sorted(group)

    candidates: Iterable[frozenset[str]] = holdings.slabs_of
    if len(holdings.slabs_of) > MAX_CANDIDATES:
        candidates = nlargest(MAX_CANDIDATES, holdings.slabs_of, key=at_least)
    return max(candidates, key=worth)
