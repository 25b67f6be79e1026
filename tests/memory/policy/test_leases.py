"""Leases end in the order of last use."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.memory.policy.leases import LeaseTable


def test_lease_runs_out_after_its_time_and_stays_listed_until_cancelled() -> None:
    leases = LeaseTable(lease_s=10.0)
    assert leases.next_expiry() is None
    leases.start(7, now=0.0)
    leases.start(3, now=1.0)
    assert leases.next_expiry() == 10.0
    assert leases.expired(9.9) == []
    assert leases.expired(10.0) == [7]
    assert leases.expired(11.0) == leases.expired(11.0) == [7, 3]
    assert leases.cancel(7) and not leases.cancel(7)
    assert (leases.expired(11.0), len(leases)) == ([3], 1)


def test_renewed_lease_starts_over() -> None:
    leases = LeaseTable(lease_s=10.0)
    leases.start(1, now=0.0)
    leases.start(2, now=1.0)
    leases.start(1, now=5.0)
    assert leases.expired(12.0) == [2]
    assert leases.expiry(1) == 15.0 and leases.expiry(9) is None


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.integers(0, 6)), max_size=60))
def test_agrees_with_a_plain_dictionary(steps: list[tuple[int, bool, int]]) -> None:
    leases, model, now = LeaseTable(lease_s=5.0), dict[int, float](), 0.0
    for slab, is_start, pause in steps:
        now += pause
        if is_start:
            leases.start(slab, now)
            model[slab] = now + 5.0
        else:
            assert leases.cancel(slab) is (model.pop(slab, None) is not None)
        leases.check_integrity()
        assert set(leases.expired(now)) == {each for each, expiry in model.items() if expiry <= now}
        assert leases.next_expiry() == min(model.values(), default=None)


def test_lease_must_last() -> None:
    with pytest.raises(ValueError, match="lease_s must be positive, got 0"):
        LeaseTable(lease_s=0)
