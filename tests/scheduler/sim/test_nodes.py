"""Simulated nodes: times that can be checked by hand, memory that comes back, and the baselines."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from sim.node.baselines import LeastUtilized, Printed, RoundRobin, Separate, SeparateDynamic

from rose.errors import ConfigError
from rose.scheduler.node.model import NodeProfile, Task, paper_profile
from rose.scheduler.node.policy import NodePolicy, Rules
from rose.scheduler.node.profile import write_profile
from rose.scheduler.sim.levels import simulate as main
from rose.scheduler.sim.node_results import Conditions, NodeResult, TaskPolicy
from rose.scheduler.sim.node_tasks import generated_tasks, trace_tasks
from rose.scheduler.sim.nodes import NodeSimulation
from rose.scheduler.sim.requests import TraceRow

PROFILE = paper_profile("llama-8b", 250)
FORWARD_S, BACKWARD_S = 0.11, 0.15
SLO_S = 5 * FORWARD_S
RULES = Rules(slo_s=SLO_S)
SHARED = Conditions(give_way_s=RULES.give_way_s, noise=0.0)
QUEUES = Conditions(noise=0.0)


def task(number: int, at_s: float = 0.0, tokens: int = 250, output: int = 1, *, trains: bool = False) -> Task:
    return Task(number=number, arrival_s=at_s, prompt_tokens=tokens, output_tokens=output, is_training=trains)


def shared(num_nodes: int = 4, profile: NodeProfile = PROFILE) -> NodePolicy:
    return NodePolicy(profile, num_nodes, RULES)


def play(
    tasks: Sequence[Task],
    policy: TaskPolicy | None = None,
    *,
    num_nodes: int = 4,
    conditions: Conditions = SHARED,
    profile: NodeProfile = PROFILE,
) -> tuple[NodeResult, NodeSimulation]:
    simulation = NodeSimulation(tasks, policy or shared(num_nodes), profile, num_nodes, conditions)
    return simulation.run(), simulation


def test_a_request_alone_takes_one_forward_pass() -> None:
    result, _ = play([task(0, 3.0)])
    assert result.requests[0].ttft_s == pytest.approx(FORWARD_S)
    assert result.duration_s == pytest.approx(FORWARD_S)
    assert result.num_nodes_used == 1


def test_a_training_task_alone_takes_forward_and_backward() -> None:
    result, _ = play([task(0, trains=True)])
    assert result.trained[0].end_s == pytest.approx(FORWARD_S + BACKWARD_S)


def test_generated_tokens_follow_the_first_one() -> None:
    (request,) = play([task(0, output=11)])[0].requests
    assert request.num_made == 11
    stages = PROFILE.stages
    a_token_s = sum(stage.forward.seconds(1, 2 * 256) for stage in stages)
    assert request.end_s - request.first_s == pytest.approx(10 * a_token_s, rel=0.01)


def test_a_request_waits_for_training_no_longer_than_it_takes_to_give_way() -> None:
    tasks = [task(0, trains=True, tokens=2000), task(1, 0.2)]
    (request,) = play(tasks, num_nodes=1)[0].requests
    assert request.ttft_s <= FORWARD_S + 2 * RULES.give_way_s + 1e-9
    (late,) = play(tasks, RoundRobin(1), num_nodes=1, conditions=QUEUES)[0].requests
    assert late.ttft_s > 3 * FORWARD_S  # a far dependency


def test_all_memory_comes_back() -> None:
    tasks = [replace(each, output_tokens=1 + each.number % 40) for each in generated_tasks(200, 60, 0.3, 1)]
    result, simulation = play(tasks)
    assert len(result.requests) + len(result.trained) == 200
    assert all(request.end_s < math.inf for request in result.requests)
    assert [node.used_bytes for node in simulation._nodes] == [0] * 4


def small_memory(num_tokens: int) -> NodeProfile:
    stage = PROFILE.stages[0]
    return replace(PROFILE, stages=(replace(stage, free_bytes=num_tokens * stage.kv_token_bytes),) * 2)


def test_sequences_are_offloaded_for_a_request_that_has_waited_and_go_on_later() -> None:
    profile = small_memory(1000)
    tasks = [task(number, 0.01 * number, output=400) for number in range(4)]
    result, simulation = play(tasks, shared(1, profile), num_nodes=1, profile=profile)
    assert result.num_offloads > 0
    assert [request.num_made for request in result.requests] == [400] * 4
    assert simulation._nodes[0].used_bytes == 0


def test_memory_that_is_never_checked_is_swapped() -> None:
    profile = small_memory(1000)
    tasks = [task(number, output=200) for number in range(8)]
    unchecked = replace(SHARED, memory=None)
    aware, _ = play(tasks, shared(1, profile), num_nodes=1, profile=profile)
    thrashing, _ = play(tasks, shared(1, profile), num_nodes=1, profile=profile, conditions=unchecked)
    assert thrashing.num_offloads == 0
    assert all(request.num_made == 200 for request in (*aware.requests, *thrashing.requests))


def test_what_no_empty_node_could_hold_is_refused() -> None:
    result, _ = play([task(0, tokens=3000), task(1)], shared(1), num_nodes=1, profile=small_memory(1000))
    assert (result.num_refused, result.attainment(SLO_S)) == (1, 0.5)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_all_requests_and_all_training_are_done(share: float) -> None:
    result, _ = play(generated_tasks(100, 40, share, 0))
    assert (len(result.requests), len(result.trained)) == (round(100 * (1 - share)), round(100 * share))
    assert result.attainment(SLO_S) > 0.9


def test_the_same_seed_gives_the_same_result() -> None:
    tasks = generated_tasks(200, 60, 0.5, 3)
    first, second = (play(tasks, conditions=replace(SHARED, noise=0.1))[0] for _ in range(2))
    assert [each.ttft_s for each in first.requests] == [each.ttft_s for each in second.requests]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("rate", [20, 60, 120])
def test_sharing_keeps_at_least_the_slos_that_separate_nodes_keep(rate: float, share: float) -> None:
    tasks = generated_tasks(400, rate, share, 0)
    ours, _ = play(tasks)
    theirs, _ = play(tasks, Separate(4, share), conditions=QUEUES)
    assert ours.attainment(SLO_S) >= theirs.attainment(SLO_S)
    assert ours.throughput >= 0.9 * theirs.throughput  # a short run ends with the training that waited


@pytest.mark.parametrize(
    "policy",
    [
        RoundRobin(4),
        LeastUtilized(4, PROFILE),
        Separate(4, 0.5),
        SeparateDynamic(4, 0.5),
        Printed(4, PROFILE, 250, SLO_S),
    ],
)
def test_baselines_do_every_task(policy: TaskPolicy) -> None:
    result, simulation = play(generated_tasks(200, 60, 0.5, 0), policy, conditions=QUEUES)
    assert len(result.requests) + len(result.trained) == 200
    assert [node.used_bytes for node in simulation._nodes] == [0] * 4


@pytest.mark.parametrize(("share", "num_training"), [(0.0, 0), (0.1, 1), (0.5, 2), (0.9, 3), (1.0, 4)])
def test_separate_nodes_leave_one_to_each_kind_of_task(share: float, num_training: int) -> None:
    assert Separate(4, share).num_training == num_training


def test_a_trace_is_rescaled_to_the_rate() -> None:
    trace = [TraceRow(arrival_s=2.0 * k, prompt_tokens=k + 1, output_tokens=7) for k in range(50)]
    tasks = trace_tasks(trace, 10, 5.0, 0.5, 0)
    assert tasks[-1].arrival_s == pytest.approx(9 / 5)
    assert [each.output_tokens for each in tasks if each.is_training] == [1] * 5
    with pytest.raises(ValueError, match="more than 50 rows, got 50"):
        trace_tasks(trace, 50, 5.0, 0.5, 0)


# The command ------------------------------------------------------------------------------------------------


def test_the_command_says_what_happened_and_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "stages.json"
    write_profile(PROFILE, path)
    argv = ["--level", "node", "--tasks", "50", "--explain", "200", "--profile", str(path)]
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "the best score of the nodes that answer within" in out
    assert "has nothing else to start" in out
    assert "simulated: llama-8b" in out and "node 3:" in out


def test_a_profile_of_other_hardware_is_refused_and_its_own_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "stages.json"
    write_profile(PROFILE, path)
    argv = ["--level", "node", "--tasks", "20", "--profile", str(path), "--hardware"]
    with pytest.raises(ConfigError, match=r"the profile is of .* and these nodes are H800; run rose sched"):
        main([*argv, "H800"])
    assert main([*argv, PROFILE.hardware]) == 0
    assert f"on {PROFILE.hardware}, 2 stages" in capsys.readouterr().out


def test_an_slo_that_no_node_can_keep_holds_no_training_back(capsys: pytest.CaptureFixture[str]) -> None:
    main(
        ["--level", "node", "--tasks", "100", "--rate", "400", "--slo-s", "0.01", "--explain", "99", "--json"]
    )
    report = json.loads(capsys.readouterr().out)
    assert (report["attainment"], report["training_tasks"]) == (0.0, 50)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--training-share", "1.5"], "--training-share 1.5: a share is from 0 to 1"),
        (["--rate", "0"], "--rate 0.0: tasks per second must be above 0"),
        (["--slo-s", "-1"], "--slo-s -1.0: an SLO must be above 0 s"),
        (["--gpus", "1"], "has 2 stages and a node has 1 GPUs"),
        (["--hardware", "H800"], "--hardware H800: the published times are of A100, from LeMix Table II"),
        (["--profile", "/nowhere.json"], "/nowhere.json: can't be read (No such file"),
        (["--trace", "/nowhere.csv"], "/nowhere.csv: can't be read (No such file"),
    ],
)
def test_wrong_input_is_named(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        main(["--level", "node", *argv])
    assert message in str(error.value)
