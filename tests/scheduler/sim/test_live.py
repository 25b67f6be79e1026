"""Traces played through the scheduler itself, against what the policy alone promises."""

import json
from pathlib import Path

import pytest

from rose.cli import main
from rose.config import parse_config
from rose.scheduler.cluster.choice import POLICIES
from rose.scheduler.group.model import Job, Phase, SloKind
from rose.scheduler.runtime.decide.cluster_scheduler import ClusterScheduler
from rose.scheduler.runtime.job.spec import ServeSpec
from rose.scheduler.sim.live import NO_LEASE_S, SchedulerReplay
from rose.scheduler.sim.loop import Simulation
from rose.scheduler.sim.progress import ProgressLines
from rose.scheduler.sim.workloads import Submission, Workload, generate_trace, submissions

HOUR_S = 3600.0
NODES = 14.80 + 42.24


def submitted(name: str, arrival_s: float, hours: float, train_s: float = 100) -> Submission:
    job = Job(name=name, rollout_s=100, train_s=train_s, slo=1.9)
    return Submission(job=job, arrival_s=arrival_s, work_s=hours * HOUR_S)


def test_jobs_alone_and_beside_each_other_cost_what_the_policy_says() -> None:
    for jobs in ([submitted("a", 60.0, 2)], [submitted("a", 0.0, 2), submitted("b", 0.0, 1)]):
        live, alone = SchedulerReplay(jobs, "weave").run(), Simulation(jobs, POLICIES["weave"](0)).run()
        assert live.dollars == pytest.approx(alone.dollars, rel=0.02) == pytest.approx(2 * NODES, rel=0.02)
        assert live.attainment == alone.attainment == 1.0


def test_jobs_that_keep_their_ends_leave_when_the_trace_says() -> None:
    slow = [submitted(name, 0.0, 2, train_s=200) for name in "ab"]
    longer, kept = SchedulerReplay(slow, "weave").run(), SchedulerReplay(slow, "weave", keeps_ends=True).run()
    assert kept.duration_s == pytest.approx(2 * HOUR_S)
    assert longer.duration_s == pytest.approx(2 * HOUR_S * 4 / 3, rel=0.05), "in cycles of 400 s, alone 300"


def test_a_job_that_is_cancelled_while_it_waits_for_nodes_has_ended_without_its_slo() -> None:
    pools = {kind: {"name": kind, "dollars_per_gpu_hour": 2.0, "num_nodes": 1} for kind in Phase}
    spec = {"policy": "solo", "pools": pools, "lease_s": NO_LEASE_S}
    ended: list[tuple[int, int]] = []
    jobs = [submitted("a", 0.0, 2), submitted("b", 60.0, 1)]
    played = SchedulerReplay(jobs, "solo", keeps_ends=True, progress=lambda *num: ended.append(num))
    played.scheduler = ClusterScheduler(parse_config(spec, ServeSpec, "one node each"), {}, 0.0, 1, "replay")
    assert (played.run().violated, ended) == (("b",), [(1, 2), (2, 2)])


@pytest.mark.parametrize("kind", SloKind)
def test_a_trace_with_moves_keeps_all_slos_and_repeats_exactly(kind: SloKind) -> None:
    jobs = submissions(generate_trace(0, 8), Workload.MIXED, 0, slo=(1.2, 2.0), slo_kind=kind)
    ended: list[tuple[int, int]] = []
    first = SchedulerReplay(jobs, "lifetime", keeps_ends=True, progress=lambda *num: ended.append(num)).run()
    assert ended == [(num, 8) for num in range(1, 9)]
    assert first.attainment == 1.0, first.violated
    assert SchedulerReplay(jobs, "lifetime", keeps_ends=True).run() == first


def test_the_command_plays_a_trace_through_the_scheduler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,duration_s,num_gpus\n0,3600,8\n10,7200,8\n")
    assert main(["sched", "simulate", "--live", "--trace", str(trace), "--policy", "weave", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["jobs"], report["attainment"]) == (2, 1.0)


def test_a_policy_that_no_running_cluster_has_is_refused_by_name(tmp_path: Path) -> None:
    assert main(["sched", "simulate", "--live", "--policy", "greedy"]) != 0


def test_progress_is_said_at_most_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    quiet, loud = ProgressLines("quiet"), ProgressLines("loud", every_s=0.0)
    quiet(1, 2)
    loud(1, 2)
    assert capsys.readouterr().err == "loud: 1 of 2 jobs have ended, 0 s\n"


@pytest.mark.parametrize("seed", [5, 7])
def test_iterations_in_progress_keep_their_slos_when_jobs_join_and_leave_an_order_in_turns(seed: int) -> None:
    jobs = submissions(generate_trace(seed)[:12], Workload.ROLLOUT_HEAVY, seed)
    assert SchedulerReplay(jobs, "lifetime-multirate", keeps_ends=True).run().violated == ()
