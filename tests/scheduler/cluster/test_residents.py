import pytest
from cluster_jobs import job

from rose.scheduler.cluster.residents import Resident
from rose.scheduler.group.model import SloKind


def resident(kind: SloKind = SloKind.ITERATION, slowdown: float = 1.0) -> Resident:
    one = job("a", 60, 40, slo=1.5, slo_kind=kind)
    return Resident(job=one, since_s=0.0, work_s=10_000.0, slowdown=slowdown)


def test_a_slowed_job_ends_later_and_half_way_it_has_done_half() -> None:
    slow = resident(slowdown=1.25)
    assert slow.end_s == 12_500
    assert slow.at(6_250).work_s == pytest.approx(5_000)
    assert slow.at(6_250).end_s == pytest.approx(12_500)


def test_fast_iterations_pay_for_slow_ones_only_under_a_lifetime_slo() -> None:
    assert resident().at(5_000).limit_s == pytest.approx(150)
    # Half the work at 1.0 leaves 2.0 for the other half.
    assert resident(SloKind.LIFETIME).at(5_000).limit_s == pytest.approx(200)


def test_a_pause_tightens_the_limit_until_it_is_made_up_for() -> None:
    paused = resident(slowdown=1.5).paused(1_000)
    assert paused.limit_s == pytest.approx(140)
    assert paused.end_s == pytest.approx(16_000)
    assert resident(slowdown=1.0).at(5_000).paused(1_000).limit_s == pytest.approx(150)
