"""Where requests and training tasks go, by the shipped rules."""

from dataclasses import replace

import pytest

from rose.scheduler.node.model import Task, paper_profile
from rose.scheduler.node.policy import NodePolicy, Rules

PROFILE = paper_profile("llama-8b", 250)
"""0.11 s forward and 0.15 s backward at 250 tokens, on two stages."""
RULES = Rules(slo_s=0.55)


def request(number: int, at_s: float = 0.0, tokens: int = 250) -> Task:
    return Task(number=number, arrival_s=at_s, prompt_tokens=tokens)


def training(number: int, at_s: float = 0.0, tokens: int = 250) -> Task:
    return replace(request(number, at_s, tokens), is_training=True)


def place(policy: NodePolicy, task: Task, now: float) -> int:
    placement = policy.place(task, now)
    assert placement is not None
    return placement.where


def test_few_requests_stay_on_one_node() -> None:
    policy = NodePolicy(PROFILE, 4, RULES)
    nodes = [place(policy, request(number, float(number)), float(number)) for number in range(10)]
    assert len(set(nodes)) == 1


def test_a_burst_opens_nodes_before_the_slo_is_missed() -> None:
    policy = NodePolicy(PROFILE, 4, RULES)
    ends = [policy.place(request(number), 0.0) for number in range(16)]
    assert {end.where for end in ends if end is not None} == {0, 1, 2, 3}
    assert max(end.finish_s for end in ends if end is not None) <= RULES.slo_s


def test_beyond_capacity_the_fastest_node_is_chosen() -> None:
    policy = NodePolicy(PROFILE, 2, RULES)
    for number in range(40):
        scores = policy.scores(request(number), 0.0)
        node = place(policy, request(number), 0.0)
        if all(each.response_s > RULES.fill_share * RULES.slo_s for each in scores):
            least_s = min(each.response_s for each in scores)
            assert scores[node].response_s <= least_s + 0.05 * RULES.slo_s


def test_scores_plan_nothing() -> None:
    policy = NodePolicy(PROFILE, 2, RULES)
    assert policy.scores(request(0), 1.0) == policy.scores(request(0), 1.0)


def test_a_slower_node_scores_lower() -> None:
    """Equation 3 as printed would score it higher."""
    policy = NodePolicy(PROFILE, 2, RULES)
    assert place(policy, request(0), 0.0) == 0
    busy, free = policy.scores(request(1), 0.0)
    assert busy.response_s > free.response_s
    assert busy.score_s < free.score_s


def test_training_waits_in_one_queue_until_a_node_pulls_it() -> None:
    policy = NodePolicy(PROFILE, 2, RULES)
    first, second = training(0), training(1)
    assert policy.place(first, 0.0) is None
    assert policy.place(second, 0.0) is None
    assert (policy.pull(1, 0.0), policy.pull(0, 0.0), policy.pull(0, 0.0)) == (first, second, None)


def test_training_waits_while_every_node_would_miss_the_next_request() -> None:
    policy = NodePolicy(PROFILE, 2, RULES)
    for number in range(40):
        policy.place(request(number), 0.0)
    policy.place(training(99), 0.0)
    assert policy.delays_requests(0.0)
    assert policy.pull(0, 0.0) is None
    assert policy.pull(0, 10.0) == training(99)


def test_a_node_begins_no_more_training_than_its_limit() -> None:
    policy = NodePolicy(PROFILE, 1, replace(RULES, max_guests=2))
    tasks = [training(number) for number in range(3)]
    for task in tasks:
        policy.place(task, 0.0)
    assert [policy.pull(0, 0.0) for _ in range(3)] == [tasks[0], tasks[1], None]
    for stage in (0, 1):
        policy.forward_ended(0, tasks[0], stage, 0.1)
    for stage in (1, 0):
        policy.backward_ended(0, tasks[0], stage, 0.3)
    assert policy.pull(0, 0.3) == tasks[2]


def test_without_requests_nothing_holds_training_back() -> None:
    policy = NodePolicy(PROFILE, 1, RULES)
    policy.place(training(0), 0.0)
    assert not policy.delays_requests(0.0)
    assert policy.ask_order(0.0) == [0]
    assert policy.pull(0, 0.0) == training(0)
    assert policy.ask_order(0.0) == []


def test_requests_join_a_node_that_decodes_already() -> None:
    policy = NodePolicy(PROFILE, 3, RULES)
    policy.decoding(2, 4, 1000)
    assert place(policy, request(0), 0.0) == 2
    policy.decoding(2, 0, 0)
    assert policy.plans[2].extra_s == [0.0, 0.0]


@pytest.mark.parametrize("wrong", [{"slo_s": 0.0}, {"give_way_s": 0.0}, {"fill_share": 1.5}])
def test_rules_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Rules(**({"slo_s": 0.5} | wrong))  # type: ignore[arg-type]
