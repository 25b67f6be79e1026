"""Which prefix cache goes first: by last use for serving's own requests, by value for rollouts."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rose.memory.policy.cached import NUM_HITS, CacheTable, recompute_cost


def full(_position: int) -> int:
    return 4


def test_the_end_of_a_context_goes_before_its_beginning_and_older_contexts_first() -> None:
    table = CacheTable()
    table.fell_idle([12, 11, 10], now=1.0)
    table.fell_idle([22, 21], now=2.0)
    assert list(table.oldest()) == [12, 11, 10, 22, 21]
    assert list(table.least_valuable(full, now=10.0)) == [12, 11, 10, 22, 21]


def test_a_context_used_again_is_the_last_to_go() -> None:
    table = CacheTable()
    table.fell_idle([11, 10], now=1.0)
    table.fell_idle([20], now=2.0)
    table.fell_busy(10)
    assert list(table.oldest()) == [11, 20]
    table.fell_idle([12, 10], now=3.0)
    assert list(table.oldest()) == [11, 20, 12, 10]


def test_a_shared_prefix_outlives_newer_contexts_that_were_used_once() -> None:
    table = CacheTable()
    for now in (1.0, 2.0, 3.0):
        table.hit(1, now)
    table.fell_idle([1], now=4.0)
    table.fell_idle([2], now=10.0)
    assert list(table.oldest()) == [1, 2]
    # 1/16 + 1/17 + 1/18 + 1/19 uses per second against 1/10
    assert list(table.least_valuable(full, now=20.0)) == [2, 1]
    # Only the last hits count, so that what was once popular goes in the end.
    for _ in range(20):
        table.hit(1, 4.0)
    assert list(table.least_valuable(full, now=11.0)) == [1, 2]


@pytest.mark.parametrize(("num_cached", "order"), [({1: 1, 2: 4}, [1, 2]), ({1: 4, 2: 1}, [2, 1])], ids=str)
def test_of_two_slabs_equally_old_the_one_that_costs_less_to_compute_again_goes(
    num_cached: dict[int, int], order: list[int]
) -> None:
    table = CacheTable()
    table.fell_idle([1], now=0.0)
    table.fell_idle([2], now=0.0)
    assert list(table.least_valuable(num_cached.__getitem__, now=1.0)) == order


def test_a_block_as_deep_as_attention_costs_what_the_rest_does_costs_twice_one_at_the_beginning() -> None:
    assert recompute_cost(1, 28_000, 1 / 28_000) == pytest.approx(2 * recompute_cost(1, 0, 1 / 28_000))
    assert recompute_cost(4, 4 * 28_000, 0.0) == 4
    assert recompute_cost(0, 0, 1.0) == 0


def test_a_context_s_end_outlives_a_newer_short_context_if_it_costs_more_to_compute_again() -> None:
    table = CacheTable()
    table.fell_idle([1], now=0.0)
    table.fell_idle([2], now=5.0)
    depth = {1: 84_000, 2: 0}
    assert list(table.least_valuable(lambda p: recompute_cost(1, depth[p], 0.0), now=10.0)) == [1, 2]
    deep = table.least_valuable(lambda p: recompute_cost(1, depth[p], 1 / 28_000), now=10.0)
    assert list(deep) == [2, 1]


def test_a_beginning_with_few_blocks_stays_as_long_as_its_end() -> None:
    """Without its beginning the end could not be found."""
    table = CacheTable()
    table.fell_idle([2, 1], now=0.0)
    assert list(table.least_valuable({1: 1, 2: 4}.__getitem__, now=1.0)) == [2, 1]


def test_positions_that_cache_nothing_are_not_among_the_valuable() -> None:
    table = CacheTable()
    table.fell_idle([3, 2, 1], now=0.0)
    assert list(table.least_valuable({1: 1, 2: 0, 3: 0}.__getitem__, now=1.0)) == [1]
    table.forget(1)
    assert list(table.oldest()) == [3, 2] and len(table) == 2


def test_a_ranking_lasts_until_half_of_it_was_drawn_and_leaves_out_what_is_used_again_or_kept() -> None:
    table, looked_at = CacheTable(), []

    def num_cached(position: int) -> int:
        looked_at.append(position)
        return 4

    def give(count: int, keep: frozenset[int] = frozenset()) -> list[int]:
        looked_at.clear()
        drawn = table.draw_least_valuable(count, num_cached, 200.0, keep)
        for position in drawn:
            table.forget(position)
        return drawn

    for position in range(100):
        table.fell_idle([position], now=float(position))
    assert give(3, frozenset({1})) == [0, 2, 3]
    table.fell_busy(4)
    table.fell_busy(5)
    table.fell_idle([5], now=101.0)
    assert give(3) == [6, 7, 8]
    assert set(looked_at) == {6, 7, 8}
    assert give(44) == list(range(9, 53))
    assert give(2) == [1, 53]
    assert len(set(looked_at)) == len(table) + 2


def test_what_comes_where_cache_was_evicted_has_had_no_hits() -> None:
    table = CacheTable()
    table.hit(1, 1.0)
    table.cleared(1)
    table.fell_idle([1], now=2.0)
    table.fell_idle([2], now=2.5)
    assert list(table.least_valuable(full, now=10.0)) == [1, 2]


class TableMachine(RuleBasedStateMachine):
    """Requests come and go over six positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = CacheTable()
        self.now = 0.0
        self.busy: set[int] = set(range(6))
        self.idle: dict[int, float] = {}
        self.left: list[list[int]] = []
        self.hits: dict[int, list[float]] = {}

    @rule(pause=st.floats(0, 100))
    def wait(self, pause: float) -> None:
        self.now += pause

    @precondition(lambda self: self.busy)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        ended = data.draw(st.lists(st.sampled_from(sorted(self.busy)), min_size=1, unique=True))
        self.table.fell_idle(ended, self.now)
        self.busy -= set(ended)
        self.left.append(ended)
        self.idle |= dict.fromkeys(ended, self.now)

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        position = data.draw(st.sampled_from(sorted(self.idle)))
        self.leave(position)
        self.table.fell_busy(position)
        self.table.hit(position, self.now)
        self.hits.setdefault(position, []).append(self.now)
        self.busy.add(position)

    @precondition(lambda self: self.idle)
    @rule()
    def give_the_least_valuable(self) -> None:
        position = next(self.table.least_valuable(full, self.now))
        self.leave(position)
        self.table.forget(position)
        self.hits.pop(position, None)
        self.busy.add(position)  # another slab comes there one day

    @rule(count=st.integers(0, 4), keep=st.frozensets(st.integers(0, 5)))
    def draw(self, count: int, keep: frozenset[int]) -> None:
        drawn = self.table.draw_least_valuable(count, full, self.now, keep)
        allowed = set(self.idle) - keep
        assert len(drawn) == len(set(drawn)) == min(count, len(allowed)) and set(drawn) <= allowed
        for position in drawn:
            self.leave(position)
            self.table.forget(position)
            self.hits.pop(position, None)
            self.busy.add(position)

    def leave(self, position: int) -> None:
        del self.idle[position]
        self.left = [[p for p in left if p != position] for left in self.left]

    @invariant()
    def both_orders_name_the_idle_positions_once(self) -> None:
        self.table.check_integrity()
        assert sorted(self.table.oldest()) == sorted(self.idle)
        assert sorted(self.table.least_valuable(full, self.now)) == sorted(self.idle)
        times = [self.idle[position] for position in self.table.oldest()]
        assert times == sorted(times)

    @invariant()
    def the_end_with_the_fewest_recent_uses_goes_first(self) -> None:
        def rate(position: int) -> float:
            uses = [self.idle[position], *self.hits.get(position, [])[-NUM_HITS:]]
            return math.fsum(1 / max(self.now - used_s, 1e-3) for used_s in uses)

        ends = {context[0]: context[1:] for context in self.contexts()}
        order = []
        while ends:
            first = min(ends, key=lambda position: (rate(position), position))
            order.append(first)
            if behind := ends.pop(first):
                ends[behind[0]] = behind[1:]
        assert list(self.table.least_valuable(full, self.now)) == order

    def contexts(self) -> list[list[int]]:
        """The idle positions of each request, the end of its context first."""
        return [kept for left in self.left if (kept := [p for p in left if p in self.idle])]


TestAnyOrderOfUses = TableMachine.TestCase
TestAnyOrderOfUses.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
