from dataclasses import replace
from pathlib import Path

import pytest
from sim.drift import drifts

from rose.errors import ConfigError
from rose.scheduler.cluster.candidates import CandidateKind
from rose.scheduler.cluster.lifetime import Lifetime
from rose.scheduler.cluster.policies import ClusterPolicy, Greedy, Solo, Weave
from rose.scheduler.cluster.pools import Pool, Pools
from rose.scheduler.group.model import Job, SloKind
from rose.scheduler.sim.loop import Drift, Failure, Simulation
from rose.scheduler.sim.workloads import Submission, Workload, generate_trace, read_trace, submissions

HOUR_S = 3600.0
NODES = 14.80 + 42.24
TRACE = generate_trace(0, 60)


def submitted(name: str, arrival_s: float, hours: float, slo: float = 1.9) -> Submission:
    return Submission(
        job=Job(name=name, rollout_s=100, train_s=100, slo=slo), arrival_s=arrival_s, work_s=hours * HOUR_S
    )


def test_one_job_costs_its_nodes_for_its_time() -> None:
    result = Simulation([submitted("a", 60.0, 2)], Weave()).run()
    assert result.dollars == pytest.approx(2 * NODES)
    assert result.duration_s == pytest.approx(2 * HOUR_S)


def test_a_shared_pair_of_nodes_is_paid_once() -> None:
    jobs = [submitted("a", 0.0, 2), submitted("b", 0.0, 1)]
    result = Simulation(jobs, Weave()).run()
    assert result.dollars == pytest.approx(2 * NODES)
    assert (result.kinds[CandidateKind.DIRECT], result.attainment) == (1, 1.0)


def test_slowed_jobs_stay_longer_unless_they_keep_their_ends() -> None:
    jobs = [submitted(name, 0.0, 1, slo=3.0) for name in ("a", "b", "c", "d")]
    policy = Weave(prune_saturated=False)
    assert Simulation(jobs, policy, keeps_ends=True).run().dollars == pytest.approx(NODES)
    # Four trainings of 100 s in a cycle where one job alone takes 200.
    assert Simulation(jobs, policy).run().dollars == pytest.approx(2 * NODES)


def test_a_job_without_nodes_waits_for_them() -> None:
    pools = Pools(train=Pool(name="h800", dollars_per_gpu_hour=5.28, num_nodes=1))
    jobs = [
        submitted("a", 0.0, 2, slo=1.01),
        submitted("b", 0.0, 1, slo=1.01),
        submitted("c", 0.0, 1, slo=1.01),
    ]
    result = Simulation(jobs, Solo(), pools).run()
    assert result.duration_s == pytest.approx(4 * HOUR_S)
    assert result.attainment == 1.0


def test_a_broken_slo_is_counted() -> None:
    jobs = [submitted(name, 0.0, 1, slo=1.1) for name in ("a", "b", "c")]
    result = Simulation(jobs, Greedy()).run()
    assert (result.attainment, result.violated) == (0.0, ("a", "b", "c"))


def test_a_crashed_job_comes_back_and_the_others_never_stop() -> None:
    jobs = [submitted("a", 0.0, 2), submitted("b", 0.0, 2)]
    failure = Failure(time_s=HOUR_S, name="a", away_s=HOUR_S / 2)
    result = Simulation(jobs, Weave(), failures=[failure]).run()
    assert result.duration_s == pytest.approx(2.5 * HOUR_S)
    assert sum(result.kinds.values()) == 3


def test_a_job_that_drifts_over_a_limit_is_placed_anew() -> None:
    jobs = [submitted("a", 0.0, 4, slo=1.2), submitted("b", 0.0, 4, slo=1.2)]
    result = Simulation(jobs, Weave(), changes=[Drift(time_s=HOUR_S, name="b", factor=1.5)]).run()
    assert (result.num_moves, result.attainment, result.kinds[CandidateKind.ISOLATED]) == (1, 1.0, 2)


@pytest.mark.parametrize("kind", SloKind)
@pytest.mark.parametrize("multi_rate", [False, True])
def test_lifetime_keeps_every_slo_and_costs_less_than_weave(kind: SloKind, multi_rate: bool) -> None:
    jobs = submissions(TRACE, Workload.MIXED, 1, slo_kind=kind)
    for keeps_ends in (True, False):
        weave = Simulation(jobs, Weave(), keeps_ends=keeps_ends).run()
        simulation = Simulation(jobs, Lifetime(multi_rate=multi_rate), keeps_ends=keeps_ends)
        result = simulation.run()
        assert not simulation.cluster.groups
        assert (weave.attainment, result.attainment) == (1.0, 1.0)
        assert result.dollars < weave.dollars < Simulation(jobs, Solo(), keeps_ends=keeps_ends).run().dollars


def test_no_policy_costs_less_than_the_optimum_of_its_class() -> None:
    pytest.importorskip("ortools", reason="the optimum needs OR-tools: the extra `cluster`")
    from rose.scheduler.cluster.exact import Exact

    jobs = submissions(TRACE, Workload.MIXED, 2)
    best = Simulation(jobs, Exact(), keeps_ends=True, pause_s=0.0).run()
    policies: tuple[ClusterPolicy, ...] = (Weave(), Weave(prune_saturated=False), Lifetime())
    for policy in policies:
        assert Simulation(jobs, policy, keeps_ends=True).run().dollars >= best.dollars - 1e-6


def test_drift_costs_at_most_a_move_a_job() -> None:
    jobs = submissions(TRACE, Workload.MIXED, 3)
    result = Simulation(jobs, Weave(), keeps_ends=True, changes=drifts(jobs, "mixed", 3)).run()
    assert result.mean_attainment >= 0.98
    assert result.num_moves <= len(jobs)


def test_the_same_seed_gives_the_same_run() -> None:
    one, other = (Simulation(submissions(TRACE, Workload.MIXED, 4), Lifetime()).run() for _ in range(2))
    assert one == other
    assert submissions(TRACE, Workload.MIXED, 5) != submissions(TRACE, Workload.MIXED, 4)


def test_table_6_is_drawn_within_its_bounds() -> None:
    for one in submissions(TRACE, Workload.ROLLOUT_HEAVY, 0):
        assert 100 <= one.job.rollout_s <= 600
        assert 25 <= one.job.train_s <= 200
        assert replace(one.job).slo <= 2


def test_a_trace_with_a_bad_line_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,duration_s,num_gpus\n0,3600,1\n5,soon,1\n")
    with pytest.raises(ConfigError, match=r"line 3: could not convert string to float: 'soon'"):
        read_trace(path)
    path.write_text("arrival_s\n0\n")
    with pytest.raises(ConfigError, match="no column duration_s"):
        read_trace(path)
