"""The twin's invariants: one workload at a time, no work lost or invented, the same run for the same seed."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.twin.gpu import TwinGpu, TwinOutcome
from sim.twin.pairs import PAIR_8B, PAIR_32B, Pair
from sim.twin.serving import ServingArrival, for_decoder, for_prefiller

from rose.admission.gate import GateReason, GateSettings
from rose.admission.step_time import StepTimeModel
from rose.types import SLO, Deployment, GateMode

HORIZON_S = 6.0
GATED = [mode for mode in GateMode if mode is not GateMode.OFF]


def traffic(seed: int = 0, rate_rps: float = 2.0, own_slo: SLO | None = None) -> list[ServingArrival]:
    rng = random.Random(seed)
    at_s, arrivals = 0.0, []
    while (at_s := at_s + rng.expovariate(rate_rps)) < HORIZON_S:
        prompt, output = rng.randint(1, 3000), rng.randint(1, 30)
        arrivals.append(
            ServingArrival(at_s=at_s, prompt_tokens=prompt, output_tokens=output, own_slo=own_slo)
        )
    return arrivals


def twin(
    mode: GateMode = GateMode.DUAL,
    *,
    pair: Pair = PAIR_8B,
    arrivals: list[ServingArrival] | None = None,
    seed: int = 0,
    deployment: Deployment = Deployment.COLLOCATED,
    **more: Any,
) -> TwinGpu:
    gate = GateSettings(slo=pair.slo, mode=mode, deployment=deployment)
    given_arrivals = traffic() if arrivals is None else arrivals
    return TwinGpu(pair, gate, given_arrivals, horizon_s=HORIZON_S, seed=seed, **more)


def answered(outcome: TwinOutcome) -> list[bool]:
    return [request.is_complete for request in outcome.requests]


@pytest.mark.parametrize("mode", GATED)
@pytest.mark.parametrize("pair", [PAIR_8B, PAIR_32B], ids=lambda pair: pair.name)
def test_one_workload_computes_at_a_time(mode: GateMode, pair: Pair) -> None:
    gpu = twin(mode, pair=pair)
    gpu.run()
    assert {name for name, _, _ in gpu.log} == {"serving", "rollout"}
    for (_, _, end_s), (_, start_s, _) in zip(gpu.log, gpu.log[1:], strict=False):
        assert end_s <= start_s


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(list(GateMode)), st.integers(0, 1000))
def test_every_request_is_answered_once_and_in_order(mode: GateMode, seed: int) -> None:
    arrivals = traffic(seed)
    outcome = twin(mode, arrivals=arrivals, seed=seed).run()
    assert [request.arrival for request in outcome.requests] == arrivals
    assert all(answered(outcome))
    for request in outcome.requests:
        assert request.first_token_s is not None and request.last_token_s is not None
        assert request.arrival.at_s < request.first_token_s <= request.last_token_s


def test_no_time_is_lost_while_there_is_work() -> None:
    """Between two steps passes no more than a switch: rollouts always have something to run."""
    gpu = twin(GateMode.DUAL)
    outcome = gpu.run()
    switches = sum(a[0] != b[0] for a, b in zip(gpu.log, gpu.log[1:], strict=False))
    gaps_s = sum(b[1] - a[2] for a, b in zip(gpu.log, gpu.log[1:], strict=False))
    assert gaps_s == pytest.approx(switches * 0.0003, rel=0.01)
    assert outcome.serving_busy_s + outcome.rollout_busy_s <= HORIZON_S


def test_the_same_seed_gives_the_same_run() -> None:
    first, again, other = (twin(seed=seed) for seed in (3, 3, 4))
    assert first.run() == again.run()
    assert first.log == again.log
    other.run()
    assert first.log != other.log


def test_serving_alone_leaves_the_gpu_idle_without_requests() -> None:
    outcome = twin(has_rollouts=False, arrivals=[]).run()
    assert (outcome.num_serving_steps, outcome.generated_tokens, outcome.serving_share) == (0, 0, 0.0)


def test_rollouts_alone_step_all_the_time() -> None:
    outcome = twin(GateMode.OFF, arrivals=[]).run()
    assert outcome.num_serving_steps == 0 and outcome.generated_tokens > 0


def test_idle_mode_never_steps_while_serving_has_work() -> None:
    outcome = twin(GateMode.IDLE).run()
    assert set(outcome.refusals) <= {GateReason.SERVING_HAS_WORK}
    assert outcome.num_late_starts == 0


def test_default_mode_takes_the_idle_time_around_bursts_with_steps_longer_than_servings() -> None:
    """Step times of two engines on one CPU (benchmarks/results/sharing_cpu2_202611.md)."""
    serving, rollout = (
        replace(
            model,
            costs=StepTimeModel(base_s=base_s, per_prefill_token_s=token_s, per_decode_s=decode_s),
            num_layers=num_layers,
        )
        for model, base_s, token_s, decode_s, num_layers in (
            (PAIR_8B.serving, 0.008, 0.00032, 0.0004, None),
            (replace(PAIR_8B.rollout, max_batched_tokens=512, max_seqs=8), 0.013, 0.0009, 0.00125, 12),
        )
    )
    pair = replace(PAIR_8B, serving=serving, rollout=rollout)
    arrivals = [
        ServingArrival(at_s=burst_s, prompt_tokens=60 + 10 * place, output_tokens=4 + 2 * place)
        for burst_s in (0.5, 2.0, 3.5, 5.0)
        for place in range(12)
    ]
    alone, shared = (
        twin(GateMode.IDLE, pair=pair, arrivals=arrivals, has_rollouts=has).run() for has in (False, True)
    )
    assert shared.rollout_busy_s >= 0.98 * (HORIZON_S - alone.serving_busy_s) > 0.3 * HORIZON_S
    assert set(shared.refusals) <= {GateReason.SERVING_HAS_WORK}


def test_default_mode_meets_the_slo_where_the_printed_equations_do_not() -> None:
    def worst_gap_s(mode: GateMode) -> float:
        return max(request.max_itl_s for request in twin(mode).run().requests)

    assert worst_gap_s(GateMode.DUAL) <= PAIR_8B.slo.tpot_s < worst_gap_s(GateMode.EQUATIONS)


def test_a_burst_keeps_its_tpot_where_slack_is_spent_almost_as_often_as_alone() -> None:
    """Its prompts are computed as without rollouts: in parts, the first answers would wait for the others."""
    model = replace(PAIR_8B.serving, max_batched_tokens=16384)
    slo = SLO(ttft_s=0.5, tpot_s=5 * PAIR_8B.decode_step_s)
    pair = replace(PAIR_8B, serving=model, slo=slo)
    arrivals = [
        ServingArrival(at_s=burst_s + 0.004 * place, prompt_tokens=700, output_tokens=8)
        for burst_s in (1.0, 3.0, 5.0)
        for place in range(12)
    ]
    gate = GateSettings(slo=slo, tpot_target_s=0.9 * slo.tpot_s)

    def num_kept(has_rollouts: bool) -> int:
        gpus = [
            TwinGpu(pair, gate, arrivals, horizon_s=HORIZON_S, seed=seed, has_rollouts=has_rollouts)
            for seed in range(3)
        ]
        return sum(
            r.tpot_s is not None and r.tpot_s <= slo.tpot_s for gpu in gpus for r in gpu.run().requests
        )

    assert num_kept(has_rollouts=True) >= 0.92 * num_kept(has_rollouts=False) > 0


@pytest.mark.parametrize("pair", [PAIR_8B, PAIR_32B], ids=lambda pair: pair.name)
def test_a_disaggregated_deployment_keeps_both_objectives(pair: Pair) -> None:
    """ROSE §4.1: TTFT on the prefiller, TPOT on the decoder behind it; rollouts run both phases on either."""
    whole = traffic()
    first = twin(pair=pair, arrivals=for_prefiller(whole), deployment=Deployment.PREFILL).run()
    assert all(r.ttft_s is not None and r.ttft_s <= pair.slo.ttft_s for r in first.requests)
    rest = twin(pair=pair, arrivals=for_decoder(whole, first.requests), deployment=Deployment.DECODE).run()
    assert len(rest.requests) == sum(arrival.output_tokens > 1 for arrival in whole)
    # From the prefiller's token to the decoder's first is a gap between tokens as well.
    assert all(r.ttft_s is not None and r.ttft_s <= pair.slo.tpot_s for r in rest.requests)
    assert all(r.max_itl_s <= pair.slo.tpot_s for r in rest.requests)
    assert first.generated_tokens > 0 and rest.generated_tokens > 0


@pytest.mark.parametrize(
    ("deployment", "mode"),
    [(Deployment.PREFILL, GateMode.TTFT_ONLY), (Deployment.DECODE, GateMode.TPOT_ONLY)],
)
def test_a_single_objective_mode_serves_the_instance_that_has_it(
    deployment: Deployment, mode: GateMode
) -> None:
    arrivals = for_prefiller(traffic())
    if deployment is Deployment.DECODE:
        arrivals = for_decoder(traffic(), twin(arrivals=arrivals, has_rollouts=False).run().requests)
    single, dual = (
        twin(each, arrivals=arrivals, deployment=deployment).run() for each in (mode, GateMode.DUAL)
    )
    assert all(answered(single)) and all(answered(dual))
    if deployment is Deployment.DECODE:
        assert single == dual  # a decoder's gate has nothing else to go by


def test_an_idle_instance_is_given_away_whole_and_comes_back_within_one_step() -> None:
    """ROSE §4.3, autoscaling: nothing comes for a while, and then traffic returns."""
    away = [ServingArrival(at_s=5.0 + 0.1 * i, prompt_tokens=100, output_tokens=2) for i in range(5)]
    gpu = twin(GateMode.IDLE, arrivals=away)
    outcome = gpu.run()
    idle_steps = [end_s - start_s for name, start_s, end_s in gpu.log if name == "rollout" and end_s < 5.0]
    assert sum(idle_steps) > 0.99 * 5.0
    first_start_s = next(start_s for name, start_s, _ in gpu.log if name == "serving")
    assert first_start_s - 5.0 <= max(idle_steps) + 0.0003
    assert max(idle_steps) <= 0.25 * PAIR_8B.slo.ttft_s
    assert set(outcome.refusals) <= {GateReason.SERVING_HAS_WORK}


def test_overload_ends_and_counts_who_was_not_answered() -> None:
    arrivals = [ServingArrival(at_s=0.01 * i, prompt_tokens=4000, output_tokens=200) for i in range(600)]
    outcome = twin(arrivals=arrivals, max_drain_s=HORIZON_S).run()
    assert len(outcome.requests) == 600
    assert not all(answered(outcome))
