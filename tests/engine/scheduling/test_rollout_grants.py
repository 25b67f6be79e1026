"""What a rollout engine's scheduler asks of the board, without a worker: grants, pauses, its sleep."""

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from lone_schedulers import BLOCK_TOKENS, pooled_scheduler
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from rose._shm import Words
from rose.admission.board import BoardWord
from rose.admission.gate import ServingView
from rose.admission.online import OnlineStepTime
from rose.admission.rollout_side import RolloutSide
from rose.admission.serving_side import ServingSide
from rose.admission.slack import NEVER
from rose.admission.step_time import MIN_OBSERVATIONS, StepShape, StepTimeModel
from rose.engine.scheduling import rollout_scheduler
from rose.engine.scheduling.recorder import STALE_S
from rose.types import GateMode, Role


@pytest.fixture(autouse=True)
def _profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def rollout(runtime_dir: Path, tmp_path: Path) -> Iterator[Any]:
    with pooled_scheduler(tmp_path, Role.ROLLOUT, gate=GateMode.DUAL, stall_s=1000.0) as scheduler:
        yield scheduler


def board(scheduler: Any) -> Words:
    words: Words = scheduler.tenant.client.board_words
    return words


def test_a_paused_step_that_gets_a_grant_goes_to_its_end_and_is_timed_without_the_pause(rollout: Any) -> None:
    words, side, interrupt = board(rollout), rollout._side, rollout._interrupt
    serving = ServingSide(words)
    side.set_want(True)
    assert side.try_begin(time.monotonic() + 1.0, side.view())
    interrupt.begin(1.0)
    serving.publish(ServingView(has_work=True, has_pending_prefill=False, latest_start_s=NEVER))
    pausing = threading.Thread(target=interrupt.ask)
    pausing.start()
    while serving.rollout_paused_s() is None:
        time.sleep(0.001)
    offering = threading.Thread(target=serving.offer_grant, args=(NEVER, 60.0))
    offering.start()
    pausing.join()
    for _ in range(10):
        interrupt.ask()  # serving still has work: were it asked, this would wait for ever
    side.end_step(1)
    offering.join()
    assert words.load(BoardWord.R_PAUSES) == 1
    assert interrupt.end() > 0
    assert interrupt.end() == 0


def test_scheduling_is_a_part_of_the_step_that_the_gate_predicts(
    rollout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_s, allocate = 0.005, rollout.kv_cache_manager.allocate_slots

    def allocate_slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(slow_s)
        return allocate(*args, **kwargs)

    def step() -> None:
        output = rollout.schedule()
        names = list(output.num_scheduled_tokens)
        indices = {name: index for index, name in enumerate(names)}
        rollout.update_from_output(output, ModelRunnerOutput(names, indices, [[5]] * len(names)))

    monkeypatch.setattr(rollout.kv_cache_manager, "allocate_slots", allocate_slowly)
    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)

    def ask(name: str, num_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=MIN_OBSERVATIONS // 2 + 6)
        rollout.add_request(Request(name, [1] * num_tokens, sampling, None, block_hasher=hasher))

    # Without a model the gate admits no prefill beside a decode: so two decode together, and then one alone.
    for prompts in ({"a": 9, "b": 5}, {"c": 7}):
        for name, num_tokens in prompts.items():
            ask(name, num_tokens)
        for _ in range(2 * MIN_OBSERVATIONS):
            if rollout.has_unfinished_requests():
                step()
    assert rollout.recorder.is_profiled
    assert rollout.recorder.observed_model.predict(0, 2, 40) > 1.5 * slow_s
    ask("d", 7)
    rollout.schedule()
    started, ends = (board(rollout).load(word) for word in (BoardWord.R_STARTED, BoardWord.R_EST_END))
    assert started > 0 and ends - started > 1e9 * slow_s


@pytest.mark.parametrize(("age_s", "is_forgotten"), [(STALE_S, True), (STALE_S - 5, False)])
def test_old_slow_steps_are_forgotten_once_the_engine_has_waited_for_half_the_stall_timeout(
    rollout: Any, age_s: float, is_forgotten: bool
) -> None:
    recorder = rollout.recorder
    profile = StepTimeModel(base_s=0.01, per_prefill_token_s=0.001, per_decode_s=0.001)
    recorder._online = OnlineStepTime(profile)
    recorder._online.observe(StepShape(prefill_tokens=0, num_decodes=4, context_tokens=0).observed(2.0))
    assert recorder.model.ratio_q99 > 100
    ServingSide(board(rollout)).publish(
        ServingView(has_work=True, has_pending_prefill=False, latest_start_s=time.monotonic() + 1000.0)
    )
    rollout.add_request(Request("a", [1] * 9, SamplingParams(max_tokens=4), None))
    recorder._free_s[-1] = time.monotonic() - age_s
    rollout.schedule()
    assert recorder.model.ratio_q99 > 100
    rollout._waits_since_s = time.monotonic() - 500.0
    rollout.schedule()
    assert (recorder.model == profile) is is_forgotten


def test_a_paused_engine_stalls_nobody_and_asks_for_no_grant(rollout: Any) -> None:
    rollout._side.set_want(True)
    rollout._stalls.observe({"a"}, time.monotonic())
    rollout.set_pause_state(PauseState.PAUSED_ALL)
    assert board(rollout).load(BoardWord.R_WANT) == 0
    assert rollout._stalls.stalled(time.monotonic() + 5000) == ()
    rollout.set_pause_state(PauseState.UNPAUSED)
    assert rollout._stalls.stalled(time.monotonic() + 500) == ()
    assert rollout._stalls.stalled(time.monotonic() + 1001) == ("a",)


def test_a_request_whose_memory_serving_has_is_told_apart_from_one_behind_other_rollouts(
    rollout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step() -> list[str]:
        rollout.schedule()
        refused: list[str] = rollout._refused
        return refused

    def ask(name: str) -> None:
        rollout.add_request(Request(name, [1] * 9, SamplingParams(max_tokens=4), None))

    monkeypatch.setattr(rollout, "max_num_scheduled_tokens", 5)
    rollout.set_gate(rollout.rose.gate_settings(GateMode.OFF))
    ask("first")
    ask("behind it")
    assert step() == []
    monkeypatch.setattr(rollout, "max_num_scheduled_tokens", 512)
    monkeypatch.setattr(rollout._memory, "tick", lambda *_: None)
    blocks = rollout.kv_cache_manager.block_pool
    blocks.get_new_blocks(blocks.get_num_free_blocks())
    assert step() == []
    monkeypatch.setattr(rollout.tenant, "fits_alone", lambda _: False)  # as when serving has the slabs
    assert step() == ["behind it"]
    monkeypatch.setattr(rollout, "max_num_scheduled_tokens", 1)
    rollout._preempt_request(rollout.running.pop(), 0.0)
    assert "first" in step()


def test_drafts_that_the_worker_has_dropped_are_not_in_the_grant(
    rollout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens would go to sequences or prefill beyond what the gate has admitted."""
    rollout.add_request(Request("a", [1] * 9, SamplingParams(max_tokens=4), None))
    step = rollout.schedule()
    rollout.update_from_output(step, ModelRunnerOutput(["a"], {"a": 0}, [[5]]))
    monkeypatch.setattr(rollout, "num_spec_tokens", 3)
    monkeypatch.setattr(rollout.scheduler_config, "async_scheduling", True)
    asked: list[tuple[int, ...]] = []

    def ask(_: RolloutSide) -> int:
        asked.append(rollout._candidate().draft_tokens)
        return 0

    monkeypatch.setattr(rollout, "_ask_for_grant", ask)
    for last_scheduled in ({"a"}, set[str]()):
        rollout.requests["a"].spec_token_ids = [-1, -1, -1]
        rollout._last_scheduled = frozenset(last_scheduled)
        rollout.schedule()
    assert asked == [(3,), ()]


def test_a_pass_in_which_a_pipelines_first_stage_takes_tokens_over_needs_no_grant(
    rollout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a pass has no tokens, and a grant for it would count as one that memory kept from being used."""
    rollout.add_request(Request("a", [1] * 9, SamplingParams(max_tokens=4), None))
    step = rollout.schedule()
    rollout.update_from_output(step, ModelRunnerOutput(["a"], {"a": 0}, [[5]]))
    rollout.requests["a"].next_decode_eligible_step = rollout.current_step + 2  # as in two stages
    asked: list[RolloutSide] = []
    ask_for_grant = rollout._ask_for_grant

    def ask(side: RolloutSide) -> int:
        asked.append(side)
        limit: int = ask_for_grant(side)
        return limit

    monkeypatch.setattr(rollout, "_ask_for_grant", ask)
    taken_over, decode = rollout.schedule(), rollout.schedule()
    assert (taken_over.total_num_scheduled_tokens, decode.total_num_scheduled_tokens) == (0, 1)
    assert len(asked) == 1


def test_a_rollout_engine_whose_gate_goes_off_asks_for_no_more_grants(rollout: Any) -> None:
    rollout._side.set_want(True)
    rollout.set_gate(rollout.rose.gate_settings(GateMode.OFF))
    assert board(rollout).load(BoardWord.R_WANT) == 0


def test_slabs_are_mapped_by_a_step_that_uses_them_and_unmapped_by_any_pass(rollout: Any) -> None:
    """Zeroing computes on the GPU, where a pass without a grant has no right to."""
    tenant = rollout.tenant
    ServingSide(board(rollout)).publish(
        ServingView(has_work=True, has_pending_prefill=False, latest_start_s=NEVER)
    )
    rollout.add_request(Request("a", [1] * 9, SamplingParams(max_tokens=4), None))
    refused = rollout.schedule()
    assert refused.total_num_scheduled_tokens == 0
    num_grown = tenant.grow(2)
    waiting = rollout.schedule()
    assert num_grown == 2 and waiting.total_num_scheduled_tokens == 0 and not waiting.rose_ops
    assert not rollout._must_pass()
    given = tenant.idle_positions()[:1]
    tenant.give_back(given)  # never mapped, so no worker hears of it
    rollout.set_gate(rollout.rose.gate_settings(GateMode.OFF))
    step = rollout.schedule()
    assert step.total_num_scheduled_tokens == 9
    assert step.rose_ops.map and not step.rose_ops.unmap
    assert given[0] not in dict(step.rose_ops.map)


class Waits(RolloutSide):
    """No grant comes; after some waits there is input for the engine's loop."""

    def __init__(self, words: Words, input_queue: "queue.Queue[None]", num_waits: int) -> None:
        super().__init__(words)
        self._input, self._left = input_queue, num_waits

    def wait_grant(self, timeout_s: float = 0.0) -> bool:
        assert self._left > 0, "one wait too many"
        self._left -= 1
        if self._left == 0:
            self._input.put(None)
        return super().wait_grant(0.0)


def test_an_engine_without_a_grant_sleeps_until_something_wants_its_loop(
    rollout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_scheduler, "PATIENT_WAIT_S", 3600.0)
    words = board(rollout)
    ServingSide(words).begin_step()
    # Without the watcher, which would wake the loop by itself.
    rollout._input_queue, rollout._must_step = queue.Queue(), False
    assert not rollout._await_grant(Waits(words, rollout._input_queue, num_waits=3))
    rollout._input_queue, rollout._must_step = queue.Queue(), True  # a cut, told before it began to wait
    assert not rollout._await_grant(Waits(words, queue.Queue(), num_waits=1))
    rollout._input_queue, rollout._must_step = None, False
    assert not rollout._await_grant(Waits(words, queue.Queue(), num_waits=1))
