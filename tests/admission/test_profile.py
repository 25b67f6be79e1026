"""Files of step-time profiles."""

import json
import random
from dataclasses import fields, replace
from pathlib import Path

import pytest

from rose.admission.profile import ProfileKey, fit_profile, load_profile, nearest_profile, plot_profile
from rose.admission.step_time import StepObservation, StepShape, StepTimeModel, attended_pairs
from rose.errors import ConfigError

KEY = ProfileKey(
    model="org/tiny model",
    hardware="cpu-2",
    vllm_version="0.32.0",
    parallelism="tp1",
    dtype="bfloat16",
    quantization="none",
    kv_dtype="auto",
    graphs="eager",
)
TRUTH = StepTimeModel(
    base_s=0.0115,
    per_prefill_token_s=0.00069,
    per_decode_s=0.00056,
    per_context_token_s=1e-7,
    per_prefill_pair_s=1e-7,
)


def measured() -> list[StepObservation]:
    rng = random.Random(0)
    sizes = [(p, 0) for p in (32, 128, 512)] + [(p, d) for p in (0, 256) for d in (1, 4, 16)]
    shapes = [
        StepShape(
            prefill_tokens=p, num_decodes=d, context_tokens=512 * d, prefill_pairs=attended_pairs(p, computed)
        )
        for p, d in sizes
        for computed in ((0, 2048) if p else (0,))
    ]
    return [one.observed(TRUTH.predict_step(one) * rng.uniform(0.97, 1.03)) for one in shapes * 4]


def test_a_fitted_profile_is_loaded_again(tmp_path: Path) -> None:
    model = fit_profile(measured(), KEY, tmp_path / "profiles")
    assert load_profile(tmp_path / "profiles", KEY) == (model, measured())
    assert model.per_prefill_token_s == pytest.approx(TRUTH.per_prefill_token_s, rel=0.1)
    assert model.per_prefill_pair_s == pytest.approx(TRUTH.per_prefill_pair_s, rel=0.1)
    assert [path.suffix for path in (tmp_path / "profiles").iterdir()] == [".json"]


@pytest.mark.parametrize("field", [field.name for field in fields(ProfileKey)])
def test_a_profile_counts_for_its_own_key_only(tmp_path: Path, field: str) -> None:
    fit_profile(measured(), KEY, tmp_path)
    other = replace(KEY, **{field: "other"})
    assert load_profile(tmp_path, other) is None


@pytest.mark.parametrize("text", ["not json", "[]", "{}", '{"format": 2}'])
def test_a_broken_profile_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / KEY.file_name).write_text(text)
    with pytest.raises(ConfigError, match=KEY.file_name):
        load_profile(tmp_path, KEY)


def test_a_profile_of_another_format_is_not_used(tmp_path: Path) -> None:
    fit_profile(measured(), KEY, tmp_path)
    path = tmp_path / KEY.file_name
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    assert load_profile(tmp_path, KEY) is None


def test_the_nearest_profile_says_what_is_different(tmp_path: Path) -> None:
    assert nearest_profile(tmp_path, KEY) == ""
    fit_profile(measured(), replace(KEY, kv_dtype="fp8"), tmp_path)
    fit_profile(measured(), replace(KEY, kv_dtype="fp8", hardware="cpu-4"), tmp_path)
    fit_profile(measured(), replace(KEY, model="another"), tmp_path)
    assert nearest_profile(tmp_path, KEY) == "kv_dtype fp8 (here auto)"
    (tmp_path / "noise.json").write_text("not json")
    assert nearest_profile(tmp_path, KEY) == "kv_dtype fp8 (here auto)"


def test_a_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot_profile(TRUTH, measured(), tmp_path / "profile.png")
    assert (tmp_path / "profile.png").stat().st_size > 1000
