"""The engine cores of data-parallel ranks, as the API server before them sees and commands them."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from lone_schedulers import ENGINE_ID, POOL, lone_scheduler
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core_client import DPLBAsyncMPClient
from vllm.v1.request import Request

from rose.admission.board import is_arrival_pending
from rose.engine.hooks.patches import report_chosen_cores
from rose.engine.http.control import ServedEngine
from rose.engine.http.cores import EngineCores
from rose.engine.scheduling.scheduler import GATE_MODES
from rose.engine.settings import EngineSettings
from rose.engine.status import Field
from rose.errors import ConfigError, WorkerError
from rose.memory.daemon.daemon import start_daemon
from rose.messages import WeightUpdate
from rose.types import GateMode, Role

SETTINGS = EngineSettings(role=Role.SERVING, engine_id=ENGINE_ID, pool=POOL)


class Balancer(DPLBAsyncMPClient):  # type: ignore[misc]
    """vLLM's client of two engine cores, with what its choice of a core needs, and answers of its own."""

    def __init__(self) -> None:
        self.core_engines = [b"0", b"1"]
        self.client_count, self.eng_start_index = 1, 0
        self.lb_engines = [[0, 0, 0.0], [0, 0, 0.0]]
        self.reqs_in_flight: dict[str, Any] = {}
        self.engine_inflight = Counter[Any]()
        self.hashes = {b"0": "a", b"1": "a"}
        self.newest = dict(self.hashes)
        """The weights that each core finds when it loads again."""
        self.asked: dict[str, list[bytes]] = defaultdict(list)
        self.outputs_queue = asyncio.Queue[Any]()

    async def pause_scheduler_async(self, **_: object) -> None:
        """There are no steps."""

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        assert method == "collective_rpc"
        self.asked[args[0]].append(engine)
        if args[0] == "load_newest_weights":
            self.hashes[engine] = self.newest[engine]
        if args[0] == "loaded_weights":
            return [(None, None, None)]
        if args[0] == "device_use":
            return [(None, 0)]
        return [self.hashes[engine]]


class Client:
    """An engine whose updates fail."""

    output_processor = SimpleNamespace(request_states={})
    is_running = False  # there are no outputs to process
    vllm_config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=2), model_config=SimpleNamespace(is_moe=False)
    )

    def __init__(self) -> None:
        self.engine_core = Balancer()

    async def update_weights(self, _: Any) -> None:
        raise WorkerError("a rank is full")

    def __getattr__(self, name: str) -> Any:
        async def call(*_: object, **__: object) -> bool:
            return True

        return call


@pytest.fixture
def schedulers(runtime_dir: Path, tmp_path: Path) -> Iterator[list[Any]]:
    """Those of two data-parallel ranks."""
    with ExitStack() as undo:
        made = []
        for rank in range(2):
            pool = SETTINGS.of_rank(rank).pool
            assert pool is not None
            undo.enter_context(start_daemon(pool, num_slabs=8, slab_bytes=1 << 20, headroom_slabs=1))
            scheduler = lone_scheduler(tmp_path, Role.SERVING, rank=rank, pool=POOL, gate=GateMode.DUAL)
            made.append(undo.enter_context(scheduler))
        yield made


def request(name: str) -> Request:
    return Request(name, [1] * 9, SamplingParams(max_tokens=1), None)


def to_core(given: Request) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=given.request_id,
        prompt_token_ids=given.prompt_token_ids,
        mm_features=None,
        sampling_params=given.sampling_params,
        pooling_params=None,
        arrival_time=given.arrival_time,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def test_an_arrival_keeps_the_gpu_of_the_rank_that_gets_it_and_of_no_other(schedulers: list[Any]) -> None:
    client: Any = Client()
    cores = EngineCores(client, SETTINGS, 2)

    def pending() -> list[bool]:
        """At the moment of the announcement, however long ago that is."""
        now_ns = 0
        return [is_arrival_pending(core.board, [0], now_ns) for core in cores if core.board is not None]

    assert pending() == [False, False]
    cores.announce_arrival()
    assert pending() == [True, True]
    given = request("r")
    chosen = client.engine_core.get_core_engine_for_request(to_core(given))
    rank = client.engine_core.core_engines.index(chosen)
    assert pending() == [index == rank for index in range(2)]
    schedulers[rank].add_request(given)
    assert pending() == [False, False]


def test_the_status_is_the_sum_of_the_ranks_and_commands_reach_all(schedulers: list[Any]) -> None:
    client: Any = Client()
    control = ServedEngine(client, SETTINGS, "m", num_ranks=2)
    for name in ("a", "b", "c"):
        schedulers[1].add_request(request(name))
    control.set_gate(GateMode.OFF)
    for scheduler in schedulers:
        scheduler.schedule()
    status = control.status()
    assert status.num_running + status.num_waiting == 3
    assert [rank.num_running + rank.num_waiting for rank in status.ranks] == [0, 3]
    assert status.kv_slabs_owned == sum(rank.kv_slabs_owned for rank in status.ranks)
    owned = [scheduler.tenant.num_owned for scheduler in schedulers]
    assert [rank.kv_slabs_owned for rank in status.ranks] == owned
    assert status.serving_kv_usage == sum(rank.serving_kv_usage or 0.0 for rank in status.ranks) / 2
    modes = [scheduler.page.get(Field.GATE_MODE) for scheduler in schedulers]
    assert modes == 2 * [GATE_MODES.index(GateMode.OFF)]


@pytest.mark.parametrize("second", ["a", "b"])
async def test_ranks_with_weights_of_two_versions_compute_no_step(
    schedulers: list[Any], staged: dict[str, Any], second: str
) -> None:
    client: Any = Client()
    client.engine_core.hashes[b"1"] = second
    control = ServedEngine(client, SETTINGS, "m", num_ranks=2)
    with pytest.raises(WorkerError, match="a rank is full"):
        await control.apply_weights(WeightUpdate(version="run/1", **staged))
    asked = client.engine_core.asked
    assert asked["give_up_weights"] == ([b"0", b"1"] if second == "b" else [])
    assert asked["end_weight_update"] == [b"0", b"1"]


@pytest.mark.parametrize("newest", ["b", "c"])
@pytest.mark.slow
async def test_ranks_that_woke_up_with_two_versions_take_no_turns_until_they_have_one(
    schedulers: list[Any], newest: str
) -> None:
    client: Any = Client()
    client.engine_core.hashes[b"1"] = "b"
    client.engine_core.newest = {b"0": "b", b"1": newest}
    control: Any = ServedEngine(client, SETTINGS, "m", num_ranks=2)
    control._activation.is_active = False
    if newest == "b":
        assert (await control.activate()).is_active
    else:
        with pytest.raises(WorkerError, match="ranks loaded weights of two versions: activate it again"):
            await control.activate()
    assert control.is_active is (newest == "b")
    assert client.engine_core.asked["load_newest_weights"] == [b"0", b"1"]


def test_a_vllm_that_chooses_ranks_elsewhere_is_not_supported() -> None:
    with pytest.raises(ConfigError, match=r"vLLM has no object.get_core_engine_for_request"):
        report_chosen_cores(object(), lambda *_: None)
