"""What a worker runs."""

import itertools
import random

import pytest

from rose.scheduler.gpu.lookahead import ALONE, Action, Claim, LookAhead, Next, first_of
from rose.scheduler.gpu.slowdown import Share, SlowdownTable, splits
from rose.scheduler.gpu.substages import SubStageKind

TRAIN, SMALL, TOOL = SubStageKind.TRAIN, SubStageKind.ROLLOUT_SMALL, SubStageKind.TOOL


class Halves:
    """Slowdowns by pair, whatever the shares."""

    def __init__(self, **pairs: float) -> None:
        self._pairs = pairs

    def slowdown(self, kind: SubStageKind, beside: SubStageKind | None, share: Share) -> float | None:
        names = {TRAIN: "train", SMALL: "small"}
        return self._pairs.get(f"{names[kind]}_{names[beside]}") if beside is not None else 1.0


MODEL = Halves(train_train=2.2, train_small=1.3, small_train=1.1, small_small=1.1)


def chain(*parts: tuple[SubStageKind, float]) -> list[Next]:
    return [Next(kind=kind, seconds=seconds) for kind, seconds in parts]


def test_complementary_sub_stages_share_and_alike_trainings_do_not() -> None:
    policy = LookAhead(MODEL)
    shared = policy.decide((chain((TRAIN, 10.0)), chain((SMALL, 10.0))), 0)
    assert shared.is_shared and shared.rates == pytest.approx((1 / 1.3, 1 / 1.1))
    assert policy.decide((chain((TRAIN, 10.0)), chain((TRAIN, 10.0))), 1) == ALONE[1]


def test_a_pair_that_was_never_measured_runs_one_after_the_other() -> None:
    policy = LookAhead(SlowdownTable(hardware="none", entries={}))
    assert policy.decide((chain((TRAIN, 10.0)), chain((SMALL, 10.0))), 0) == ALONE[0]


def test_a_short_sub_stage_that_was_never_measured_does_not_keep_the_pipelines_apart() -> None:
    first_steps, decoding = (SubStageKind.ROLLOUT_MEDIUM, 0.1), (SMALL, 10.0)
    table = SlowdownTable(hardware="none", compute=(0.5,), memory=(0.5,), entries={(SMALL, SMALL): ((1.1,),)})
    both = chain(decoding), chain(first_steps, decoding)
    policy = LookAhead(table, 3, grid=splits(table.compute, table.memory))
    assert policy.decide(both, 0) == ALONE[1]
    assert policy.decide((both[0], both[1][1:]), 0).is_shared


def test_a_pair_without_room_for_both_runs_one_after_the_other() -> None:
    policy = LookAhead(MODEL, least_memory=({TRAIN: 0.5}, {SMALL: 0.6}))
    assert policy.decide((chain((TRAIN, 10.0)), chain((SMALL, 10.0))), 0) == ALONE[0]
    roomier = LookAhead(MODEL, least_memory=({TRAIN: 0.5}, {SMALL: 0.4}))
    action = roomier.decide((chain((TRAIN, 10.0)), chain((SMALL, 10.0))), 0)
    assert action.shares[0] is not None and action.shares[0].memory == pytest.approx(0.6)


def test_the_least_level_of_memory_is_enough_by_default() -> None:
    policy = LookAhead(MODEL, least_memory=({TRAIN: 0.8}, {}))
    assert policy.decide((chain((TRAIN, 10.0)), chain((SMALL, 10.0))), 0).is_shared


def test_one_ready_pipeline_has_the_whole_gpu() -> None:
    policy = LookAhead(MODEL)
    assert policy.decide((chain((TRAIN, 10.0)), []), 0) == ALONE[0]
    assert policy.decide(([], chain((SMALL, 10.0))), 0) == ALONE[1]


def test_looking_ahead_runs_first_what_a_tool_can_hide_behind() -> None:
    """Figure 11: B's rollout first, so that A's training hides B's tool."""
    chains = chain((TRAIN, 10.0)), chain((TRAIN, 2.0), (TOOL, 10.0), (SMALL, 1.0))
    assert LookAhead(MODEL, 3).decide(chains, 1) == ALONE[1]


def test_a_longer_chain_does_not_get_the_gpu_for_being_longer() -> None:
    """Beside a training with a long rollout behind it, a short rollout goes on."""
    chains = chain((TRAIN, 15.0), (SMALL, 60.0)), chain((SMALL, 15.0), (TRAIN, 5.0))
    assert LookAhead(MODEL, 2).decide(chains, 0).is_shared


def test_a_window_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        LookAhead(MODEL, 0)


def test_what_is_not_searched_further_is_never_better() -> None:
    """The bound changes no decision: every sequence of actions, played to its end, is no shorter."""
    chance = random.Random(3)
    kinds = (TRAIN, SMALL)
    for _ in range(100):
        table = Halves(
            **{f"{a}_{b}": chance.uniform(1, 3) for a, b in itertools.product(("train", "small"), repeat=2)}
        )
        policy = LookAhead(table, 2)
        chains = [chain(*((chance.choice(kinds), chance.uniform(1, 9)) for _ in range(2))) for _ in range(2)]
        chosen = policy.decide((chains[0], chains[1]), 0)
        actions = policy.actions(chains[0][0].kind, chains[1][0].kind, 0)
        costs = {action: _cost(policy, action, chains[0], chains[1]) for action in actions}
        assert costs[chosen] <= min(costs.values()) * (1 + 1e-5)


def _cost(policy: LookAhead, action: Action, one: list[Next], two: list[Next], depth: int = 2) -> float:
    """The same recursion without bounds, on copies of the chains."""
    rates = action.rates
    ends = [
        part[0].seconds / rate if rate else float("inf") for part, rate in zip((one, two), rates, strict=True)
    ]
    passed_s = min(ends)
    rest = []
    for part, rate, end in zip((one, two), rates, ends, strict=True):
        left = [Next(kind=part[0].kind, seconds=part[0].seconds - passed_s * rate), *part[1:]]
        rest.append(part[1:] if end <= passed_s else left)
    if depth == 1 or not all(rest):
        return passed_s + sum(each.seconds for part in rest for each in part) / 2
    following = policy.actions(rest[0][0].kind, rest[1][0].kind, 0)
    return passed_s + min(_cost(policy, each, rest[0], rest[1], depth - 1) for each in following)


def test_an_exclusive_phase_goes_first_once_in_an_iteration_of_the_other_pipeline() -> None:
    def claim(began_s: float, before_s: float, *, is_exclusive: bool = False) -> Claim:
        return Claim(began_s=began_s, before_s=before_s, is_exclusive=is_exclusive)

    waits = claim(5.0, 0.0)
    assert first_of(claim(9.0, 1.0), waits) == 1, "whose iteration began earlier"
    assert first_of(claim(9.0, 1.0, is_exclusive=True), waits) == 0, "its last one began before the other's"
    assert first_of(claim(9.0, 7.0, is_exclusive=True), waits) == 1, "it has overtaken once"
    assert first_of(waits, claim(9.0, 1.0, is_exclusive=True)) == 1
    both = claim(9.0, 1.0, is_exclusive=True), claim(5.0, 0.0, is_exclusive=True)
    assert first_of(*both) == 1
