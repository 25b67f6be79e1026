"""Profile plans and files."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from rose.admission.profile import (
    ProfileKey,
    ProfilePlan,
    fit_profile,
    load_measured_profile,
    load_profile,
    plot_profile,
)
from rose.admission.step_time import MIN_OBSERVATIONS, StepObservation, StepTimeModel
from rose.errors import ConfigError

KEY = ProfileKey(model="org/tiny model", hardware="cpu-2", vllm_version="0.32.0", parallelism="tp1")
TRUTH = StepTimeModel(
    base_s=0.0115, per_prefill_token_s=0.00069, per_decode_s=0.00056, per_context_token_s=1e-7
)


def plan() -> ProfilePlan:
    return ProfilePlan.covering(max_prefill_tokens=512, max_decodes=16, max_context_tokens=1024)


def measured() -> list[StepObservation]:
    rng = random.Random(0)
    return [
        StepObservation(
            prefill_tokens=p.prefill_tokens,
            num_decodes=p.num_decodes,
            context_tokens=p.context_tokens,
            seconds=TRUTH.predict(p.prefill_tokens, p.num_decodes, p.context_tokens)
            * rng.uniform(0.97, 1.03),
        )
        for p in plan().points
    ]


def test_a_plan_reaches_its_bounds_and_gives_enough_to_fit() -> None:
    points = plan().points
    assert max(p.prefill_tokens for p in points) == 512
    assert max(p.num_decodes for p in points) == 16
    assert max(p.context_tokens for p in points) == 16 * 1024
    assert any(p.prefill_tokens and p.num_decodes for p in points)
    assert len(points) - plan().num_warm_up >= MIN_OBSERVATIONS


@pytest.mark.parametrize(("prefill", "decodes"), [(1, 1), (3, 1), (2048, 256)])
def test_every_point_of_a_plan_is_a_step(prefill: int, decodes: int) -> None:
    made = ProfilePlan.covering(max_prefill_tokens=prefill, max_decodes=decodes, max_context_tokens=64)
    assert all(p.prefill_tokens + p.num_decodes > 0 for p in made.points)
    assert all(p.prefill_tokens <= prefill and p.num_decodes <= decodes for p in made.points)


def test_a_fitted_profile_is_loaded_again(tmp_path: Path) -> None:
    model = fit_profile(measured(), KEY, tmp_path / "profiles")
    assert load_profile(tmp_path / "profiles", KEY) == model
    assert model.per_prefill_token_s == pytest.approx(TRUTH.per_prefill_token_s, rel=0.1)
    assert [path.suffix for path in (tmp_path / "profiles").iterdir()] == [".json"]


@pytest.mark.parametrize("field", ["model", "hardware", "vllm_version", "parallelism"])
def test_a_profile_counts_for_its_own_key_only(tmp_path: Path, field: str) -> None:
    fit_profile(measured(), KEY, tmp_path)
    other = replace(KEY, **{field: "other"})
    assert load_profile(tmp_path, other) is None


@pytest.mark.parametrize("text", ["not json", "[]", "{}", '{"format": 1}'])
def test_a_broken_profile_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / KEY.file_name).write_text(text)
    with pytest.raises(ConfigError, match=KEY.file_name):
        load_profile(tmp_path, KEY)


def test_a_profile_of_another_format_is_not_used(tmp_path: Path) -> None:
    fit_profile(measured(), KEY, tmp_path)
    path = tmp_path / KEY.file_name
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    assert load_profile(tmp_path, KEY) is None


def test_a_profile_keeps_the_steps_that_it_was_made_from(tmp_path: Path) -> None:
    fit_profile(measured(), KEY, tmp_path)
    stored = load_measured_profile(tmp_path, KEY)
    assert stored is not None and stored[1] == measured()


def test_a_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_profile(TRUTH, measured(), tmp_path / "profile.png")
    assert (tmp_path / "profile.png").stat().st_size > 1000
