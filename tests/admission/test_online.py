"""The running model: caution with a stale or a missing profile."""

import random

import pytest

from rose.admission.gate import MIN_STEP_TOKENS, GatePolicy, GateSettings, RolloutCandidate, ServingView
from rose.admission.online import REFIT_STEPS, REFRESH_STEPS, UNPLANNED_RATIO, OnlineStepTime
from rose.admission.slack import NEVER
from rose.admission.step_time import MIN_OBSERVATIONS, UNPROFILED, StepObservation, StepShape, StepTimeModel
from rose.types import SLO

CPU = StepTimeModel(
    base_s=0.0115, per_prefill_token_s=0.00069, per_decode_s=0.00056, ratio_q99=1.16, margin_s=0.001
)


def shape(prefill_tokens: int, num_decodes: int) -> StepShape:
    return StepShape(prefill_tokens=prefill_tokens, num_decodes=num_decodes, context_tokens=0)


def steps(num: int, slowdown: float, truth: StepTimeModel = CPU) -> list[StepObservation]:
    rng = random.Random(0)
    shapes = [shape(rng.choice([0, 128, 512]), rng.randrange(1, 16)) for _ in range(num)]
    return [one.observed(truth.predict_step(one) * slowdown * rng.uniform(0.98, 1.02)) for one in shapes]


def run(online: OnlineStepTime, num: int, slowdown: float) -> None:
    for step in steps(num, slowdown):
        online.observe(step)


def test_a_true_profile_keeps_its_costs_and_tightens_its_bound() -> None:
    online = OnlineStepTime(CPU)
    run(online, 200, slowdown=1.0)
    assert online.model.per_prefill_token_s == CPU.per_prefill_token_s
    assert 1.0 <= online.model.ratio_q99 < 1.05


def test_a_few_good_steps_do_not_tighten_the_bound() -> None:
    online = OnlineStepTime(CPU)
    run(online, MIN_OBSERVATIONS - 1, slowdown=0.5)
    assert online.model.ratio_q99 == CPU.ratio_q99


def test_a_stale_profile_is_widened_by_the_first_slow_step() -> None:
    online = OnlineStepTime(CPU)
    online.observe(shape(128, 4).observed(2 * CPU.predict(128, 4)))
    assert online.model.ratio_q99 == pytest.approx(2.0)


def test_a_stale_profile_covers_what_it_sees() -> None:
    online = OnlineStepTime(CPU)
    run(online, 300, slowdown=3.0)
    assert online.model.predict_safe(512, 8) >= 3.0 * CPU.predict(512, 8)


def test_costs_follow_what_is_seen_and_what_is_not_seen_is_as_much_slower_as_the_median_step() -> None:
    online = OnlineStepTime(CPU, steps(100, slowdown=1.0))
    # Decodes have become four times as slow, as with another attention kernel; prefill is no longer seen.
    for _ in range(2 * REFIT_STEPS):
        for decodes in (1, 4, 16):
            online.observe(shape(0, decodes).observed(CPU.base_s + 4 * CPU.per_decode_s * decodes))
    assert online.model.predict(0, 12) == pytest.approx(CPU.base_s + 48 * CPU.per_decode_s, rel=0.1)
    median_slowdown = (CPU.base_s + 16 * CPU.per_decode_s) / CPU.predict(0, 4)
    assert online.model.predict(512, 0) == pytest.approx(median_slowdown * CPU.predict(512, 0), rel=0.1)


def test_a_machine_of_half_the_speed_doubles_the_costs_and_keeps_the_bound_tight() -> None:
    online = OnlineStepTime(CPU, steps(100, slowdown=1.0))
    run(online, 3 * REFIT_STEPS, slowdown=2.0)
    assert online.model.predict(512, 8) == pytest.approx(2 * CPU.predict(512, 8), rel=0.05)
    assert online.model.ratio_q99 < 1.1


def test_a_slower_machine_makes_costs_slower_that_it_has_not_shown() -> None:
    online = OnlineStepTime(CPU, steps(100, slowdown=1.0))
    for number in range(3 * REFIT_STEPS):
        decode = shape(0, 1 + number % 16)
        online.observe(decode.observed(1.5 * CPU.predict_step(decode)))
    assert online.observed.predict(512, 8) == pytest.approx(1.5 * CPU.predict(512, 8), rel=0.1)


def test_the_bound_recovers_once_slow_steps_leave_the_window() -> None:
    online = OnlineStepTime(CPU, window_steps=64)
    run(online, 64, slowdown=3.0)
    run(online, 80, slowdown=1.0)
    assert online.model.ratio_q99 < 1.1


def test_without_a_profile_the_first_steps_are_taken_as_hopeless() -> None:
    online = OnlineStepTime(None)
    run(online, MIN_OBSERVATIONS - 1, slowdown=1.0)
    assert not online.is_profiled
    assert online.model == UNPROFILED


def test_without_a_profile_own_steps_give_a_cautious_one() -> None:
    online = OnlineStepTime(None)
    run(online, 100, slowdown=1.0)
    assert online.is_profiled
    assert online.model.ratio_q99 >= UNPLANNED_RATIO
    assert CPU.predict(512, 8) <= online.model.predict_safe(512, 8) <= 3 * CPU.predict(512, 8)


def test_without_a_profile_the_costs_follow_the_steps() -> None:
    online = OnlineStepTime(None)
    run(online, 64, slowdown=3.0)
    run(online, 6 * REFIT_STEPS, slowdown=1.0)
    assert online.observed.predict(512, 8) == pytest.approx(CPU.predict(512, 8), rel=0.1)


def test_steps_of_one_shape_teach_nothing_about_others() -> None:
    online = OnlineStepTime(None)
    for _ in range(200):
        online.observe(shape(0, 4).observed(0.01))
    assert online.model == UNPROFILED


def full_steps(num: int) -> list[StepShape]:
    rng = random.Random(0)
    return [shape(512 - decodes, decodes) for decodes in (rng.randrange(16) for _ in range(num))]


def test_steps_that_are_all_full_do_not_tell_a_steps_base() -> None:
    online = OnlineStepTime(None)
    for step in full_steps(200):
        online.observe(step.observed(CPU.predict_step(step)))
    assert online.model == UNPROFILED


@pytest.mark.parametrize("seed", range(8))
def test_a_small_step_after_full_ones_is_not_taken_as_free(seed: int) -> None:
    online, rng = OnlineStepTime(None), random.Random(seed)
    for step in [shape(500, 4), *full_steps(63), *[shape(0, 1)] * 40]:
        online.observe(step.observed(CPU.predict_step(step) * rng.uniform(0.9, 1.3)))
    assert online.is_profiled
    assert online.model.predict_safe(0, 1) >= CPU.predict(0, 1)


def test_without_a_profile_the_steps_that_the_gate_allows_teach_what_steps_take() -> None:
    """A rollout engine computes ten prompts of 350 tokens beside an idle serving engine, each with an answer
    that does not end meanwhile."""
    gate, online = GatePolicy(GateSettings(slo=SLO(ttft_s=0.5, tpot_s=0.15))), OnlineStepTime(None)
    idle = ServingView(has_work=False, has_pending_prefill=False, latest_start_s=NEVER, max_step_s=0.125)
    prefilled, num_steps = 0, 0
    while not online.is_profiled and num_steps < 200:
        decodes = prefilled // 350
        candidate = RolloutCandidate(
            prefill_tokens_waiting=3500 - prefilled, num_decodes=decodes, context_tokens=350 * decodes
        )
        decision = gate.decide(0.0, idle, candidate, online.model)
        assert 0 < decision.max_tokens <= MIN_STEP_TOKENS
        step = shape(decision.max_tokens - decision.max_seqs, decision.max_seqs)
        online.observe(step.observed(CPU.predict_step(step)))
        prefilled, num_steps = prefilled + step.prefill_tokens, num_steps + 1
    assert online.is_profiled


def test_an_empty_step_is_no_observation() -> None:
    with pytest.raises(ValueError, match="a step needs tokens and time"):
        OnlineStepTime(CPU).observe(shape(0, 0).observed(0.01))


def test_what_was_observed_is_told_without_the_caution_for_unplanned_steps() -> None:
    online = OnlineStepTime(None)
    run(online, 200, slowdown=1.0)
    assert online.model.ratio_q99 == UNPLANNED_RATIO
    assert online.observed.ratio_q99 < 1.1
    assert online.observed.base_s == online.model.base_s


def test_a_cold_first_step_does_not_outlive_the_steps_that_show_it_was_cold() -> None:
    """Without a profile, and with a size that comes only once, whose step compiles for two seconds."""
    online = OnlineStepTime(None)
    online.observe(shape(32, 0).observed(2.0))
    run(online, 3 * MIN_OBSERVATIONS, slowdown=1.0)
    assert online.is_profiled
    assert online.model.ratio_q99 == UNPLANNED_RATIO
    assert online.observed.ratio_q99 < 1.2


def test_a_cold_step_of_a_running_engine_counts_until_the_next_one_of_its_size() -> None:
    online = OnlineStepTime(CPU)
    run(online, 100, slowdown=1.0)
    online.observe(shape(0, 100).observed(35 * CPU.predict(0, 100)))
    assert online.model.ratio_q99 == pytest.approx(35.0), "nothing has shown yet that it was cold"
    for _ in range(REFRESH_STEPS):
        online.observe(shape(0, 100).observed(CPU.predict(0, 100)))
    assert online.model.ratio_q99 < 1.05


def test_a_size_that_is_slow_twice_is_slow() -> None:
    online = OnlineStepTime(CPU)
    run(online, 50, slowdown=1.0)
    for _ in range(2):
        online.observe(shape(0, 100).observed(3 * CPU.predict(0, 100)))
    run(online, 2 * REFRESH_STEPS, slowdown=1.0)
    assert online.model.ratio_q99 == pytest.approx(3.0)


@pytest.mark.parametrize(
    "planned", [(), steps(100, slowdown=1.0)], ids=["costs stay", "costs are fitted again"]
)
def test_an_engine_that_slow_steps_keep_from_a_busy_gpu_steps_again_once_they_are_forgotten(
    planned: list[StepObservation],
) -> None:
    gate, online = GatePolicy(GateSettings(slo=SLO(ttft_s=0.5, tpot_s=0.15))), OnlineStepTime(CPU, planned)
    busy = ServingView(has_work=True, has_pending_prefill=False, latest_start_s=0.1)
    candidate = RolloutCandidate(prefill_tokens_waiting=0, num_decodes=4, context_tokens=400, waited_s=2.0)

    def is_admitted() -> bool:
        return gate.decide(0.0, busy, candidate, online.model).is_admitted

    assert is_admitted()
    run(online, REFIT_STEPS + REFRESH_STEPS, slowdown=20.0)
    assert not is_admitted()
    online.forget()
    assert online.model == online.observed == CPU
    assert is_admitted()
    # The machine still is that slow: the first step shows it.
    run(online, 1, slowdown=20.0)
    assert not is_admitted()


def test_steps_that_have_made_no_model_yet_are_not_forgotten() -> None:
    online = OnlineStepTime(None)
    run(online, MIN_OBSERVATIONS - 1, slowdown=1.0)
    online.forget()
    assert online.model == UNPROFILED
    run(online, 2 * REFRESH_STEPS, slowdown=1.0)
    assert online.is_profiled


def test_without_a_profile_an_engine_goes_back_to_its_first_model_with_all_its_caution() -> None:
    online = OnlineStepTime(None)
    run(online, 2 * MIN_OBSERVATIONS, slowdown=1.0)
    run(online, REFRESH_STEPS, slowdown=20.0)
    assert online.model.ratio_q99 > 10
    online.forget()
    assert online.model.ratio_q99 == UNPLANNED_RATIO
    assert online.observed.ratio_q99 < 1.1
