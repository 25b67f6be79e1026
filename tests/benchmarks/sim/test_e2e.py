"""The simulator of whole RL jobs: tokens, late answers and baselines' GPUs all count."""

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from e2e_worlds import EVERY_MODE, SCENARIO, SMALL, even_world
from sim.e2e.calibration import (
    LEASE_RECOVERY_S,
    LEASE_S,
    RELOAD_S,
    SPOT_OVERHEAD,
    WORKLOAD_8B,
    WORKLOAD_32B,
    PaperWorkload,
)
from sim.e2e.fleet import ServedLatencies, autoscaled, balanced, play
from sim.e2e.job import JobPlan, asynchronous_step_s, run_job
from sim.e2e.phase import Demand, RolloutPhase, SimulatedPhase
from sim.e2e.pipeline import Pipeline, iterate, iteration_s
from sim.e2e.supply import Away, From, Rented, SharedGpu, Supply, serverless, spot
from sim.e2e.systems import ELASTIC, System
from sim.rollout.scenario import trajectories
from sim.twin.serving import ServedRequest, ServingArrival

from rose.scheduler.rollout.turn.dataplane import POLICIES
from rose.types import SLO, GateMode


def play_phase(supplies: Sequence[Supply], seed: int = 3, demand: Demand | None = None) -> SimulatedPhase:
    return RolloutPhase(SCENARIO, POLICIES["paper"](), seed, supplies, demand=demand).play()


def all_tokens(seed: int = 3) -> int:
    return sum(step.generated_tokens for steps in trajectories(SCENARIO, seed) for step in steps)


def coming_and_going(*, keeps_tokens: bool) -> list[Supply]:
    """Two engines that stay, and three that are taken away every 20 seconds, one after the other."""
    return [Supply(), Supply()] + [
        Rented(
            starts_s=(7.0 * index,),
            ends_s=(7.0 * index + 20.0,),
            period_s=40.0,
            cold_s=2.0,
            keeps_tokens=keeps_tokens,
        )
        for index in range(3)
    ]


@pytest.mark.parametrize("keeps_tokens", [True, False])
def test_every_token_is_made_once_however_often_engines_go(keeps_tokens: bool) -> None:
    result = play_phase(coming_and_going(keeps_tokens=keeps_tokens))
    assert result.generated_tokens == all_tokens()
    assert len(result.ended_s) == SCENARIO.num_trajectories
    assert (result.lost_tokens == 0) is keeps_tokens


def test_losing_tokens_costs_time_and_keeping_them_does_not() -> None:
    kept, lost = (play_phase(coming_and_going(keeps_tokens=keeps)).seconds for keeps in (True, False))
    assert kept < lost


def test_all_places_are_given_back_when_engines_go() -> None:
    phase = RolloutPhase(SCENARIO, POLICIES["paper"](), 3, coming_and_going(keeps_tokens=True))
    phase.play()
    assert all(w.in_flight == 0 and abs(w.pending_prefill_tokens) < 1e-6 for w in phase.members().values())


def test_redundant_sampling_ends_with_the_last_group_that_counts() -> None:
    part, whole = (play_phase([Supply()] * 2, demand=Demand(num_groups=num)) for num in (2, None))
    assert len(part.ended_s) >= 2 * SCENARIO.group_size
    assert part.seconds == part.ended_s[-1] <= whole.seconds
    assert 0 < sum(part.needed_tokens) < sum(whole.needed_tokens)


def test_a_bounded_number_of_trajectories_is_under_way() -> None:
    result = play_phase([Supply()] * 2, demand=Demand(num_live=8))
    begun = sorted(end - lasted for end, lasted in zip(result.ended_s, result.lasted_s, strict=True))
    for number, began_s in enumerate(begun):
        assert number - sum(end <= began_s + 1e-6 for end in result.ended_s) < 8


# Supplies ----------------------------------------------------------------------------------------------


def test_a_rented_engine_starts_answers_and_goes() -> None:
    engine = Rented(starts_s=(10.0, 50.0), ends_s=(40.0, 60.0), period_s=100.0, cold_s=5.0)
    found = [engine.at(time_s) for time_s in (5.0, 12.0, 15.0, 39.0, 40.0, 52.0, 55.0, 60.0, 112.0)]
    assert found == [
        Away.GONE,
        Away.STARTING,
        1.0,
        1.0,
        Away.GONE,
        Away.STARTING,
        1.0,
        Away.GONE,
        Away.STARTING,
    ]


def test_an_engine_waits_for_its_weights() -> None:
    late = From(inner=SharedGpu(shares=(0.5,), steps=(3,)), ready_s=8.0)
    assert [late.at(7.0), late.at(8.0), late.steps_at(8.0)] == [Away.SYNCING, 0.5, 3]


def test_functions_start_anew_once_a_lease_and_not_together() -> None:
    engines = serverless(6)
    cold = [
        [engine.at(float(second)) is Away.STARTING for second in range(int(LEASE_S))] for engine in engines
    ]
    assert [sum(each) for each in cold] == [math.ceil(LEASE_RECOVERY_S)] * 6
    at_once = math.ceil(LEASE_RECOVERY_S / LEASE_S * 6)
    assert max(map(sum, zip(*cold, strict=True))) == at_once


@pytest.mark.parametrize("workload", [WORKLOAD_8B, WORKLOAD_32B], ids=lambda workload: workload.name)
def test_spot_instances_lose_the_share_of_time_that_the_paper_reports(workload: object) -> None:
    gpus = WORKLOAD_8B.scenario.gpus_per_engine if workload is WORKLOAD_8B else 4
    num, own_gpus = (16, 8) if workload is WORKLOAD_8B else (8, 16)
    held = starting = 0
    for seed in range(6):
        for engine in spot(num, gpus_per_engine=gpus, own_gpus=own_gpus, seed=seed):
            states = [engine.at(10.0 * index) for index in range(720)]
            held += sum(state is not Away.GONE for state in states)
            starting += sum(state is Away.STARTING for state in states)
    share = starting * gpus / (held * gpus + 6 * 720 * own_gpus)
    assert share == pytest.approx(SPOT_OVERHEAD, rel=0.4)


# Serving -----------------------------------------------------------------------------------------------


def traffic(num: int = 400, seed: int = 1) -> list[ServingArrival]:
    rng = random.Random(seed)
    at_s, arrivals = 0.0, []
    for _ in range(num):
        at_s += rng.expovariate(2.0)
        arrivals.append(
            ServingArrival(at_s=at_s, prompt_tokens=rng.randint(10, 2000), output_tokens=rng.randint(2, 60))
        )
    return arrivals


def test_a_request_without_an_answer_misses_every_slo() -> None:
    arrival = ServingArrival(at_s=0.0, prompt_tokens=10, output_tokens=5)
    lost = ServedRequest(arrival=arrival, first_token_s=None, last_token_s=None, max_itl_s=0.0)
    cut = ServedRequest(arrival=arrival, first_token_s=0.1, last_token_s=None, max_itl_s=0.0)
    good = ServedRequest(arrival=arrival, first_token_s=0.1, last_token_s=0.2, max_itl_s=0.1)
    seen = ServedLatencies.of([lost, cut, good, good])
    assert seen.attainment(SLO(ttft_s=1.0, tpot_s=1.0)) == 0.5
    assert seen.ttfts_s[0] == math.inf and seen.tpots_s[:2] == (math.inf, math.inf)


def test_every_request_of_the_fleet_goes_to_one_engine() -> None:
    arrivals = traffic()
    shared = [one for engine in range(4) for one in balanced(arrivals, 4, engine)]
    assert Counter(map(id, shared)) == Counter(map(id, arrivals))
    _, requests = autoscaled(SMALL, arrivals, 4, 250)
    assert Counter(id(one) for each in requests for one in each) == Counter(map(id, arrivals))


def test_autoscaling_never_gives_an_engine_to_both() -> None:
    arrivals = traffic()
    lent, requests = autoscaled(SMALL, arrivals, 4, 250)
    for number, engine_requests in enumerate(requests):
        for arrival in engine_requests:
            # `number + 1` engines at least have served for as long as a reload takes.
            for at_s in (arrival.at_s, max(0.0, arrival.at_s - RELOAD_S)):
                num_lent = sum(engine.at(float(int(min(at_s, 249.0)))) is not Away.GONE for engine in lent)
                assert num_lent + number + 1 <= 4


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_a_tape_keeps_every_request_and_no_more_than_the_gpus_time(mode: GateMode) -> None:
    arrivals = [replace(arrival, at_s=arrival.at_s / 10) for arrival in traffic(num=60)]
    found = play(SMALL, mode, arrivals, 6, 0)
    assert len(found.latencies.ttfts_s) == len(found.latencies.tpots_s) == len(arrivals)
    assert all(0.0 <= share <= 1.0 for share in found.shares)
    assert sum(found.shares) / 6 + found.serving_share <= 1.0 + 1e-6
    assert sum(found.steps) > 0


# Jobs --------------------------------------------------------------------------------------------------


def test_one_step_off_overlaps_training_and_uses_weights_one_step_older() -> None:
    asked: list[tuple[int, float, float]] = []

    def rollout_s(step: int, start_s: float, weights_s: float) -> float:
        asked.append((step, start_s, weights_s))
        return 10.0

    times = iterate(4, Pipeline.ONE_STEP_OFF, rollout_s, lambda step: 4.0)
    assert asked == [(0, 0.0, 0.0), (1, 10.0, 0.0), (2, 20.0, 14.0), (3, 30.0, 24.0)]
    assert iteration_s(times) == 10.0
    for before, after in itertools.pairwise(times):
        assert before.rollout_end_s <= after.rollout_start_s and before.train_end_s <= after.train_start_s
    synchronous = iterate(4, Pipeline.SYNCHRONOUS, lambda *_: 10.0, lambda step: 4.0)
    assert iteration_s(synchronous) == 14.0


def test_training_pays_for_attention_and_for_padding() -> None:
    even, one_long = (WORKLOAD_8B.train_s(lengths) for lengths in ((8_000,) * 4, (1_000,) * 3 + (29_000,)))
    assert even < one_long < WORKLOAD_8B.train_s((32_768,) * 4)
    plan = JobPlan(system=System.FIXED, num_steps=2, seed=1)
    real, padded = (run_job(even_world(), each) for each in (plan, replace(plan, is_padded=True)))
    assert real.phases == padded.phases and real.times[0].train_end_s < padded.times[0].train_end_s


@pytest.mark.parametrize("workload", [WORKLOAD_8B, WORKLOAD_32B], ids=lambda workload: workload.name)
def test_trajectories_have_the_tail_that_the_paper_describes(workload: PaperWorkload) -> None:
    """ROSE §2.2: the 75th percentile is at most 30% of the phase. §4.1: 55 to 145 s, tails over 400 s."""
    scenario = workload.profiled().scenario
    engines = [Supply()] * scenario.num_dedicated
    phases = [RolloutPhase(scenario, POLICIES["paper"](), seed, engines).play() for seed in range(1, 7)]
    p75_s = statistics.fmean(statistics.quantiles(phase.lasted_s, n=4)[2] for phase in phases)
    phase_s = statistics.fmean(phase.seconds for phase in phases)
    assert 55.0 <= p75_s <= 145.0 and p75_s <= 0.30 * phase_s and phase_s > 400.0


def test_half_a_workload_sends_its_weights_as_fast_as_the_whole() -> None:
    whole, half = (replace(even_world(), workload=each) for each in (WORKLOAD_8B, WORKLOAD_8B.halved()))
    assert half.transfer_s() == whole.transfer_s() > whole.transfer_s(num_senders=16)


@pytest.mark.parametrize("train_s", [3.0, 25.0])
def test_no_pipeline_beats_its_slower_phase(train_s: float) -> None:
    times = iterate(6, Pipeline.ONE_STEP_OFF, lambda *_: 10.0, lambda step: train_s)
    assert iteration_s(times) == pytest.approx(max(10.0, train_s))


def test_the_same_seed_gives_the_same_job_and_another_one_another() -> None:
    plan = JobPlan(system=System.SPOT, num_steps=2, seed=5, is_dapo=True, sampling=1.5)
    first, again, other = (run_job(even_world(), each) for each in (plan, plan, replace(plan, seed=6)))
    assert first == again != other


@pytest.mark.slow
def test_every_system_trains_on_the_same_trajectories() -> None:
    plan = JobPlan(system=System.FIXED, num_steps=2, seed=1, is_dapo=True, sampling=1.5)
    jobs = [run_job(even_world(), replace(plan, system=system)) for system in System]
    assert len({tuple(phase.needed_tokens for phase in job.phases) for job in jobs}) == 1


def test_a_baseline_with_whole_gpus_is_no_slower_than_shared_ones() -> None:
    """The baseline has as many GPUs, each whole and always there: no sharing may do better."""
    plan = JobPlan(system=System.ROSE, num_steps=2, seed=1)
    shared, owned, whole = (
        run_job(even_world(), each).rollout_s
        for each in (plan, replace(plan, system=System.FIXED, num_own=5), replace(plan, system=System.RELOAD))
    )
    assert max(owned, whole) < shared
    for system in ELASTIC:
        assert run_job(even_world(), replace(plan, system=system)).rollout_s >= owned


def test_lent_gpus_never_lengthen_a_rollout_phase() -> None:
    plan = JobPlan(system=System.ROSE, num_steps=2, seed=1)
    alone = run_job(even_world(), replace(plan, system=System.FIXED)).rollout_s
    lent = [run_job(even_world(), replace(plan, num_lent=num)).rollout_s for num in (0, 2, 4)]
    assert lent[0] == alone > lent[1] > lent[2]


def test_lost_prefixes_cost_the_shared_limit_time() -> None:
    plan = JobPlan(system=System.STATIC, num_steps=2, seed=1)
    split, limit = (
        run_job(even_world(), replace(plan, system=s)) for s in (System.STATIC, System.SHARED_LIMIT)
    )
    assert limit.phases[0].hit_share < split.phases[0].hit_share
    assert limit.rollout_s > split.rollout_s


def test_asynchronous_generation_saves_the_tails_of_phases() -> None:
    """With places for most of a batch; where turns queue, phases have next to no tail to save."""
    plan = JobPlan(system=System.FIXED, num_steps=3, seed=1, num_own=5)
    assert asynchronous_step_s(even_world(), plan) <= run_job(even_world(), plan).iteration_s


def test_a_delta_goes_over_the_link_in_less_time_than_all_weights() -> None:
    small = even_world()
    dense_s = SMALL.weight_bytes / (0.1e9 / 8)
    assert small.transfer_s(200.0) < small.transfer_s(0.1) < dense_s / 20
