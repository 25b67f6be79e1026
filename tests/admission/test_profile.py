"""Files of step-time profiles."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from rose.admission.profile import (
    ProfileKey,
    fit_profile,
    load_measured_profile,
    load_profile,
    plot_profile,
)
from rose.admission.step_time import StepObservation, StepTimeModel
from rose.errors import ConfigError

KEY = ProfileKey(model="org/tiny model", hardware="cpu-2", vllm_version="0.32.0", parallelism="tp1")
TRUTH = StepTimeModel(
    base_s=0.0115, per_prefill_token_s=0.00069, per_decode_s=0.00056, per_context_token_s=1e-7
)


def measured() -> list[StepObservation]:
    rng = random.Random(0)
    shapes = [(p, d, d * c) for p in (0, 64, 256, 512) for d in (0, 4, 16) for c in (128, 1024) if p + d]
    return [
        StepObservation(
            prefill_tokens=p,
            num_decodes=d,
            context_tokens=c,
            seconds=TRUTH.predict(p, d, c) * rng.uniform(0.97, 1.03),
        )
        for p, d, c in shapes * 4
    ]


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
