"""What commands do between an engine's routes and its scheduler, without a worker."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from lone_schedulers import lone_scheduler, pooled_scheduler
from vllm import SamplingParams
from vllm.v1.request import Request, RequestStatus

from rose._shm import Words
from rose.admission.board import BoardWord
from rose.admission.claim import has_work
from rose.admission.gate import ServingView
from rose.admission.profile import ProfileKey
from rose.admission.rollout_side import RolloutSide
from rose.admission.slack import NEVER
from rose.admission.step_time import UNPROFILED
from rose.engine.http import followers
from rose.engine.http.control import ServedEngine
from rose.engine.scheduling.recorder import StepRecorder
from rose.engine.scheduling.scheduler import GATE_MODES, RoseScheduler
from rose.engine.settings import EngineSettings
from rose.engine.status import Field, StatusPage, page_path
from rose.errors import ConfigError, WorkerError
from rose.messages import WeightUpdate, WorkerStatus
from rose.types import Deployment, GateMode, Role

KEY = ProfileKey(
    model="m",
    hardware="h",
    vllm_version="0",
    parallelism="tp1pp1",
    dtype="bfloat16",
    quantization="none",
    kv_dtype="auto",
    graphs="eager",
)
NUM_STEPS = 200
SIZES = [f"{kind}_parallel_size" for kind in ("tensor", "pipeline", "data")]


class Client:
    """An engine that answers at once, without a token."""

    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(model="m", max_model_len=64, get_vocab_size=lambda: 10, is_moe=False),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=32, max_num_seqs=2),
        parallel_config=SimpleNamespace(**dict.fromkeys(SIZES, 1)),
        speculative_config=None,
    )

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[None]:
        await asyncio.sleep(0)
        yield None


def run_steps(recorder: StepRecorder, num_steps: int, seconds_per_token: float) -> None:
    """Prompts of 1 to 50 tokens, one per step."""
    now = 0.0
    for step in range(num_steps):
        num_tokens = 1 + step % 50
        request = SimpleNamespace(num_computed_tokens=num_tokens, num_prompt_tokens=num_tokens)
        output: Any = SimpleNamespace(num_scheduled_tokens={"r": num_tokens}, scheduled_spec_decode_tokens={})
        recorder.started(output, {"r": request}, now)
        now += seconds_per_token * num_tokens
        recorder.ended(now)


@pytest.fixture
def page(runtime_dir: Path) -> Iterator[StatusPage]:
    made = StatusPage(page_path(runtime_dir, "e"), create=True)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def serving(runtime_dir: Path, tmp_path: Path) -> Iterator[Any]:
    with pooled_scheduler(tmp_path, Role.SERVING, gate=GateMode.DUAL) as scheduler:
        yield scheduler


def board(scheduler: Any) -> Words:
    words: Words = scheduler.tenant.client.board_words
    return words


def times_logged(caplog: pytest.LogCaptureFixture, text: str) -> int:
    """Counts a record once, although both vLLM's logger and the root logger may hand it to pytest."""
    return len({id(record) for record in caplog.records if text in record.getMessage()})


async def obey(scheduler: RoseScheduler) -> None:
    while True:
        scheduler.schedule()
        await asyncio.sleep(0)


async def test_profiles_at_once_leave_the_gate_as_it_was_and_one_without_steps_is_an_error(
    runtime_dir: Path, tmp_path: Path
) -> None:
    with lone_scheduler(tmp_path, Role.ROLLOUT, gate=GateMode.DUAL) as scheduler:
        control: Any = ServedEngine(Client(), EngineSettings(role=Role.ROLLOUT, engine_id="e"), "m")
        obeying = asyncio.create_task(obey(scheduler))
        first = asyncio.create_task(control.profile())
        while scheduler.page.get(Field.GATE_MODE) != GATE_MODES.index(GateMode.OFF) and not first.done():
            await asyncio.sleep(0)
        for profile in (first, asyncio.create_task(control.profile())):
            with pytest.raises(WorkerError, match="could not make a profile"):
                await profile
        obeying.cancel()
        scheduler.schedule()
        assert scheduler.page.get(Field.GATE_MODE) == GATE_MODES.index(GateMode.DUAL)


class UpdatedClient(Client):
    """Notes at each call whether the engine's status speaks of an update, and of which weights."""

    output_processor = SimpleNamespace(request_states={})
    outputs_queue, is_running = asyncio.Queue[object](), False  # there are no outputs to process

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool, str | None]] = []
        self.status: Callable[[], WorkerStatus]
        self.is_broken, self.engine_core = False, self
        self.problem: str | None = None
        self.why_whole: str | None = None
        self.stale_drafter: str | None = None
        self.loaded: str | None = None
        self.was_active: list[bool] = []
        self.asked: list[tuple[str, bool]] = []
        self.resets: list[bool | Exception] = []  # results of the next ones; those after them succeed

    async def collective_rpc(self, method: str, args: tuple[object, ...] = ()) -> list[object]:
        """Two ranks; the second one takes for as long to prepare as it takes to be asked twice."""
        self.asked.append((method, self.status().is_updating))
        known: dict[str, list[object]] = {"begin_weight_changes": [None, None], "device_use": [(None, 0)]}
        if method in known:
            return known[method]
        if method == "loaded_weights":
            self.was_active.append(self.status().is_active)
            return [(self.loaded, None, None), (None, self.why_whole, self.stale_drafter)]
        return [(True, None), (self.asked.count((method, False)) != 1, self.problem)]

    async def reset_prefix_cache(self, **_: object) -> bool:
        self._see("reset_prefix_cache")
        result = self.resets.pop(0) if self.resets else True
        if isinstance(result, Exception):
            raise result
        return result

    def _see(self, name: str) -> None:
        status = self.status()
        self.seen.append((name, status.is_updating, status.weight_version))

    def names(self) -> list[str]:
        return [name for name, *_ in self.seen]

    def __getattr__(self, name: str) -> Callable[..., Awaitable[None]]:
        async def call(*_: object, **__: object) -> None:
            self._see(name)
            if self.is_broken and name == "update_weights":
                raise WorkerError("no such weights")

        return call


@pytest.fixture
def updated(page: StatusPage) -> tuple[UpdatedClient, Any]:
    client = UpdatedClient()
    control = ServedEngine(client, EngineSettings(role=Role.ROLLOUT, engine_id="e"), "m")
    client.status = control.status
    return client, control


async def test_an_update_is_told_before_steps_are_held_back_and_its_version_before_they_go_on(
    updated: tuple[UpdatedClient, Any], staged: dict[str, Any]
) -> None:
    client, control = updated
    await control.apply_weights(WeightUpdate(version="run/1", changes=["c"], **staged))
    # The engine runs on meanwhile.
    assert client.asked[:3] == [("begin_weight_changes", False)] + 2 * [("weight_changes_result", False)]
    assert client.seen[0] == ("pause_scheduler_async", True, None)
    assert client.seen[-1] == ("resume_generation", True, "run/1")
    assert (control.status().is_updating, control.status().weight_version) == (False, "run/1")
    client.is_broken = True
    with pytest.raises(WorkerError, match="no such weights"):
        await control.apply_weights(WeightUpdate(version="run/2", **staged))
    assert client.seen[-1] == ("resume_generation", True, "run/1")
    assert (control.status().is_updating, control.status().weight_version) == (False, "run/1")


async def test_a_failed_update_that_left_other_weights_drops_the_kv_and_tells_their_version(
    updated: tuple[UpdatedClient, Any], staged: dict[str, Any]
) -> None:
    client, control = updated
    client.is_broken, client.loaded = True, "run/3"
    with pytest.raises(WorkerError, match="no such weights"):
        await control.apply_weights(WeightUpdate(version="run/2", **staged))
    assert client.names()[1:3] == ["reset_prefix_cache", "start_weight_update"]
    assert client.seen[-1] == ("resume_generation", True, "run/3")
    assert client.asked[0] == ("end_weight_update", True)


@pytest.mark.parametrize("result", [False, RuntimeError("a request waits for remote KV")])
async def test_weights_change_only_once_no_kv_of_the_old_ones_is_left(
    updated: tuple[UpdatedClient, Any], staged: dict[str, Any], result: bool | Exception
) -> None:
    """Loads of a connector go on in between, and the engine is paused again."""
    client, control = updated
    client.resets = 2 * [result]
    await control.apply_weights(WeightUpdate(version="run/1", **staged))
    again = ["pause_generation", "pause_scheduler_async", "reset_prefix_cache"]
    changed = ["start_weight_update", "update_weights", "finish_weight_update", "resume_generation"]
    assert client.names() == ["pause_scheduler_async", "reset_prefix_cache", *again, *again, *changed]


async def test_kv_that_stays_leaves_the_engine_on_its_old_weights(
    updated: tuple[UpdatedClient, Any], staged: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rose.engine.http.control.KV_DROPPED_WITHIN_S", 0.0)
    client, control = updated
    await control.apply_weights(WeightUpdate(version="run/1", **staged))
    client.seen.clear()
    client.resets.extend([False] * 100)
    with pytest.raises(WorkerError, match="old weights stay in use, because their KV is left: the KV conn"):
        await control.apply_weights(WeightUpdate(version="run/2", **staged))
    assert "start_weight_update" not in client.names()
    assert client.seen[-1] == ("resume_generation", True, "run/1")


async def test_an_activated_engine_knows_its_version_and_its_drafters_state_before_it_takes_turns(
    runtime_dir: Path, tmp_path: Path
) -> None:
    with lone_scheduler(tmp_path, Role.ROLLOUT, gate=GateMode.OFF) as scheduler:
        client = UpdatedClient()
        control: Any = ServedEngine(client, EngineSettings(role=Role.ROLLOUT, engine_id="e"), "m")
        client.status, client.loaded = control.status, "run/3"
        client.stale_drafter = "the run has no tensors for it"
        control._activation.is_active = False
        obeying = asyncio.create_task(obey(scheduler))
        await control.activate()
        obeying.cancel()
    assert client.was_active == [False]
    assert (control.status().is_active, control.status().weight_version) == (True, "run/3")
    assert control.status().stale_drafter == "the run has no tensors for it"


async def test_the_status_tells_why_updates_were_loaded_whole(
    updated: tuple[UpdatedClient, Any], staged: dict[str, Any]
) -> None:
    client, control = updated

    async def why(**update: Any) -> tuple[int, int, str | None]:
        await control.apply_weights(WeightUpdate(version="run/1", **staged, **update))
        status = control.status()
        return status.weights_in_place, status.weights_whole, status.whole_because

    assert await why() == (0, 1, "no changes were given")
    assert await why(changes=["c"]) == (1, 1, "no changes were given")
    assert await why(whole_because="it is the first") == (1, 2, "it is the first")
    client.problem = "a parameter differs"
    assert await why(changes=["c"]) == (1, 3, "a parameter differs")
    client.problem, client.why_whole = None, "writing failed"
    assert await why(changes=["c"]) == (1, 4, "writing failed")
    assert control.status().stale_drafter is None
    client.stale_drafter = "the run has no tensors for it"
    await why(changes=["c"])
    assert control.status().stale_drafter == "the run has no tensors for it"


async def test_steps_go_on_once_a_router_knows_of_the_new_version(
    updated: tuple[UpdatedClient, Any], staged: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers, "MOST_S", 3600.0)
    client, control = updated
    control.followers.asked("router", (), 3600)
    control.followers.asked("gone", (), 1e-9)
    update = asyncio.create_task(control.apply_weights(WeightUpdate(version="run/1", **staged)))
    while control.status().weight_version != "run/1":
        assert not update.done()
        await asyncio.sleep(0)
    for _ in range(3):
        assert control.status().is_updating and client.seen[-1][0] != "resume_generation"
        control.followers.asked("router", ["run/0"], 3600)
        await asyncio.sleep(0)
    control.followers.asked("router", ["run/1"], 3600)
    await update
    assert client.seen[-1] == ("resume_generation", True, "run/1")


def test_a_tpot_target_set_at_run_time_reaches_the_gate_and_none_brings_the_first_one_back(
    runtime_dir: Path, tmp_path: Path
) -> None:
    targets = []
    with pooled_scheduler(tmp_path, Role.ROLLOUT, gate=GateMode.DUAL) as rollout:
        control: Any = ServedEngine(Client(), EngineSettings(role=Role.ROLLOUT, engine_id="e"), "m")
        for target_ms in (40.0, None):
            control.set_gate(GateMode.DUAL, target_ms)
            rollout.schedule()
            targets.append((rollout._gate.settings.tpot_target_s, rollout.page.get(Field.TPOT_TARGET_US)))
        with pytest.raises(ConfigError, match="tpot_target_ms is 200, above slo_tpot_ms of 150"):
            control.set_gate(GateMode.DUAL, 200.0)
    assert targets == [(0.04, 40_000), (None, 0)]


def test_a_gate_mode_without_its_objective_is_refused_while_the_engine_runs(page: StatusPage) -> None:
    settings = EngineSettings(role=Role.SERVING, engine_id="e").deployed(Deployment.PREFILL)
    control: Any = ServedEngine(Client(), settings, "m")
    with pytest.raises(ConfigError, match="a prefiller makes no tokens that could be late"):
        control.set_gate(GateMode.TPOT_ONLY)
    assert page.get(Field.WANTED_GATE_MODE) == -1
    control.set_gate(GateMode.TTFT_ONLY)
    assert page.get(Field.WANTED_GATE_MODE) == GATE_MODES.index(GateMode.TTFT_ONLY)


def test_a_serving_engine_tells_rollouts_how_long_a_step_its_deployment_puts_up_with(
    serving: Any,
) -> None:
    side, longest_s = RolloutSide(board(serving)), []
    for deployment in (Deployment.COLLOCATED, Deployment.DECODE):
        serving.set_gate(serving.rose.deployed(deployment).gate_settings(GateMode.DUAL))
        longest_s.append(side.view().max_step_s)
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
    runtime_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reachable = "slo_ttft_ms is 50, but the prefill of one token takes up to 1"
    settings: dict[str, Any] = {"gate": GateMode.DUAL, "slo_ttft_ms": 50}
    with pooled_scheduler(tmp_path, Role.SERVING, **settings) as scheduler:  # nothing is known yet
        scheduler.recorder.begin_profile()
        run_steps(scheduler.recorder, NUM_STEPS, seconds_per_token=0.1)
        assert scheduler.recorder.finish_profile()
        scheduler.after_profile()
        assert times_logged(caplog, reachable) == 1
        # A decoder has no first token to be in time for.
        scheduler.set_gate(scheduler.rose.deployed(Deployment.DECODE).gate_settings(GateMode.DUAL))
        scheduler.after_profile()
        assert times_logged(caplog, reachable) == 1
    with (
        pytest.raises(ConfigError, match=reachable),
        pooled_scheduler(tmp_path, Role.SERVING, **settings),
    ):
        pass


def test_an_idle_gpu_takes_shorter_steps_once_a_request_asked_for_a_tighter_ttft(
    serving: Any, caplog: pytest.LogCaptureFixture
) -> None:
    side = RolloutSide(board(serving))

    def longest_step_s(ttft_ms: float) -> float:
        """After a request that asked for this TTFT has come and gone."""
        params = SamplingParams(max_tokens=1, extra_args={"rose_ttft_ms": ttft_ms})
        request = Request(f"r-{ttft_ms}-{time.monotonic_ns()}", [1] * 9, params, None)
        serving.add_request(request)
        serving.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        return side.view().max_step_s

    assert [longest_step_s(ttft_ms) for ttft_ms in (500.0, 100.0, 300.0)] == [0.125, 0.025, 0.025]
    serving.recorder.begin_profile()
    run_steps(serving.recorder, NUM_STEPS, seconds_per_token=0.01)
    assert serving.recorder.finish_profile()
    assert [longest_step_s(1.0) for _ in range(2)] == [0.025, 0.025]
    assert times_logged(caplog, "slo_ttft_ms is 1, but the prefill of one token takes up to") == 1


def test_a_serving_engine_whose_gate_goes_off_leaves_rollout_free(serving: Any) -> None:
    side = RolloutSide(board(serving))
    serving._side.publish(ServingView(has_work=True, has_pending_prefill=False, latest_start_s=NEVER))
    assert not side.view().may_start
    serving.set_gate(serving.rose.gate_settings(GateMode.OFF))
    assert not has_work(board(serving).load(BoardWord.CLAIM)) and side.view().may_start
