"""The clock of an engine's steps, one or several in flight."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from preloaded import STAGES
from rank_models import without_weights

from rose.admission.profile import ProfileKey
from rose.engine.scheduling.recorder import LEAST_STEP_S, StepRecorder, shape_of, stage_shares

pytestmark = pytest.mark.vllm

KEY = ProfileKey(
    model="m",
    hardware="h",
    vllm_version="0",
    parallelism="tp1pp1",
    dtype="float32",
    quantization="none",
    kv_dtype="auto",
    graphs="eager",
)
HALVES = (0.5, 0.5)
"""Two stages that take equally long."""
OUTPUT: Any = SimpleNamespace(num_scheduled_tokens={"r": 1}, scheduled_spec_decode_tokens={})
DECODE: Any = {"r": SimpleNamespace(num_computed_tokens=5, num_prompt_tokens=2)}


@pytest.fixture
def recorder(tmp_path: Path) -> StepRecorder:
    return StepRecorder(KEY, tmp_path)


def test_a_step_behind_another_one_takes_the_time_between_their_outputs(recorder: StepRecorder) -> None:
    recorder.started(OUTPUT, DECODE, 1.0)
    recorder.started(OUTPUT, DECODE, 1.1)
    assert recorder.ended(1.5) == pytest.approx(0.5)
    recorder.started(OUTPUT, DECODE, 1.6)
    assert recorder.ended(1.9) == pytest.approx(0.4)
    assert recorder.ended(1.9) == LEAST_STEP_S
    recorder.started(OUTPUT, DECODE, 5.0)  # after a while without work
    recorder.leave_out(0.2)
    assert recorder.ended(5.5) == pytest.approx(0.3)


def test_steps_in_flight_end_one_after_the_other(recorder: StepRecorder) -> None:
    step_s = recorder.model.predict(0, 1, 4)
    recorder.started(OUTPUT, DECODE, 1.0)
    recorder.started(OUTPUT, DECODE, 1.0 + step_s / 2)
    assert recorder.end_of_steps() == pytest.approx(1.0 + 2 * step_s)
    recorder.ended(1.0 + step_s / 4)
    assert recorder.end_of_steps() == pytest.approx(1.0 + 1.5 * step_s)


def test_a_step_in_a_pipeline_takes_the_time_between_two_outputs_in_each_stage(tmp_path: Path) -> None:
    """But never longer than since it was begun."""
    recorder = StepRecorder(KEY, tmp_path, HALVES)
    for began_s in (1.0, 1.1):
        recorder.started(OUTPUT, DECODE, began_s)
    recorder.ended(2.0)
    assert recorder.seconds == pytest.approx(1.0)
    assert recorder.ended(2.2) == pytest.approx(0.2)  # a small step, which waited for the large one
    assert recorder.seconds == pytest.approx(0.4)
    for began_s in (5.0, 5.1):
        recorder.started(OUTPUT, DECODE, began_s)
    recorder.ended(5.2)
    recorder.ended(6.2)  # a large step
    assert recorder.seconds == pytest.approx(1.1)


def test_steps_in_a_pipeline_end_a_stage_apart(tmp_path: Path) -> None:
    recorder = StepRecorder(KEY, tmp_path, HALVES)
    step_s = recorder.model.predict(0, 1, 4)
    recorder.started(OUTPUT, DECODE, 1.0)
    assert recorder.end_of_steps() == pytest.approx(1.0 + step_s)
    recorder.started(OUTPUT, DECODE, 1.0 + step_s / 4)
    assert recorder.end_of_steps() == pytest.approx(1.0 + 1.5 * step_s)
    recorder.ended(1.0 + step_s)
    assert recorder.end_of_steps() == pytest.approx(1.0 + 1.5 * step_s)


@pytest.mark.parametrize("shares", [(0.75, 0.25), (0.25, 0.75), (0.2, 0.5, 0.3), (1.0, 0.0)])
def test_a_step_takes_its_way_through_stages_of_any_size_whatever_it_waits_for(
    tmp_path: Path, shares: tuple[float, ...]
) -> None:
    """The stages compute steps of different lengths one after the other, as a pipeline does."""
    recorder = StepRecorder(KEY, tmp_path, shares)
    steps_s, free_s, ends_s = [4.0, 0.4, 0.4, 4.0, 1.0, 4.0, 4.0, 4.0], [0.0] * len(shares), list[float]()
    for index, step_s in enumerate(steps_s):
        # As many are in flight as there are stages, so that each begins with the end of an earlier one.
        began_s = at_s = ends_s[index - len(shares)] if index >= len(shares) else 0.0
        for stage, share in enumerate(shares):
            at_s = free_s[stage] = max(at_s, free_s[stage]) + share * step_s
        ends_s.append(at_s)
        if index >= len(shares):
            recorder.ended(ends_s[index - len(shares)])
            assert recorder.seconds == pytest.approx(steps_s[index - len(shares)])
        recorder.started(OUTPUT, DECODE, began_s)


def test_a_stage_has_the_share_of_its_layers_also_where_they_are_divided_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = without_weights(tmp_path, max_model_len=64, pipeline_parallel_size=2).create_engine_config()
    assert stage_shares(config) == [0.5, 0.5]
    monkeypatch.setenv(STAGES, "1,3")
    assert stage_shares(config) == [0.25, 0.75]


def test_steps_end_at_the_pace_of_the_slowest_stage(tmp_path: Path) -> None:
    recorder = StepRecorder(KEY, tmp_path, (0.75, 0.25))
    step_s = recorder.model.predict(0, 1, 4)
    for _ in range(3):
        recorder.started(OUTPUT, DECODE, 1.0)
    assert recorder.end_of_steps() == pytest.approx(1.0 + step_s + 2 * 0.75 * step_s)


def test_a_decode_with_draft_tokens_is_one_decode() -> None:
    step: Any = SimpleNamespace(
        num_scheduled_tokens={"drafted": 5, "plain": 1, "recomputed": 5},
        scheduled_spec_decode_tokens={"drafted": [7, 7, 7, 7]},
    )
    requests: Any = {
        name: SimpleNamespace(num_computed_tokens=25, num_prompt_tokens=20)
        for name in step.num_scheduled_tokens
    }
    shape = shape_of(step, requests)
    assert (shape.num_decodes, shape.context_tokens, shape.prefill_tokens) == (2, 20 + 24, 5)
