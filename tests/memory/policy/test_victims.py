"""What is reclaimed first, and which requests have to end."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.memory.policy.victims import PositionUse, ReclaimPlan, choose_victims

NOW = 100.0


def used(position: int, requests: str) -> PositionUse:
    return PositionUse(position=position, request_ids=frozenset(requests))


def cached(position: int, expiry: float) -> PositionUse:
    return PositionUse(position=position, lease_expiry=expiry)


def plan(needed: int, uses: Iterable[PositionUse]) -> ReclaimPlan:
    return choose_victims(needed=needed, uses=uses, now=NOW)


ALL_KINDS = [
    PositionUse(position=0, is_pinned=True),
    used(1, "a"),
    cached(2, 103.0),
    cached(3, 101.0),
    cached(4, 99.0),
    cached(5, 100.0),
    PositionUse(position=6),
    PositionUse(position=7),
    used(8, "ab"),
]


@pytest.mark.parametrize(
    ("needed", "positions", "requests", "shortfall"),
    [
        (0, [], [], 0),
        (1, [6], [], 0),
        (2, [6, 7], [], 0),
        (3, [6, 7, 4], [], 0),
        (4, [6, 7, 4, 5], [], 0),
        (5, [6, 7, 4, 5, 3], [], 0),
        (6, [6, 7, 4, 5, 3, 2], [], 0),
        (7, [6, 7, 4, 5, 3, 2, 1], ["a"], 0),
        (8, [6, 7, 4, 5, 3, 2, 1, 8], ["a", "b"], 0),
        (11, [6, 7, 4, 5, 3, 2, 1, 8], ["a", "b"], 3),
    ],
)
def test_slabs_go_in_the_order_idle_expired_least_recently_used_aborted(
    needed: int, positions: list[int], requests: list[str], shortfall: int
) -> None:
    chosen = plan(needed, ALL_KINDS)
    assert list(chosen.positions) == positions
    assert (list(chosen.aborted_requests), chosen.shortfall) == (requests, shortfall)


@pytest.mark.parametrize(
    ("needed", "uses", "requests"),
    [
        # The request with the most slabs of its own goes, not the one with the most blocks anywhere.
        (2, [used(1, "ab"), used(2, "ab"), used(3, "ab"), used(4, "c"), used(5, "c")], ["c"]),
        # One large victim goes instead of many small ones.
        (3, [used(1, "a"), used(2, "b"), used(3, "c"), used(4, "d"), used(5, "d"), used(6, "d")], ["d"]),
        # One slab is taken from the smallest request that suffices.
        (1, [used(1, "a"), used(2, "b"), used(3, "b")], ["a"]),
        # Requests that only share slabs end together.
        (1, [used(1, "ab"), used(2, "cde")], ["a", "b"]),
        # Once a has ended, b owns their shared slab alone, and ending b frees two.
        (3, [used(1, "a"), used(2, "ab"), used(3, "b"), used(4, "c")], ["a", "b"]),
    ],
)
def test_aborts_free_the_most_slabs_per_request(
    needed: int, uses: list[PositionUse], requests: list[str]
) -> None:
    chosen = plan(needed, uses)
    assert sorted(chosen.aborted_requests) == requests
    assert (len(chosen.positions), chosen.shortfall) == (needed, 0)


def test_half_of_packed_slabs_costs_half_of_the_requests() -> None:
    """24 requests in 12 slabs, two to a slab each: half the slabs cost half the requests."""
    uses = [used(position, chr(97 + 2 * position) + chr(98 + 2 * position)) for position in range(12)]
    assert len(plan(6, uses).aborted_requests) == 12


def test_pinned_slab_is_never_given_up() -> None:
    pinned = PositionUse(position=0, request_ids=frozenset("a"), is_pinned=True)
    assert plan(1, [pinned]).shortfall == 1


SLAB_USES = st.lists(
    st.builds(
        PositionUse,
        position=st.integers(0, 0),
        request_ids=st.frozensets(st.sampled_from("abcde"), max_size=3),
        lease_expiry=st.none() | st.floats(90, 110),
        is_pinned=st.booleans(),
    ),
    max_size=12,
)


@given(SLAB_USES, st.integers(0, 15))
def test_plan_adds_up_and_frees_what_it_says(shapes: list[PositionUse], needed: int) -> None:
    uses = {
        position: PositionUse(
            position=position, request_ids=u.request_ids, lease_expiry=u.lease_expiry, is_pinned=u.is_pinned
        )
        for position, u in enumerate(shapes)
    }
    chosen = plan(needed, uses.values())
    assert len(chosen.positions) + chosen.shortfall == needed
    assert len(set(chosen.positions)) == len(chosen.positions)
    ended = set(chosen.aborted_requests)
    assert len(ended) == len(chosen.aborted_requests)
    assert all(
        uses[position].request_ids <= ended and not uses[position].is_pinned for position in chosen.positions
    )
    if chosen.shortfall:
        movable = [u for u in uses.values() if not u.is_pinned]
        assert len(chosen.positions) == len(movable)


def test_a_negative_number_of_slabs_is_refused() -> None:
    with pytest.raises(ValueError, match="needed must be 0 or more slabs, got -1"):
        plan(-1, [])
