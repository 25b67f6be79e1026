"""The step-time model: predictions, inversions, and fits on made-up engines."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.admission.step_time import (
    MIN_OBSERVATIONS,
    UNPROFILED,
    StepObservation,
    StepTimeModel,
    attended_pairs,
    fit,
    fit_errors,
)

# The figures measured on a CPU engine: 11.5 ms + 0.69 ms per prefill token + 0.56 ms per decode.
CPU = StepTimeModel(
    base_s=0.0115, per_prefill_token_s=0.00069, per_decode_s=0.00056, ratio_q99=1.16, margin_s=0.001
)


def observe(truth: StepTimeModel, num: int, noise: float, seed: int = 0) -> list[StepObservation]:
    rng = random.Random(seed)
    steps = []
    for _ in range(num):
        prefill, decodes = rng.choice([0, 64, 128, 512]), rng.choice([0, 1, 4, 16])
        prefill = prefill if decodes else max(prefill, 64)
        context = decodes * rng.choice([100, 1000])
        seconds = truth.predict(prefill, decodes, context) * (1 + rng.uniform(-noise, noise))
        steps.append(
            StepObservation(
                prefill_tokens=prefill, num_decodes=decodes, context_tokens=context, seconds=seconds
            )
        )
    return steps


def test_prediction_is_linear() -> None:
    assert CPU.predict(100, 10) == pytest.approx(0.0115 + 0.069 + 0.0056)
    assert CPU.predict_safe(100, 10) == pytest.approx(0.0861 * 1.16 + 0.001)


def test_pairs_are_what_every_token_attends() -> None:
    assert attended_pairs(3) == 1 + 2 + 3
    assert attended_pairs(3, 10) == 11 + 12 + 13
    assert attended_pairs(8) == attended_pairs(5) + attended_pairs(3, 5)


def test_prefill_pays_for_the_context_that_it_attends() -> None:
    long = replace(CPU, per_prefill_pair_s=1e-7)
    assert long.predict(512, 0, 0, attended_pairs(512, 30_000)) > 2 * long.predict(
        512, 0, 0, attended_pairs(512)
    )
    budget_s = long.predict_safe(512, 0, 0, attended_pairs(512))
    assert long.tokens_within(budget_s, 0, 512) == 512
    assert long.tokens_within(budget_s, 0, 512, computed_tokens=30_000) < 128


def test_chunked_prefill_pays_a_base_per_chunk() -> None:
    assert CPU.predict_prefill(1000, 512) == pytest.approx(2 * 0.0115 + 0.69)


@given(
    budget_s=st.floats(0, 2),
    num_decodes=st.integers(0, 64),
    max_chunk=st.integers(0, 1024),
    context=st.integers(0, 10_000),
    computed=st.integers(0, 100_000),
    pair_s=st.sampled_from([0.0, 1e-9, 1e-6]),
)
def test_tokens_within_is_the_largest_that_fits(
    budget_s: float, num_decodes: int, max_chunk: int, context: int, computed: int, pair_s: float
) -> None:
    model = StepTimeModel(
        base_s=0.01,
        per_prefill_token_s=5e-4,
        per_decode_s=4e-4,
        per_context_token_s=1e-6,
        per_prefill_pair_s=pair_s,
        ratio_q99=1.2,
    )

    def safe_s(tokens: int) -> float:
        return model.predict_safe(tokens, num_decodes, context, attended_pairs(tokens, computed))

    tokens = model.tokens_within(budget_s, num_decodes, max_chunk, context, computed)
    assert 0 <= tokens <= max_chunk
    if tokens:
        assert safe_s(tokens) <= budget_s + 1e-9
    if tokens < max_chunk:
        assert safe_s(tokens + 1) > budget_s - 1e-9


@given(budget_s=st.floats(0, 1), most=st.integers(0, 256), context=st.integers(0, 5000))
def test_decodes_within_is_the_largest_that_fits(budget_s: float, most: int, context: int) -> None:
    model = StepTimeModel(
        base_s=0.01, per_prefill_token_s=5e-4, per_decode_s=4e-4, per_context_token_s=1e-6, ratio_q99=1.2
    )
    num = model.decodes_within(budget_s, most, context)
    assert 0 <= num <= most
    if num:
        assert model.predict_safe(0, num, num * context) <= budget_s + 1e-9
    if num < most:
        assert model.predict_safe(0, num + 1, (num + 1) * context) > budget_s - 1e-9


def test_fit_recovers_the_costs_behind_noise() -> None:
    truth = StepTimeModel(
        base_s=0.0115, per_prefill_token_s=0.00069, per_decode_s=0.00056, per_context_token_s=2e-6
    )
    model = fit(observe(truth, 400, noise=0.1))
    assert model.base_s == pytest.approx(truth.base_s, rel=0.1)
    assert model.per_prefill_token_s == pytest.approx(truth.per_prefill_token_s, rel=0.1)
    assert model.per_decode_s == pytest.approx(truth.per_decode_s, rel=0.2)
    assert model.per_context_token_s == pytest.approx(truth.per_context_token_s, rel=0.2)
    assert 1.05 < model.ratio_q99 < 1.2


def test_fit_is_not_bent_by_stalls_of_the_machine() -> None:
    steps = observe(CPU, 300, noise=0.02)
    for i in range(0, 300, 30):
        steps[i] = StepObservation(
            prefill_tokens=steps[i].prefill_tokens,
            num_decodes=steps[i].num_decodes,
            context_tokens=steps[i].context_tokens,
            seconds=steps[i].seconds * 8,
        )
    model = fit(steps)
    assert model.per_prefill_token_s == pytest.approx(CPU.per_prefill_token_s, rel=0.1)
    assert model.base_s == pytest.approx(CPU.base_s, rel=0.1)
    assert model.ratio_q99 > 4  # one step in thirty is eight times slower: the bound must say so


def test_fit_drops_the_warm_up() -> None:
    slow = [
        StepObservation(prefill_tokens=64, num_decodes=0, context_tokens=0, seconds=3.0),
        StepObservation(prefill_tokens=64, num_decodes=1, context_tokens=100, seconds=1.0),
    ]
    model = fit(slow + observe(CPU, 100, noise=0.02))
    assert model.ratio_q99 < 1.1


def test_fit_never_goes_negative() -> None:
    # Context makes these steps *faster*: no such cost may come out.
    steps = [
        StepObservation(prefill_tokens=0, num_decodes=d, context_tokens=c, seconds=0.02 - 1e-6 * c)
        for d in range(1, 9)
        for c in range(0, 5000, 500)
    ]
    model = fit(steps)
    assert model.per_context_token_s == 0.0
    assert model.base_s > 0


def test_too_few_observations_are_refused() -> None:
    with pytest.raises(ValueError, match=f"need {MIN_OBSERVATIONS} observations to fit, got 3"):
        fit(observe(CPU, 3, noise=0))


def test_fit_errors_of_a_perfect_model_are_nil() -> None:
    errors = fit_errors(CPU, observe(CPU, 50, noise=0))
    assert errors.error_p99_s == pytest.approx(0, abs=1e-12)
    assert errors.ratio_q99 == pytest.approx(1)


def test_a_step_time_model_comes_back_from_its_json() -> None:
    assert StepTimeModel.from_json(CPU.to_json()) == CPU


@pytest.mark.parametrize("change", [{"base_s": "fast"}, {"base_s": -1.0}, {"ratio_q99": 0.5}, {"extra": 1.0}])
def test_senseless_json_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        StepTimeModel.from_json({**CPU.to_json(), **change})


def test_the_stand_in_for_a_missing_profile_fits_no_usual_slack() -> None:
    assert UNPROFILED.tokens_within(0.5, 0, 512) == 0
    assert UNPROFILED.decodes_within(0.5, 64) == 0
