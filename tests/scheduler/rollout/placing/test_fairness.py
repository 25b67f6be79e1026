"""The fair queue serves jobs by weight and cost, whatever the lengths of their queues."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.scheduler.rollout.placing.fairness import FairQueue, jain


def anywhere(_item: object) -> str:
    return "w"


def served(queue: FairQueue[tuple[str, float], str], tokens: float) -> dict[str, float]:
    """Take items until so many tokens were served."""
    got: dict[str, float] = {}
    while sum(got.values()) < tokens:
        taken = queue.take(anywhere)
        assert taken is not None
        (job, cost), _ = taken
        got[job] = got.get(job, 0.0) + cost
    return got


def filled(
    costs: dict[str, float], weights: dict[str, float], count: int
) -> FairQueue[tuple[str, float], str]:
    queue: FairQueue[tuple[str, float], str] = FairQueue(lambda job: weights.get(job, 1.0))
    for job, cost in costs.items():
        for _ in range(count):
            queue.push(job, (job, cost), kind="k", cost=cost)
    return queue


@pytest.mark.parametrize(
    ("costs", "weights"),
    [
        ({"a": 100.0, "b": 100.0}, {}),
        ({"a": 1000.0, "b": 10.0}, {}),
        ({"a": 300.0, "b": 200.0, "c": 50.0}, {"a": 3.0}),
        ({"a": 5000.0, "b": 7.0}, {"b": 0.5}),
    ],
)
def test_tokens_are_served_by_weight_whatever_the_turns_sizes(
    costs: dict[str, float], weights: dict[str, float]
) -> None:
    queue = filled(costs, weights, 20_000)
    got = served(queue, 200_000)
    assert jain(got[job] / weights.get(job, 1.0) for job in costs) > 0.99


def test_turns_that_cost_more_than_announced_are_charged_afterwards() -> None:
    queue = filled({"a": 100.0, "b": 100.0}, {}, 5_000)
    got = {"a": 0.0, "b": 0.0}
    for _ in range(1000):
        taken = queue.take(anywhere)
        assert taken is not None
        job = taken[0][0]
        actual = 400.0 if job == "a" else 100.0
        got[job] += actual
        queue.settle(job, actual - 100.0)
    assert jain(got.values()) > 0.99


def test_a_job_that_cannot_be_placed_holds_up_nobody_and_order_within_a_job_is_kept() -> None:
    queue: FairQueue[str, str] = FairQueue()
    for name in ("a1", "a2", "b1", "b2"):
        queue.push(name[0], name, kind="k", cost=10)
    queue.push("b", "b0", kind="k", cost=10, since=1.0)
    taken = [queue.take(lambda item: "w" if item[0] == "b" else None) for _ in range(4)]
    assert [each[0] if each is not None else None for each in taken] == ["b0", "b1", "b2", None]
    assert queue.lengths() == {"a": 2}
    queue.remove("a", "a1")
    assert queue.take(anywhere) == ("a2", "w")
    assert len(queue) == 0


def test_items_that_come_again_go_first_in_the_order_in_which_they_first_came() -> None:
    queue: FairQueue[str, str] = FairQueue()
    for name, since in (
        ("new", math.inf),
        ("third", 3.0),
        ("first", 1.0),
        ("newer", math.inf),
        ("second", 2.0),
    ):
        queue.push("job", name, kind=name[0], cost=10, since=since)
    taken = [queue.take(anywhere) for _ in range(5)]
    assert [each[0] for each in taken if each] == ["first", "second", "third", "new", "newer"]


def test_kinds_share_their_jobs_order_and_those_that_cannot_go_are_not_looked_at() -> None:
    queue: FairQueue[str, str] = FairQueue()
    for name in ("a1", "b1", "a2", "b2", "a3"):
        queue.push("job", name, cost=10, kind=name[0])
    queue.push("job", "b0", cost=10, kind="b", since=1.0)
    assert queue.kinds() == {"job": ["a", "b"]}
    asked: list[str] = []

    def place(item: str) -> str | None:
        asked.append(item)
        return "w" if item != "b1" else None

    taken = [queue.take(place, lambda kind: kind == "b") for _ in range(3)]
    assert [each[0] if each is not None else None for each in taken] == ["b0", "b2", None]
    assert not any(item[0] == "a" for item in asked)
    queue.remove("job", "a1")
    queue.push("job", "c1", kind="c", cost=10)
    assert [queue.take(anywhere) for _ in range(4)] == [(name, "w") for name in ("b1", "a2", "a3", "c1")]
    assert len(queue) == 0 and queue.kinds() == {}


def test_an_absent_job_accumulates_no_deficit() -> None:
    queue = filled({"a": 10.0}, {}, 1000)
    served(queue, 5_000)
    for _ in range(500):
        queue.push("b", ("b", 10.0), kind="k", cost=10.0)
    got = served(queue, 2_000)
    assert jain(got.values()) > 0.95


def test_jobs_of_higher_priority_go_first_and_weights_count_among_equals() -> None:
    queue: FairQueue[str, str] = FairQueue(priority_of=lambda job: {"a": 1, "b": 1}.get(job, 0))
    for job in "cab" * 50:
        queue.push(job, job, kind="full" if job == "b" else "k", cost=100)
    assert [queue.take(anywhere, lambda kind: kind == "full") for _ in range(10)] == [("b", "w")] * 10
    order = "".join(taken[0] for _ in range(140) if (taken := queue.take(anywhere)) is not None)
    assert (order[:80].count("a"), order[:80].count("b")) == pytest.approx((40, 40), abs=3)
    assert order[90:] == "c" * 50
    assert len(queue) == 0


def test_a_new_weight_holds_for_turns_that_wait_already() -> None:
    weights: dict[str, float] = {}
    queue = filled({"a": 100.0, "b": 100.0}, weights, 20_000)
    assert jain(served(queue, 100_000).values()) > 0.99
    weights["a"] = 4.0
    got = served(queue, 100_000)
    assert got["a"] / got["b"] == pytest.approx(4.0, rel=0.05)


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 5000), st.sampled_from("kl")), max_size=60),
    st.integers(0, 99),
)
def test_every_item_leaves_once_and_nothing_is_lost(items: list[tuple[str, float, str]], seed: int) -> None:
    chance = random.Random(seed)
    queue: FairQueue[int, str] = FairQueue()
    for index, (job, cost, kind) in enumerate(items):
        queue.push(job, index, cost=cost, kind=kind)
    left = []
    for _ in itertools.count():
        taken = queue.take(lambda item: item if chance.random() < 0.7 else None)
        if taken is not None:
            left.append(taken[0])
        elif not len(queue):
            break
    assert sorted(left) == list(range(len(items)))


@pytest.mark.parametrize(("values", "index"), [([1, 1], 1.0), ([1, 0], 0.5), ([10, 1], 121 / 202), ([], 1.0)])
def test_jains_index_of_known_values(values: list[float], index: float) -> None:
    assert jain(values) == pytest.approx(index)
