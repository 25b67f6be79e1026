"""A rank that computes every step together with others keeps its GPU until none of them has requests."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from lone_schedulers import pooled_scheduler, request_of
from vllm.v1.outputs import ModelRunnerOutput

from rose._shm import Words
from rose.admission.board import BoardWord
from rose.admission.claim import ServingState, state_of
from rose.admission.rollout_side import RolloutSide
from rose.types import GateMode, Role

pytestmark = pytest.mark.vllm

STALL_S = 1.0


@pytest.fixture
def serving(runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The scheduler of one of several ranks in lockstep."""
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "cache"))
    with pooled_scheduler(tmp_path, Role.SERVING, gate=GateMode.IDLE, stall_s=STALL_S) as scheduler:
        scheduler._is_lockstep = True
        yield scheduler


def state(scheduler: Any) -> ServingState:
    words: Words = scheduler.tenant.client.board_words
    return ServingState(state_of(words.load(BoardWord.CLAIM), 0))


def ask(scheduler: Any, max_tokens: int) -> None:
    scheduler.add_request(request_of("asked", [1] * 4, max_tokens))


def step(scheduler: Any) -> None:
    planned = scheduler.schedule()
    names = list(planned.num_scheduled_tokens)
    at = {name: index for index, name in enumerate(names)}
    scheduler.update_from_output(planned, ModelRunnerOutput(names, at, [[5] for _ in names]))


def test_a_rank_without_requests_claims_its_gpu_for_the_others_steps(serving: Any) -> None:
    rollout = RolloutSide(serving.tenant.client.board_words)
    assert state(serving) is ServingState.IDLE and rollout.view().may_start
    for _ in range(2):
        serving.begin_dummy_step()
        assert state(serving) is ServingState.RUNNING and not rollout.view().may_start
    serving.end_wave()
    assert state(serving) is ServingState.IDLE and rollout.view().may_start
    rollout.detach()


def test_a_claim_outlasts_the_ranks_own_requests_until_all_ranks_are_done(serving: Any) -> None:
    ask(serving, max_tokens=2)
    for _ in range(2):
        step(serving)
        assert state(serving) is ServingState.RUNNING
    assert not serving.has_unfinished_requests()
    serving.begin_dummy_step()
    assert state(serving) is ServingState.RUNNING
    serving.end_wave()
    assert state(serving) is ServingState.IDLE


def test_a_rollout_step_that_was_paused_for_too_long_is_let_end_within_a_wave(serving: Any) -> None:
    words = serving.tenant.client.board_words
    rollout = RolloutSide(words)
    rollout.set_want(True)
    assert rollout.try_begin(time.monotonic() + 1.0, rollout.view())
    rollout.pause()
    ask(serving, max_tokens=8)
    step(serving)
    assert words.load(BoardWord.S_YIELDS) == 0
    time.sleep(1.5 * STALL_S)
    step(serving)
    assert words.load(BoardWord.S_YIELDS) == 1
    assert state(serving) is ServingState.RUNNING
    rollout.detach()
