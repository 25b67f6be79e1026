"""What commands do between an engine's routes and its scheduler, without a model behind."""

import asyncio
import logging
import queue
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from vllm.v1.core.sched.interface import PauseState

from rose._shm import Words
from rose.admission.board import EngineState, Word
from rose.admission.gate import ServingView
from rose.admission.profile import ProfileKey
from rose.admission.rollout_side import RolloutSide
from rose.admission.serving_side import ServingSide
from rose.admission.slack import NEVER
from rose.admission.stall import StallTracker
from rose.admission.step_time import UNPROFILED
from rose.engine.http import followers
from rose.engine.http.control import EngineControl
from rose.engine.scheduling import rollout_scheduler
from rose.engine.scheduling.recorder import StepRecorder
from rose.engine.scheduling.rollout_scheduler import RolloutScheduler
from rose.engine.scheduling.scheduler import GATE_MODES, RoseScheduler
from rose.engine.scheduling.serving_scheduler import ServingScheduler
from rose.engine.settings import EngineSettings
from rose.engine.status import Field, ProfileCommand, StatusPage, page_path
from rose.errors import ConfigError, WorkerError
from rose.messages import WeightUpdate, WorkerStatus
from rose.types import Deployment, GateMode, Role

KEY = ProfileKey(model="m", hardware="h", vllm_version="0", parallelism="tp1pp1")
NUM_STEPS = 200


class Client:
    """An engine that answers at once, without a token."""

    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(model="m", max_model_len=64, get_vocab_size=lambda: 10),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=32, max_num_seqs=2),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
    )

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[None]:
        await asyncio.sleep(0)
        yield None


def bare(scheduler_class: type[RoseScheduler], role: Role, page: StatusPage) -> Any:
    """A scheduler with ROSE's half alone: vLLM's would need a model's configuration."""
    scheduler: Any = scheduler_class.__new__(scheduler_class)
    scheduler.rose = EngineSettings(role=role)
    scheduler.page = page
    scheduler.requests, scheduler.max_num_scheduled_tokens = {}, 512
    return scheduler


def run_steps(recorder: StepRecorder, num_steps: int, seconds_per_token: float) -> None:
    """Prompts of 1 to 50 tokens, one per step."""
    for step in range(num_steps):
        num_tokens = 1 + step % 50
        request = SimpleNamespace(num_computed_tokens=num_tokens, num_prompt_tokens=num_tokens)
        output: Any = SimpleNamespace(num_scheduled_tokens={"r": num_tokens})
        recorder.started(output, {"r": request})  # type: ignore[dict-item]
        recorder.ended(recorder._started_s + seconds_per_token * num_tokens)


@pytest.fixture
def page(runtime_dir: Path) -> Iterator[StatusPage]:
    made = StatusPage(page_path(runtime_dir, "e"), create=True)
    yield made
    made.close()


@pytest.fixture
def words() -> Words:
    return Words(bytearray(4096))


async def obey(scheduler: RoseScheduler) -> None:
    while True:
        scheduler._obey_commands()
        await asyncio.sleep(0)


@pytest.mark.asyncio
async def test_profiles_at_once_leave_the_gate_as_it_was_and_one_without_steps_is_an_error(
    page: StatusPage, tmp_path: Path
) -> None:
    scheduler = bare(RoseScheduler, Role.ROLLOUT, page)
    scheduler.recorder, scheduler._profile_command = StepRecorder(KEY, tmp_path), ProfileCommand.NONE
    scheduler.set_gate(scheduler.rose.gate_settings(GateMode.DUAL))
    control: Any = EngineControl(Client(), EngineSettings(role=Role.ROLLOUT, engine_id="e"), "m")  # type: ignore[arg-type]
    obeying = asyncio.create_task(obey(scheduler))
    first = asyncio.create_task(control.profile())
    while page.get(Field.GATE_MODE) != GATE_MODES.index(GateMode.OFF):
        await asyncio.sleep(0)
    for profile in (first, asyncio.create_task(control.profile())):
        with pytest.raises(WorkerError, match="could not make a profile"):
            await profile
    obeying.cancel()
    scheduler._obey_commands()
    assert page.get(Field.GATE_MODE) == GATE_MODES.index(GateMode.DUAL)


class UpdatedClient(Client):
    """Notes at each call whether the engine's status speaks of an update, and of which weights."""

    output_processor = SimpleNamespace(request_states={})

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool, str | None]] = []
        self.status: Callable[[], WorkerStatus]
        self.is_broken = False
        self.asked: list[tuple[str, bool]] = []

    async def collective_rpc(self, method: str, args: tuple[str, ...] = ()) -> list[bool]:
        """Two ranks, which compare for as long as it takes to be asked twice."""
        self.asked.append((method, self.status().is_updating))
        return [True, self.asked.count((method, False)) != 1 or method == "begin_weight_comparison"]

    def __getattr__(self, name: str) -> Callable[..., Awaitable[None]]:
        async def call(*_: object, **__: object) -> None:
            status = self.status()
            self.seen.append((name, status.is_updating, status.weight_version))
            if self.is_broken and name == "update_weights":
                raise WorkerError("no such weights")

        return call


@pytest.mark.asyncio
async def test_an_update_is_told_before_steps_are_held_back_and_its_version_before_they_go_on(
    page: StatusPage, staged: dict[str, str]
) -> None:
    client = UpdatedClient()
    control: Any = EngineControl(client, EngineSettings(role=Role.ROLLOUT, engine_id="e"), "m")  # type: ignore[arg-type]
    client.status = control.status
    await control.apply_weights(WeightUpdate(version="run/1", **staged))
    # The engine runs on meanwhile.
    assert client.asked == [("begin_weight_comparison", False)] + 2 * [("has_compared_weights", False)]
    assert client.seen[0] == ("pause_generation", True, None)
    assert client.seen[-1] == ("resume_generation", True, "run/1")
    assert (control.status().is_updating, control.status().weight_version) == (False, "run/1")
    client.is_broken = True
    with pytest.raises(WorkerError, match="no such weights"):
        await control.apply_weights(WeightUpdate(version="run/2", **staged))
    assert client.seen[-1] == ("resume_generation", True, "run/1")
    assert (control.status().is_updating, control.status().weight_version) == (False, "run/1")


@pytest.mark.asyncio
async def test_steps_go_on_once_a_router_knows_of_the_new_version(
    page: StatusPage, staged: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "MOST_S", 3600.0)
    client = UpdatedClient()
    control: Any = EngineControl(client, EngineSettings(role=Role.ROLLOUT, engine_id="e"), "m")  # type: ignore[arg-type]
    client.status = control.status
    control.followers.asked("router", None, 3600)
    control.followers.asked("gone", None, 1e-9)
    update = asyncio.create_task(control.apply_weights(WeightUpdate(version="run/1", **staged)))
    while control.status().weight_version != "run/1":
        assert not update.done()
        await asyncio.sleep(0)
    for _ in range(3):
        assert control.status().is_updating and client.seen[-1][0] != "resume_generation"
        control.followers.asked("router", "run/0", 3600)
        await asyncio.sleep(0)
    control.followers.asked("router", "run/1", 3600)
    await update
    assert client.seen[-1] == ("resume_generation", True, "run/1")


def test_a_tpot_target_set_at_run_time_reaches_the_gate_and_none_brings_the_first_one_back(
    page: StatusPage,
) -> None:
    scheduler = bare(RolloutScheduler, Role.ROLLOUT, page)
    scheduler._profile_command = ProfileCommand.NONE
    control: Any = EngineControl(Client(), EngineSettings(role=Role.ROLLOUT, engine_id="e"), "m")  # type: ignore[arg-type]
    targets = []
    for target_ms in (40.0, None):
        control.set_gate(GateMode.DUAL, target_ms)
        scheduler._obey_commands()
        targets.append((scheduler._gate.settings.tpot_target_s, page.get(Field.TPOT_TARGET_US)))
    assert targets == [(0.04, 40_000), (None, 0)]
    with pytest.raises(ConfigError, match="tpot_target_ms is 200, above slo_tpot_ms of 150"):
        control.set_gate(GateMode.DUAL, 200.0)


def test_a_gate_mode_without_its_objective_is_refused_while_the_engine_runs(page: StatusPage) -> None:
    settings = EngineSettings(role=Role.SERVING, engine_id="e").deployed(Deployment.PREFILL)
    control: Any = EngineControl(Client(), settings, "m")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="a prefiller makes no tokens that could be late"):
        control.set_gate(GateMode.TPOT_ONLY)
    assert page.get(Field.WANTED_GATE_MODE) == -1
    control.set_gate(GateMode.TTFT_ONLY)
    assert page.get(Field.WANTED_GATE_MODE) == GATE_MODES.index(GateMode.TTFT_ONLY)


def test_a_serving_engine_tells_rollouts_how_long_a_step_its_deployment_puts_up_with(
    page: StatusPage, words: Words
) -> None:
    scheduler = bare(ServingScheduler, Role.SERVING, page)
    scheduler._side, rollout = ServingSide(words), RolloutSide(words)
    longest_s = []
    for deployment in (Deployment.COLLOCATED, Deployment.DECODE):
        scheduler.set_gate(scheduler.rose.deployed(deployment).gate_settings(GateMode.DUAL))
        longest_s.append(rollout.view().max_step_s)
    assert longest_s == [0.125, 0.075]


@pytest.mark.parametrize("num_steps", [0, NUM_STEPS])
def test_a_profile_that_can_not_be_made_or_stored_leaves_the_model_as_it_was(
    tmp_path: Path, num_steps: int
) -> None:
    (tmp_path / "file").touch()
    recorder = StepRecorder(KEY, tmp_path / "file" / "profiles")
    recorder.begin_profile()
    run_steps(recorder, num_steps, seconds_per_token=0.01)
    model = recorder.model
    assert not recorder.finish_profile()
    assert recorder.model == model and (num_steps > 0 or model == UNPROFILED)


def test_an_slo_below_the_profile_ends_the_start_and_is_logged_where_the_profile_is_new(
    page: StatusPage, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("rose"), "propagate", True)  # not where the plugin was registered
    scheduler = bare(ServingScheduler, Role.SERVING, page)
    scheduler.rose = EngineSettings(role=Role.SERVING, slo_ttft_ms=50)
    scheduler.recorder, scheduler._memory = StepRecorder(KEY, tmp_path), None
    scheduler.set_gate(scheduler.rose.gate_settings(GateMode.DUAL))
    scheduler._check_slo()  # nothing is known yet
    scheduler.recorder.begin_profile()
    run_steps(scheduler.recorder, NUM_STEPS, seconds_per_token=0.1)
    assert scheduler.recorder.finish_profile()
    reachable = "slo_ttft_ms is 50, but the prefill of one token takes up to 1"
    with pytest.raises(ConfigError, match=reachable):
        scheduler._check_slo()
    scheduler.after_profile()
    assert reachable in caplog.text
    # A decoder has no first token to be in time for.
    scheduler.set_gate(scheduler.rose.deployed(Deployment.DECODE).gate_settings(GateMode.DUAL))
    scheduler._check_slo()


def test_a_paused_engine_stalls_nobody_and_asks_for_no_turn(page: StatusPage, words: Words) -> None:
    scheduler = bare(RolloutScheduler, Role.ROLLOUT, page)
    scheduler._stalls, scheduler._side = StallTracker(1000.0), RolloutSide(words)
    scheduler._side.set_want(True)
    scheduler._stalls.observe({"a"}, time.monotonic())
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert words.load(Word.R_WANT) == 0
    assert scheduler._stalls.stalled(time.monotonic() + 5000) == ()
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert scheduler._stalls.stalled(time.monotonic() + 500) == ()
    assert scheduler._stalls.stalled(time.monotonic() + 1001) == ("a",)


def test_a_rollout_engine_whose_gate_goes_off_asks_for_no_more_turns(page: StatusPage, words: Words) -> None:
    scheduler = bare(RolloutScheduler, Role.ROLLOUT, page)
    scheduler._side = RolloutSide(words)
    scheduler._side.set_want(True)
    scheduler.set_gate(scheduler.rose.gate_settings(GateMode.OFF))
    assert words.load(Word.R_WANT) == 0


class Waits(RolloutSide):
    """No turn comes; after some waits there is input for the engine's loop."""

    def __init__(self, words: Words, input_queue: "queue.Queue[None]", num_waits: int) -> None:
        super().__init__(words)
        self._input, self._left = input_queue, num_waits

    def wait_grant(self, timeout_s: float = 0.0) -> bool:
        assert self._left > 0, "one wait too many"
        self._left -= 1
        if self._left == 0:
            self._input.put(None)
        return super().wait_grant(0.0)


def test_an_engine_without_a_turn_sleeps_until_something_wants_its_loop(
    page: StatusPage, words: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_scheduler, "PATIENT_WAIT_S", 3600.0)
    ServingSide(words).begin_step()
    scheduler = bare(RolloutScheduler, Role.ROLLOUT, page)
    scheduler._ended, scheduler.tenant = [], None
    scheduler.kv_cache_manager = SimpleNamespace(block_pool=SimpleNamespace(kv_event_queue=[]))
    scheduler._input_queue, scheduler._must_step = queue.Queue(), False
    assert not scheduler._await_grant(Waits(words, scheduler._input_queue, num_waits=3))
    scheduler._input_queue, scheduler._must_step = queue.Queue(), True  # a cut, told before it began to wait
    assert not scheduler._await_grant(Waits(words, queue.Queue(), num_waits=1))
    scheduler._input_queue, scheduler._must_step = None, False
    assert not scheduler._await_grant(Waits(words, queue.Queue(), num_waits=1))


def test_an_idle_gpu_takes_shorter_steps_once_a_request_asked_for_a_tighter_ttft(
    page: StatusPage,
    words: Words,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("rose"), "propagate", True)  # not where the plugin was registered
    scheduler = bare(ServingScheduler, Role.SERVING, page)
    scheduler.recorder = StepRecorder(KEY, tmp_path)
    scheduler.set_gate(scheduler.rose.gate_settings(GateMode.DUAL))
    scheduler._side, rollout = ServingSide(words), RolloutSide(words)

    def longest_step_s(ttft_ms: float) -> float:
        params = SimpleNamespace(extra_args={"rose_ttft_ms": ttft_ms})
        request = SimpleNamespace(
            request_id="r", num_prompt_tokens=9, kv_transfer_params=None, sampling_params=params
        )
        scheduler._track(request, 0.0)
        return rollout.view().max_step_s

    assert [longest_step_s(ttft_ms) for ttft_ms in (500.0, 100.0, 300.0)] == [0.125, 0.025, 0.025]
    scheduler.recorder.begin_profile()
    run_steps(scheduler.recorder, NUM_STEPS, seconds_per_token=0.01)
    assert scheduler.recorder.finish_profile()
    assert [longest_step_s(1.0) for _ in range(2)] == [0.025, 0.025]
    assert caplog.text.count("slo_ttft_ms is 1, but the prefill of one token takes up to") == 1


def test_a_serving_engine_whose_gate_goes_off_leaves_rollout_free(page: StatusPage, words: Words) -> None:
    scheduler = bare(ServingScheduler, Role.SERVING, page)
    scheduler._side, rollout = ServingSide(words), RolloutSide(words)
    scheduler._side.publish(ServingView(has_work=True, has_pending_prefill=False, latest_start_s=NEVER))
    assert not rollout.view().may_start
    scheduler.set_gate(scheduler.rose.gate_settings(GateMode.OFF))
    assert words.load(Word.S_STATE) == EngineState.IDLE and rollout.view().may_start
