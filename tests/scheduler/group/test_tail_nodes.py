"""Tails on whole nodes: which ones they keep, and when the prediction says that moving pays."""

from sim.group.scenario import group_of

from rose.scheduler.group.certificate import certify
from rose.scheduler.group.order import round_robin
from rose.scheduler.group.tail import THRESHOLDS, RolloutSpeed
from rose.scheduler.group.tail_nodes import NodeTail, choose_threshold, kept_nodes, kept_now

SPEED = RolloutSpeed(
    num_workers=2, step_s=0.01, request_s=0.001, prompt_tokens=10, prefill_tokens_per_s=1e5, max_tokens=1000
)
TAIL = NodeTail(speed=SPEED, past=[[50] * 18 + [1000] * 2])


def test_a_tail_keeps_the_nodes_that_the_fewest_others_use() -> None:
    group = group_of([(10.0, 1.0, (0, 1, 2)), (5.0, 1.0, (0,)), (5.0, 1.0, (0, 1))])
    assert kept_nodes(group, "a", 1) == (2,)
    assert kept_nodes(group, "a", 2) == (1, 2)
    alone = group_of([(10.0, 1.0, (0, 1)), (5.0, 1.0, (0, 1))])
    assert kept_nodes(alone, "a", 1) is None, "b needs the kept node as well"


def test_the_threshold_is_off_where_training_is_the_bottleneck_and_on_where_rollouts_are() -> None:
    for train_s, is_on in ((0.5, True), (40.0, False)):
        group = group_of([(22.0, train_s, (0, 1)), (6.0, train_s, (1,))])
        certificate = certify(group, round_robin(group))
        chosen = choose_threshold(group, certificate, "a", {"a": TAIL}, {})
        assert (chosen in THRESHOLDS) == is_on, train_s


def test_a_profile_that_is_slower_than_the_certified_phase_moves_nothing() -> None:
    group = group_of([(0.5, 0.1, (0, 1)), (6.0, 0.1, (1,))])
    certificate = certify(group, round_robin(group))
    assert choose_threshold(group, certificate, "a", {"a": TAIL}, {}) is None


def test_only_a_tail_that_ends_in_time_may_move() -> None:
    group = group_of([(22.0, 1.0, (0, 1)), (6.0, 1.0, (1,))])
    for left_s, keep in ((20.0, (0,)), (10.0, None)):
        assert kept_now(group, "a", SPEED, num_left=2, reached_tokens=50, left_s=left_s) == keep
