"""Traces of jobs with priorities and teams on few nodes: by the policy alone and through the scheduler."""

import json
from pathlib import Path
from typing import Any

import pytest
from full_cluster import pool

from rose.cli import main
from rose.scheduler.cluster.choice import POLICIES
from rose.scheduler.group.model import Job
from rose.scheduler.runtime.job.spec import ServeSpec
from rose.scheduler.sim.live import SchedulerReplay
from rose.scheduler.sim.loop import Simulation, SimulationResult
from rose.scheduler.sim.workloads import Submission

HOUR_S = 3600.0
PAUSE_S = 100.0


def job(name: str, arrival_s: float, hours: float, priority: int = 0, **fields: Any) -> Submission:
    shape = Job(name=name, rollout_s=100, train_s=100, slo=1.9, **fields.pop("nodes", {}))
    return Submission(job=shape, arrival_s=arrival_s, work_s=hours * HOUR_S, priority=priority, **fields)


def play(jobs: list[Submission], is_live: bool, num_nodes: int = 1, **cluster: Any) -> SimulationResult:
    pools = {"rollout": pool("h20", num_nodes), "train": pool("h800", num_nodes)}
    content = {"policy": "solo", "pools": pools, "move_pause_s": PAUSE_S, **cluster}
    spec = ServeSpec.model_validate(content)
    if is_live:
        return SchedulerReplay(jobs, "solo", cluster=spec).run()
    policy, pools_of = POLICIES["solo"](0), spec.pools.to_pools()
    rules = spec.to_preemption()
    return Simulation(jobs, policy, pools_of, pause_s=PAUSE_S, preemption=rules).run()


both = pytest.mark.parametrize("is_live", [False, True])


@both
def test_a_job_of_higher_priority_waits_for_the_end_of_an_iteration_alone(is_live: bool) -> None:
    jobs = [job("low", 0.0, 2), job("high", 1050.0, 1, 5)]
    found = play(jobs, is_live, preemption={"by_priority": True, "min_run_s": 0})
    assert (found.num_preemptions, found.attainment) == (1, 1.0)
    assert found.waited_s == {5: pytest.approx(150.0), 0: pytest.approx(HOUR_S)}
    assert found.duration_s == pytest.approx(3 * HOUR_S + PAUSE_S), "no work is lost; it starts again"


def test_iterations_are_counted_from_the_start_of_a_job_whose_last_one_is_short() -> None:
    jobs = [job("low", 0.0, 7300 / HOUR_S), job("high", 1050.0, 1, 5)]
    assert play(jobs, False, preemption={"by_priority": True, "min_run_s": 0}).waited_s[5] == pytest.approx(
        150.0
    )


@both
def test_a_least_time_is_kept_and_without_the_rule_nobody_leaves(is_live: bool) -> None:
    jobs = [job("low", 0.0, 2), job("high", 1050.0, 1, 5)]
    later = play(jobs, is_live, preemption={"by_priority": True, "min_run_s": 2001})
    assert later.num_preemptions == 1
    assert later.waited_s[5] == pytest.approx(2200.0 - 1050.0)
    never = play(jobs, is_live, preemption={})
    assert never.num_preemptions == 0
    assert never.waited_s[5] == pytest.approx(2 * HOUR_S - 1050.0)


@both
def test_a_large_job_takes_two_places_and_a_small_one_does_not_get_between(is_live: bool) -> None:
    two = {"num_rollout_nodes": 2, "num_train_nodes": 2}
    jobs = [
        job("a", 0.0, 2),
        job("b", 90.0, 2),  # its iterations end at other times
        job("large", 1010.0, 1, 5, nodes=two),
        job("small", 1011.0, 1),
    ]
    found = play(jobs, is_live, num_nodes=2, preemption={"by_priority": True, "min_run_s": 0})
    assert found.num_preemptions == 2
    assert found.waited_s[5] == pytest.approx(190.0)


@both
def test_a_team_below_its_share_takes_a_place(is_live: bool) -> None:
    teams: dict[str, Any] = {"a": {}, "b": {}}
    jobs = [job(f"a{number}", 0.0, 2, team="a") for number in range(3)]
    jobs += [job(f"b{number}", 1050.0, 2, team="b") for number in range(2)]
    fair = {"teams": teams, "preemption": {"by_priority": True, "by_share": True, "min_run_s": 0}}
    assert play(jobs, is_live, num_nodes=2, **fair).num_preemptions == 1
    assert play(jobs, is_live, num_nodes=2, teams=teams).num_preemptions == 0


@both
def test_many_jobs_of_many_priorities_all_end(is_live: bool) -> None:
    jobs = [job(f"j{n}", 1000.0 * n, 0.3 + n % 4, n * 7 % 5, team="ab"[n % 2]) for n in range(16)]
    rules = {"by_priority": True, "by_share": True, "min_run_s": 600}
    found = play(jobs, is_live, num_nodes=2, teams={"a": {}, "b": {}}, preemption=rules)
    assert found.num_jobs == 16 and found.num_preemptions > 2
    assert found.peak_dollars_per_hour <= 2 * (16.0 + 16.0), "never more than two nodes of each pool"
    waits = list(found.waited_s.values())
    assert waits[0] < waits[-1] / 4, "the highest priority waits least"


CLUSTER = """
pools:
  rollout: {name: h20, dollars_per_gpu_hour: 1.85, num_nodes: 1}
  train: {name: h800, dollars_per_gpu_hour: 5.28, num_nodes: 1}
policy: solo
teams: {math: {}}
preemption: {by_priority: true, min_run_s: 0}
"""


@pytest.mark.parametrize("flags", [[], ["--live"]])
def test_the_command_takes_the_file_of_a_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    trace, cluster = tmp_path / "trace.csv", tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER)
    trace.write_text("arrival_s,duration_s,priority,team\n0,7200,,math\n3000,3600,3,\n")
    argv = ["sched", "simulate", "--trace", str(trace), "--cluster", str(cluster), "--stretch", "--json"]
    assert main([*argv, *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["policy"], report["preemptions"], report["jobs"]) == ("solo", 1, 2)
    assert list(report["mean_wait_s"]) == ["3", "0"]
    assert main([*argv[:-1], *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "simulated: 2 jobs under policy solo"
    facts = dict(line.strip().split("  ", 1) for line in lines[1:])
    assert facts["preemptions"].strip() == "1"
    assert facts["mean wait, priority 3"].endswith(" s in the queue")
    assert not any("{" in line for line in lines)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("0,10,high,", "line 2: invalid literal for int() with base 10: 'high'"),
        ("0,10,1,vision", "the trace's teams vision are not in the cluster's file, which has math: add them"),
    ],
)
def test_a_wrong_trace_is_refused_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str, words: str
) -> None:
    trace, cluster = tmp_path / "trace.csv", tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER)
    trace.write_text(f"arrival_s,duration_s,priority,team\n{lines}\n")
    assert main(["sched", "simulate", "--trace", str(trace), "--cluster", str(cluster)]) != 0
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
