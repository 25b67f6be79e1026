"""Serving GPUs are assigned to one job each, within N_serving, the idlest first."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.scheduler.rollout.placing.borrowing import Borrower, Lendable, UsageWindow, assign, lend_idle
from rose.scheduler.rollout.placing.views import NOBODY, Wants
from rose.types import WeightVersion

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


def test_a_job_of_higher_priority_gets_gpus_up_to_its_bound_before_others_share_the_rest() -> None:
    low, heavy = Borrower(job="low"), Borrower(job="heavy", weight=9.0)
    first = assign([low], FOUR, {})
    bounded = assign([low, Borrower(job="high", priority=1, max_serving_gpus=2)], FOUR, first)
    assert (owned(bounded, "high"), owned(bounded, "low")) == ("wy", "xz"), "low keeps the idlest"
    unbounded = [low, heavy, Borrower(job="high", priority=1)]
    assert owned(assign(unbounded, FOUR, bounded), "high") == "wxyz"
    lowest = assign([heavy, Borrower(job="low", priority=-1)], FOUR, first)
    assert owned(lowest, "heavy") == "wxyz"


@given(
    st.lists(st.tuples(st.integers(-2, 2), st.floats(0.1, 10), st.none() | st.integers(0, 6)), max_size=4),
    st.lists(st.tuples(st.floats(0, 1), st.integers(0, 5)), max_size=10),
)
def test_no_job_has_a_gpu_that_one_of_higher_priority_may_have_too(
    jobs: list[tuple[int, float, int | None]], gpus: list[tuple[float, int]]
) -> None:
    borrowers = [
        Borrower(job=f"j{i}", priority=p, weight=w, max_serving_gpus=m) for i, (p, w, m) in enumerate(jobs)
    ]
    lendables = [Lendable(worker=f"w{i}", kv_usage=usage) for i, (usage, _) in enumerate(gpus)]
    owners = assign(borrowers, lendables, {f"w{i}": f"j{held}" for i, (_, held) in enumerate(gpus)})
    counts = {each.job: len(owned(owners, each.job).split("w")) - 1 for each in borrowers}
    for high in borrowers:
        has_room = high.max_serving_gpus is None or counts[high.job] < high.max_serving_gpus
        assert not has_room or not any(counts[low.job] for low in borrowers if low.priority < high.priority)


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


MODELS = st.frozensets(st.sampled_from("mno"), min_size=1)


@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.none() | st.integers(0, 6), st.none() | MODELS), max_size=4),
    st.lists(st.tuples(st.none() | MODELS, st.floats(0, 1), st.integers(0, 5)), max_size=10),
)
def test_no_job_has_a_gpu_of_other_models_and_none_that_a_job_could_use_is_nobodys(
    jobs: list[tuple[float, int | None, frozenset[str] | None]],
    gpus: list[tuple[frozenset[str] | None, float, int]],
) -> None:
    borrowers = [
        Borrower(
            job=f"j{i}",
            weight=weight,
            max_serving_gpus=bound,
            wants={Wants(model) for model in models} if models is not None else None,
        )
        for i, (weight, bound, models) in enumerate(jobs)
    ]
    lendables = [Lendable(worker=f"w{i}", kv_usage=u, models=models) for i, (models, u, _) in enumerate(gpus)]
    owners = assign(borrowers, lendables, {f"w{i}": f"j{job}" for i, (_, _, job) in enumerate(gpus)})
    by_job = {borrower.job: borrower for borrower in borrowers}
    counts = {job: len(owned(owners, job)) // 2 for job in by_job}
    for each in lendables:
        owner = owners[each.worker]
        if owner != NOBODY:
            assert by_job[owner].can_use(each)
            continue
        for borrower in borrowers:
            bound = borrower.max_serving_gpus
            assert not borrower.can_use(each) or (bound is not None and counts[borrower.job] >= bound)


def test_a_gpu_that_few_jobs_can_use_counts_towards_their_share_of_the_gpus() -> None:
    both, one = Borrower(job="both", wants={Wants("m"), Wants("n")}), Borrower(job="one", wants={Wants("m")})
    gpus = [Lendable(worker="a", models={"m"}), Lendable(worker="b", models={"n"})]
    assert assign([both, one], gpus, {}) == {"a": "one", "b": "both"}
    assert assign([both], gpus, {}) == {"a": "both", "b": "both"}


ONE = [Lendable(worker="w")]


def test_a_turn_that_waits_takes_the_gpu_that_its_holder_leaves_idle_and_gives_it_back() -> None:
    entitled = {"w": "a"}
    b = Borrower(job="b")
    assert lend_idle([b], ONE, entitled, entitled, {"w"}) == {"w": "a"}
    taken = lend_idle([b], ONE, entitled, entitled, set())
    assert taken == {"w": "b"}
    assert lend_idle([b], ONE, entitled, taken, {"w"}) == {"w": "b"}
    assert lend_idle([Borrower(job="c")], ONE, entitled, taken, {"w"}) == {"w": "b"}
    assert lend_idle([b, Borrower(job="a")], ONE, entitled, taken, {"w"}) == {"w": "a"}
    assert lend_idle([], ONE, entitled, taken, set()) == {"w": "b"}
    assert lend_idle([Borrower(job="b", max_serving_gpus=0)], ONE, entitled, entitled, set()) == entitled


def test_idle_gpus_go_to_jobs_whose_waiting_turns_they_can_run() -> None:
    gpus = [Lendable(worker="a", models={"m"}), Lendable(worker="b", models={"n"})]
    entitled = {"a": "x", "b": NOBODY}
    x, y = Borrower(job="x", wants={Wants("n")}, max_serving_gpus=1), Borrower(job="y", wants={Wants("m")})
    assert lend_idle([y], gpus, entitled, entitled, {"a"}) == entitled
    assert lend_idle([y], gpus, entitled, entitled, set()) == {"a": "y", "b": NOBODY}
    # Its bound is 1, and its turns that wait now are for the other model.
    assert lend_idle([x], gpus, entitled, entitled, {"a"}) == entitled
    assert lend_idle([x], gpus, entitled, entitled, set()) == {"a": NOBODY, "b": "x"}
    assert lend_idle([x, y], gpus, entitled, entitled, set()) == {"a": "y", "b": "x"}


def test_an_idle_gpu_goes_to_the_waiting_job_of_the_highest_priority() -> None:
    waiting = [Borrower(job="a", weight=9.0), Borrower(job="b", priority=1), Borrower(job="c", priority=1)]
    assert lend_idle(waiting, ONE, {"w": "x"}, {"w": "x"}, set()) == {"w": "b"}


JOBS = st.sampled_from("abcd")


@given(
    st.dictionaries(JOBS, st.tuples(st.floats(0.1, 10), st.none() | st.integers(0, 12)), max_size=4),
    st.lists(
        st.tuples(st.integers(1, 4), st.floats(0, 1), JOBS | st.just(NOBODY), JOBS, st.booleans()),
        max_size=10,
    ),
)
def test_idle_gpus_change_hands_only_for_turns_that_wait_and_within_their_jobs_bounds(
    jobs: dict[str, tuple[float, int | None]], gpus: list[tuple[int, float, str, str, bool]]
) -> None:
    waiting = {job: Borrower(job=job, weight=w, max_serving_gpus=m) for job, (w, m) in jobs.items()}
    lendables = [Lendable(worker=f"w{i}", gpus=n, kv_usage=u) for i, (n, u, *_) in enumerate(gpus)]
    owners = {f"w{i}": owner for i, (_, _, owner, _, _) in enumerate(gpus)}
    entitled = {f"w{i}": home for i, (_, _, _, home, _) in enumerate(gpus)}
    busy = {f"w{i}" for i, (*_, is_busy) in enumerate(gpus) if is_busy}
    lent = lend_idle(list(waiting.values()), lendables, entitled, owners, busy)

    def held(of: dict[str, str], job: str) -> int:
        return sum(each.gpus for each in lendables if of[each.worker] == job)

    def has_room(job: str, more: int) -> bool:
        bound = waiting[job].max_serving_gpus
        return bound is None or held(lent, job) + more <= bound

    assert set(lent) == set(owners)
    for job in waiting:
        assert has_room(job, 0) or held(lent, job) <= held(owners, job)
    for each in lendables:
        before, after = owners[each.worker], lent[each.worker]
        is_left_idle = each.worker not in busy and before not in waiting
        if before != after:
            assert after in waiting
            assert is_left_idle or after == entitled[each.worker]
        elif is_left_idle:
            assert not any(has_room(job, each.gpus) for job in waiting)


def test_the_usage_window_forgets_what_is_older_than_it() -> None:
    window = UsageWindow(60.0)
    assert window.mean() == 0.0
    window.add(1.0, 0.5)
    window.add(0.0, 30.0)
    assert window.mean() == 0.5
    window.add(0.0, 61.0)
    assert window.mean() == 0.0


def lendable(name: str, run_id: str, **values: Any) -> Lendable:
    return Lendable(
        worker=name, models={"m"}, version=WeightVersion(run_id=run_id, number=1), follows=True, **values
    )


def of_run(run_id: str) -> Borrower:
    return Borrower(job=run_id, run_id=run_id, wants={Wants("m", run_id)})


def test_gpus_that_get_other_weights_are_divided_with_as_few_changes_as_possible() -> None:
    gpus = [lendable(name, run_id) for name, run_id in zip("wxyz", ("a", "b", "a", "b"), strict=True)]
    assert assign([of_run("a"), of_run("b")], gpus, {}) == {"w": "a", "x": "b", "y": "a", "z": "b"}
    assert assign([of_run("b")], gpus, {}) == dict.fromkeys("wxyz", "b")
    refusing = [lendable("w", "a", refused=frozenset("b"))]
    assert assign([of_run("b")], refusing, {}) == {"w": NOBODY}
    assert assign([of_run("a"), of_run("b")], refusing, {"w": "b"}) == {"w": "a"}
    unread = replace(refusing[0], version=None, base_for=frozenset())
    assert assign([of_run("b")], [unread], {"w": "b"}) == {"w": NOBODY}
    assert assign([of_run("b")], [replace(unread, base_for=frozenset("b"))], {}) == {"w": "b"}
    aware = replace(of_run("b"), published={Wants("m", "b")})
    has_base = replace(unread, base_for=None, follows=False, refused=frozenset())
    assert assign([of_run("b")], [has_base], {}) == {"w": "b"}
    assert assign([aware], [has_base], {"w": "b"}) == {"w": NOBODY}
    bounded, follower = replace(aware, max_serving_gpus=1), replace(has_base, worker="x", follows=True)
    assert assign([bounded], [has_base, follower], {"w": "b"}) == {"w": NOBODY, "x": "b"}
    found_none = replace(follower, base_for=frozenset("b"), refused=frozenset("b"))
    assert assign([aware], [found_none], {}) == {"x": "b"}  # it looks again, and then there are some
    assert assign([aware], [replace(found_none, base_for=frozenset())], {}) == {"x": NOBODY}
    others = [replace(gpus[0], models={"n"}), replace(gpus[0], follows=False)]
    assert [assign([of_run("b")], [each], {}) for each in others] == [{"w": NOBODY}] * 2


@pytest.mark.parametrize(
    ("kept_s", "idle_s", "to_home", "to_other"), [(9, 9, 0, 0), (11, 9, 1, 0), (11, 11, 1, 1)]
)
def test_a_gpu_keeps_its_weights_for_as_long_as_other_ones_would_take(
    kept_s: float, idle_s: float, to_home: bool, to_other: bool
) -> None:
    gpus = [lendable("w", "a", switch_s=10, kept_s=kept_s, idle_s=idle_s)]
    for home, moves in (("b", to_home), ("a", to_other)):
        lent = lend_idle([of_run("b")], gpus, {"w": home}, {"w": "a"}, set())
        assert lent == {"w": "b" if moves else "a"}
