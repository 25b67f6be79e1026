"""Turns with two of serving's steps in flight: schedulers and boards of their own, and no worker."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from lone_schedulers import pooled_scheduler, request_of
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from rose._shm import Words
from rose.admission.board import BoardWord, set_closed_share, to_ns
from rose.admission.claim import ServingState, state_of
from rose.admission.deadlines import MIN_PREFILL_TOKENS
from rose.admission.online import OnlineStepTime
from rose.admission.rollout_side import RolloutSide
from rose.admission.step_time import StepTimeModel
from rose.engine.scheduling.recorder import StepRecorder, profile_key
from rose.engine.status import Field, ProfileCommand
from rose.types import GateMode, Role

pytestmark = pytest.mark.vllm

STALL_S = 0.5
SLO = {"slo_ttft_ms": 8000.0, "slo_tpot_ms": 2000.0}
MODEL = StepTimeModel(base_s=0.1, per_prefill_token_s=0.02, per_decode_s=0.01, margin_s=0.0)
MOST_PREFILL_TOKENS = 94
"""What fits into a step beside one decode before that breaks its ITL cap, the TPOT SLO."""


@pytest.fixture
def serving(runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """With a profile, and one request that decodes for long."""
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "cache"))
    arguments = {"is_async": True, "max_model_len": 512, "gate": GateMode.OFF, "stall_s": STALL_S, **SLO}
    with pooled_scheduler(tmp_path, Role.SERVING, **arguments) as scheduler:
        scheduler.recorder._online = OnlineStepTime(MODEL)
        ask(scheduler, "decode", 1)
        end(scheduler, scheduler.schedule())
        yield scheduler


@pytest.fixture
def rollout(serving: Any) -> Iterator[RolloutSide]:
    """With something to run."""
    side = RolloutSide(board(serving))
    side.set_want(True)
    yield side
    side.detach()


def board(scheduler: Any) -> Words:
    words: Words = scheduler.tenant.client.board_words
    return words


def ask(scheduler: Any, name: str, num_tokens: int) -> None:
    scheduler.add_request(request_of(name, [1] * num_tokens, 50))


def end(scheduler: Any, step: SchedulerOutput) -> None:
    """The step's output: a token for each request whose prompt is computed."""
    names = list(step.num_scheduled_tokens)
    has_token = [
        scheduler.requests[name].num_computed_tokens >= scheduler.requests[name].num_prompt_tokens
        for name in names
    ]
    tokens = [[5] if has else [] for has in has_token]
    at = {name: index for index, name in enumerate(names)}
    scheduler.update_from_output(step, ModelRunnerOutput(names, at, tokens))


def shut(scheduler: Any, mode: GateMode) -> None:
    scheduler.set_gate(scheduler.rose.gate_settings(mode))


def test_a_claim_ends_with_the_gate_although_steps_are_always_in_flight(
    serving: Any, rollout: RolloutSide
) -> None:
    shut(serving, GateMode.IDLE)
    first, second = serving.schedule(), serving.schedule()
    assert state_of(board(serving).load(BoardWord.CLAIM), 0) == ServingState.RUNNING
    shut(serving, GateMode.OFF)
    for _ in range(3):
        assert rollout.view().may_start and not rollout.view().has_work
        end(serving, first)
        first, second = second, serving.schedule()


def test_no_grant_is_offered_beside_a_step_that_was_begun_with_the_gate_off(
    serving: Any, rollout: RolloutSide
) -> None:
    first = serving.schedule()
    shut(serving, GateMode.ALTERNATE)
    second = serving.schedule()
    words = board(serving)
    assert (words.load(BoardWord.S_YIELDS), state_of(words.load(BoardWord.CLAIM), 0)) == (
        0,
        ServingState.RUNNING,
    )
    end(serving, first)
    assert state_of(words.load(BoardWord.CLAIM), 0) == ServingState.RUNNING
    end(serving, second)
    assert state_of(words.load(BoardWord.CLAIM), 0) == ServingState.OPEN
    serving.schedule()
    assert words.load(BoardWord.S_YIELDS) == 1


def test_serving_drains_for_a_paused_rollout_step_only_if_that_may_have_a_grant(
    serving: Any, rollout: RolloutSide
) -> None:
    assert rollout.try_begin(time.monotonic(), rollout.view())
    rollout.pause()
    shut(serving, GateMode.IDLE)
    serving.schedule()
    words = board(serving)
    assert not serving.must_drain()
    words.store(BoardWord.R_PAUSED, time.monotonic_ns() - int(STALL_S * 1e9))
    assert serving.must_drain()
    set_closed_share(words, 1.0)
    assert not serving.must_drain()
    set_closed_share(words, 0.0)


def test_serving_drains_for_a_rollout_engine_that_died_in_a_pause_once(
    serving: Any, rollout: RolloutSide
) -> None:
    assert rollout.try_begin(time.monotonic(), rollout.view())
    rollout.pause()
    words = board(serving)
    words.store(BoardWord.R_PAUSED, time.monotonic_ns() - int(STALL_S * 1e9))
    shut(serving, GateMode.IDLE)
    serving.schedule()
    assert words.load(BoardWord.S_YIELDS) == 1  # left without an answer
    assert not serving.must_drain()


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_long_prompts_chunks_fill_a_pipeline_before_it_drains_for_rollouts(
    serving: Any, rollout: RolloutSide, tmp_path: Path, num_stages: int
) -> None:
    shares = [1 / num_stages] * num_stages
    serving.recorder = StepRecorder(profile_key(serving.vllm_config), tmp_path, shares)
    serving.recorder._online = OnlineStepTime(MODEL)
    serving.max_num_scheduled_tokens = 50
    shut(serving, GateMode.TTFT_ONLY)
    ask(serving, "prompt", 200)
    steps: list[SchedulerOutput] = []
    while not steps or (len(steps) < 4 and not serving.must_drain()):
        steps.append(serving.schedule())
        # It is alive, although it has left a grant unanswered.
        board(serving).store(BoardWord.R_HEARTBEAT, time.monotonic_ns())
    assert ["prompt" in step.num_scheduled_tokens for step in steps] == [True] * num_stages
    for step in steps:
        assert serving.must_drain()
        end(serving, step)


def test_a_profile_is_of_steps_with_nothing_in_flight_beside_them(serving: Any) -> None:
    serving.page.put(Field.PROFILE, ProfileCommand.RECORD)
    step = serving.schedule()
    assert not serving.has_requests()
    end(serving, step)
    assert serving.has_requests()
    serving.page.put(Field.PROFILE, ProfileCommand.FIT)
    serving.schedule()
    assert serving.has_requests()


def test_a_rollout_engine_says_how_much_slack_its_next_step_needs(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "cache"))
    with pooled_scheduler(tmp_path, Role.ROLLOUT, gate=GateMode.DUAL, **SLO) as scheduler:
        scheduler.recorder._online = OnlineStepTime(replace(MODEL, per_context_token_s=0.01))
        ask(scheduler, "long", 40)
        end(scheduler, scheduler.schedule())
        model = scheduler.recorder.model
        scheduler.schedule()
        assert board(scheduler).load(BoardWord.R_MIN_STEP) == to_ns(model.predict_safe(0, 1, 40))


def test_prefill_in_a_step_behind_another_spares_decodes_as_in_the_first(
    serving: Any, rollout: RolloutSide
) -> None:
    shut(serving, GateMode.DUAL)
    end(serving, serving.schedule())
    serving._deadlines.waited(1.0, time.monotonic() + 60.0)  # for a rollout step, as the prompt comes
    ask(serving, "prompt", 400)
    first, second = serving.schedule(), serving.schedule()
    taken = [step.num_scheduled_tokens["prompt"] for step in (first, second)]
    assert MIN_PREFILL_TOKENS < min(taken) <= max(taken) <= MOST_PREFILL_TOKENS


def test_sequences_of_a_drained_pipeline_decode_in_one_step_while_rollouts_want_turns(serving: Any) -> None:
    """Under Model Runner V2 vLLM leaves out those of the last step. Serving's slack is that of a step with
    all decodes."""
    ask(serving, "other", 1)
    end(serving, serving.schedule())
    shut(serving, GateMode.ALTERNATE)
    serving.requests["other"].next_decode_eligible_step = serving.current_step + 2  # as in two stages
    alone = serving.schedule()
    assert list(alone.num_scheduled_tokens) == ["decode"]
    end(serving, alone)
    rollout = RolloutSide(board(serving))
    rollout.set_want(True)
    serving.requests["other"].next_decode_eligible_step = serving.current_step + 2
    taken_over = serving.schedule()
    assert taken_over.total_num_scheduled_tokens == 0
    assert state_of(board(serving).load(BoardWord.CLAIM), 0) == ServingState.OPEN
    end(serving, taken_over)
    assert sorted(serving.schedule().num_scheduled_tokens) == ["decode", "other"]
    rollout.detach()
