"""assign: one job per serving GPU, N_serving, the idlest first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.scheduler.rollout.borrowing import Borrower, Lendable, UsageWindow, assign
from rose.scheduler.rollout.views import NOBODY

FOUR = [
    Lendable(worker=name, kv_usage=usage) for name, usage in zip("wxyz", (0.4, 0.1, 0.3, 0.2), strict=True)
]


def owned(owners: dict[str, str], job: str) -> str:
    return "".join(sorted(worker for worker, owner in owners.items() if owner == job))


def test_a_job_alone_gets_the_idlest_up_to_its_bound() -> None:
    owners = assign([Borrower(job="a", max_serving_gpus=2)], FOUR, {})
    assert (owned(owners, "a"), owned(owners, NOBODY)) == ("xz", "wy")
    assert owned(assign([Borrower(job="a")], FOUR, {}), "a") == "wxyz"
    assert owned(assign([], FOUR, {"w": "a"}), NOBODY) == "wxyz"


@pytest.mark.parametrize(
    ("weights", "counts"), [((1.0, 1.0), (2, 2)), ((3.0, 1.0), (3, 1)), ((1.0, 3.0), (1, 3))]
)
def test_jobs_share_by_weight(weights: tuple[float, float], counts: tuple[int, int]) -> None:
    borrowers = [Borrower(job=job, weight=weight) for job, weight in zip("ab", weights, strict=True)]
    owners = assign(borrowers, FOUR, {})
    assert (len(owned(owners, "a")), len(owned(owners, "b"))) == counts


def test_a_newcomer_takes_from_who_has_too_many_and_the_rest_stays() -> None:
    first = assign([Borrower(job="a")], FOUR, {})
    second = assign([Borrower(job="a"), Borrower(job="b")], FOUR, first)
    assert (owned(second, "a"), owned(second, "b")) == ("xz", "wy")
    third = assign([Borrower(job="b")], FOUR, second)
    assert owned(third, "b") == "wxyz"


def test_an_engine_over_several_gpus_counts_as_many() -> None:
    engines = [Lendable(worker=name, gpus=4) for name in "xy"]
    assert assign([Borrower(job="a", max_serving_gpus=7)], engines, {}) == {"x": "a", "y": NOBODY}


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.none() | st.integers(0, 20)), max_size=4),
    st.lists(st.tuples(st.integers(1, 4), st.floats(0, 1)), max_size=10),
    st.lists(st.integers(0, 5), min_size=10, max_size=10),
)
def test_no_job_has_more_than_its_bound_and_every_gpu_has_one_answer(
    jobs: list[tuple[float, int | None]], gpus: list[tuple[int, float]], before: list[int]
) -> None:
    borrowers = [Borrower(job=f"j{i}", weight=w, max_serving_gpus=m) for i, (w, m) in enumerate(jobs)]
    lendables = [Lendable(worker=f"w{i}", gpus=n, kv_usage=u) for i, (n, u) in enumerate(gpus)]
    owners = assign(borrowers, lendables, {f"w{i}": f"j{j}" for i, j in enumerate(before)})
    assert set(owners) == {each.worker for each in lendables}
    for borrower in borrowers:
        held = sum(each.gpus for each in lendables if owners[each.worker] == borrower.job)
        assert borrower.max_serving_gpus is None or held <= borrower.max_serving_gpus
    assert set(owners.values()) <= {NOBODY, *(borrower.job for borrower in borrowers)}


def test_the_usage_window_forgets_what_is_older_than_it() -> None:
    window = UsageWindow(60.0)
    assert window.mean() == 0.0
    window.add(1.0, 0.5)
    window.add(0.0, 30.0)
    assert window.mean() == 0.5
    window.add(0.0, 61.0)
    assert window.mean() == 0.0
