"""LoRA adapters on a real engine, from the trainer's publisher over the relay: each turn has one version's
answer, several runs share the base model, and an adapter that does not fit changes nothing."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from forked_server import ForkedServer
from mirrored import Mirrored
from probes import PROBE_TOKENS, ROLLOUT_TOKENS, SERVING_TOKENS, probes, prompt, wave_prompts
from real_engine import Answer, RealEngine, runtime_dir, until
from references import ModelDirs
from relay_process import RelayProcess
from safetensors.torch import load_file, save_file
from shared_gpu import HEADROOM_SLABS, NUM_SLABS, SETTINGS, LedgerLog
from tiny_adapters import (
    RANK,
    Tensors,
    adapter_config,
    adapter_tensors,
    adapter_update,
    load_missing,
    misfits,
    save_adapter,
)
from tiny_models import BLOCK_TOKENS, MAX_MODEL_LEN, SLAB_BYTES

from rose.engine.stock import STOCK_ENV
from rose.memory.daemon.daemon import start_daemon
from rose.memory.pool.pool import PoolClient
from rose.node.control import completion_body
from rose.node.processes import ServerProcess
from rose.scheduler.rollout.http.command import RunningRouter
from rose.scheduler.rollout.router_config import RouterConfig, WorkerSpec
from rose.transfer.adapters.publisher import AdapterPublisher
from rose.transfer.format.manifest import worker_name
from rose.types import GateMode, Role, StopReason

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

POOL = "adapters"
SEEDS = {"a/0": 1, "a/1": 2, "b/0": 3}
LONG = prompt("long", BLOCK_TOKENS + 30)
LONG_TOKENS = 850
WAIT_S = 300.0
WAVE = wave_prompts(Role.ROLLOUT, 0)[:6]
"""With a burst of serving's they want more than the pool has."""
NUM_MOVES = 60
PAUSES = 20
"""A machine that stalls may let a long turn end before the engine is paused, but hardly so often."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def expected(folder: Path, models: ModelDirs) -> Iterator["Expected"]:
    answers = Expected(folder, models)
    yield answers
    answers.close()


def _changed_model(folder: Path, model: Path) -> Path:
    """A model of which one matrix is another one: so little changes in place."""
    shutil.copytree(model, folder, dirs_exist_ok=True)
    save_file(_changed_tensors(model), folder / "model.safetensors", {"format": "pt"})
    return folder


def _changed_tensors(model: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(model / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"] *= -1
    return tensors


class Expected:
    """What stock vLLM answers offline: two versions of the base model, and versions of adapters on them."""

    def __init__(self, folder: Path, models: ModelDirs) -> None:
        bases = {"base": models.untied[0], "base/1": _changed_model(folder / "changed", models.untied[0])}
        adapters = {
            name: save_adapter(folder / name.replace("/", "@"), adapter_tensors(seed), adapter_config("tiny"))
            for name, seed in SEEDS.items()
        }
        more = {"a/0": [LONG, *WAVE], "a/1": WAVE}
        self._prompts = {name: [*probes(), *more.get(name, [])] for name in (*bases, *adapters)}
        self._prompts["b/0 on base/1"] = probes()
        jobs = [self._job(base, {name: None}) for name, base in bases.items()]
        # One engine for all adapters of a model: each prompt has its own.
        jobs.append(self._job(bases["base"], dict(adapters)))
        jobs.append(self._job(bases["base/1"], {"b/0 on base/1": adapters["b/0"]}))
        self._answers = folder / "answers.json"
        (folder / "jobs.json").write_text(json.dumps(jobs))
        argv = [sys.executable, "-m", "rose.engine.stock", str(folder / "jobs.json"), str(self._answers)]
        server = ServerProcess(argv, "stock", folder / "stock.log", env=STOCK_ENV)
        self._process = ForkedServer(server).start()

    def _job(self, model: Path, adapters: Mapping[str, Path | None]) -> dict[str, Any]:
        """``adapters``: by the name of its answers the adapter, or none."""
        asked = [(each, adapter) for name, adapter in adapters.items() for each in self._prompts[name]]
        prompts = [each for each, _ in asked]
        tokens = [self._tokens(each) for each in prompts]
        job = {"model": str(model), "prompts": prompts, "max_tokens": tokens, "dtype": "float32"}
        folders = [str(adapter) for _, adapter in asked if adapter is not None]
        return {**job, "max_model_len": MAX_MODEL_LEN, "batched": False, "adapters": folders}

    @staticmethod
    def _tokens(turn: Sequence[int]) -> int:
        if turn == LONG:
            return LONG_TOKENS
        return ROLLOUT_TOKENS if turn in WAVE else PROBE_TOKENS

    def of(self, name: str) -> dict[tuple[int, ...], list[int]]:
        """What the prompts of ``name`` are answered with. Waits until the process has ended."""
        assert self._process.wait(1200.0) == 0, self._process.log_tail()
        answers = iter([each for job in json.loads(self._answers.read_text()) for each in job])
        found = {
            each: {tuple(turn): next(answers)["tokens"] for turn in prompts}
            for each, prompts in self._prompts.items()
        }
        return found[name]

    def close(self) -> None:
        self._process.stop()


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["two ranks", "in a pool", "two stages in a pool"])
def num_stages(request: pytest.FixtureRequest) -> int:
    """Of the pipeline in a pool; 0 for two tensor-parallel ranks without a pool."""
    stages: int = request.param
    return stages


@pytest.fixture(scope="module")
def engine(num_stages: int, engines_dir: Path, models: ModelDirs, expected: Expected) -> Iterator[RealEngine]:
    lora = ("--enable-lora", "--max-loras", "8", "--max-lora-rank", str(RANK))
    flags: tuple[str, ...] = ("--dtype", "float32", *lora)
    settings: dict[str, Any] = {}
    if num_stages:
        flags += ("--pipeline-parallel-size", str(num_stages))
        settings = {"pool": POOL, "gate": GateMode.OFF, **SETTINGS}
    else:
        flags += ("--tensor-parallel-size", "2")
    with start_daemon(
        POOL,
        num_slabs=NUM_SLABS,
        num_shards=max(num_stages, 1),
        slab_bytes=SLAB_BYTES // max(num_stages, 1),
        headroom_slabs=HEADROOM_SLABS,
        runtime_dir=runtime_dir(engines_dir),
    ):
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("VLLM_SERVER_DEV_MODE", "1")  # for vLLM's routes that pause an engine
            started = RealEngine(models.untied[0], Role.ROLLOUT, engines_dir, *flags, **settings)
        try:
            yield started.wait_ready()
        finally:
            started.stop()


@pytest.fixture(scope="module")
def relay_url(engine: RealEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The relay of runs a and b, which a subscriber follows for the engine."""
    folder = tmp_path_factory.mktemp("subscriber")
    relay = RelayProcess("embedded")
    url = relay.emptied_url()
    argv = [
        *(sys.executable, "-m", "rose.transfer.adapters.subscriber", "--relay", url),
        *("--adapter", "a", "--adapter", "b", "--worker", engine.url, "--staging", str(folder / "staged")),
    ]
    with (folder / "subscriber.log").open("wb") as log:
        subscriber = subprocess.Popen(argv, stdout=log, stderr=log)
    yield url
    subscriber.terminate()
    subscriber.wait()
    relay.stop()


class Trainer:
    """Publishes one run, whose tensors it changes in place."""

    def __init__(self, run: str, relay_url: str, engine: RealEngine) -> None:
        self._run, self._worker = run, worker_name(engine.url)
        self._tensors = {name: torch.from_numpy(each) for name, each in self._of(0).items()}
        config = adapter_config("somewhere/else")
        self._publisher = AdapterPublisher(
            self._tensors, relay_url, run, config=config, base="tiny", dtype="float32"
        )

    def _of(self, number: int) -> Tensors:
        return adapter_tensors(SEEDS[f"{self._run}/{number}"])

    def publish(self, number: int) -> None:
        """Returns when the engine has acknowledged the version."""
        for name, each in self._of(number).items():
            self._tensors[name].copy_(torch.from_numpy(each))
        version = self._publisher.publish().version
        assert version.number == number
        self._publisher.wait_acked(version, [self._worker], WAIT_S)

    def close(self) -> None:
        self._publisher.close()


def test_turns_get_the_newest_version_of_their_run_and_keep_it_to_their_end(
    engine: RealEngine, relay_url: str, expected: Expected
) -> None:
    a, b = Trainer("a", relay_url, engine), Trainer("b", relay_url, engine)
    a.publish(0)
    b.publish(0)
    assert sorted(engine.status().adapters or ()) == ["a/0", "b/0"]
    _check(engine, expected, {"tiny": "base", "a": "a/0", "b": "b/0"})

    with ThreadPoolExecutor(1) as threads:
        with _long_turn(engine, threads) as long:
            a.publish(1)
            assert not long.done() and _listed(engine) >= {"a@0", "a@1"}
        cached = [engine.complete(probes()[1], PROBE_TOKENS, model="a").num_cached_tokens for _ in range(2)]
        assert cached == [0, BLOCK_TOKENS], "KV of a@0 is none of a@1's"
        assert long.result().tokens == expected.of("a/0")[tuple(LONG)]
    _check(engine, expected, {"a": "a/1", "tiny": "base", "b": "b/0"})
    until(lambda: _listed(engine) == {"tiny", "a@1", "b@0"}, "the old version is unloaded")
    _check(engine, expected, {"b": "b/0", "a": "a/1", "tiny": "base"})
    a.close()
    b.close()


@contextmanager
def _long_turn(engine: RealEngine, threads: Executor) -> Iterator[Future[Answer]]:
    """A turn of run a that has begun and not ended; the engine is paused between two of its steps."""
    for _ in range(PAUSES):
        made_before = engine.status().generated_tokens
        long = threads.submit(engine.complete, LONG, LONG_TOKENS, model="a")
        until(lambda: engine.status().generated_tokens >= made_before + 2, "the long turn runs")  # noqa: B023
        with _paused(engine):
            if not long.done():
                yield long
                return
    raise AssertionError(f"{PAUSES} long turns had ended before the engine was paused")


@contextmanager
def _paused(engine: RealEngine) -> Iterator[None]:
    """Between two steps; no request is lost."""
    call = partial(httpx.post, timeout=WAIT_S, trust_env=False)
    call(f"{engine.url}/pause", params={"mode": "keep"}).raise_for_status()
    try:
        yield
    finally:
        call(f"{engine.url}/resume").raise_for_status()


async def test_a_router_says_which_version_answered(
    engine: RealEngine, expected: Expected, tmp_path: Path
) -> None:
    load_missing(engine, tmp_path, ("a/1", "b/0"), SEEDS)
    config = RouterConfig(port=0, workers=(WorkerSpec(url=engine.url),))
    async with RunningRouter(config) as router, httpx.AsyncClient(base_url=router.url) as client:
        (worker,) = router.plane.registry.workers()
        async with asyncio.timeout(WAIT_S):
            while not worker.adapters:
                await asyncio.sleep(0.05)
        for model, version in (("a", "a/1"), ("b", "b/0"), ("tiny", None)):
            for turn in probes():
                body = {**completion_body(model, turn, PROBE_TOKENS), "return_token_ids": True}
                answer = (await client.post("/v1/completions", json=body, timeout=WAIT_S)).json()
                (span,) = answer["choices"][0]["rose"]["spans"]
                assert (answer["model"], span["weight_version"]) == (model, version)
                wanted = expected.of(version if version is not None else "base")
                assert answer["choices"][0]["token_ids"] == wanted[tuple(turn)]


def test_an_adapter_that_does_not_fit_is_refused_with_names_and_numbers_and_changes_nothing(
    engine: RealEngine, tmp_path: Path, expected: Expected
) -> None:
    good = save_adapter(tmp_path / "good", adapter_tensors(SEEDS["a/0"]), adapter_config("tiny"))
    assert engine.post("adapters", adapter_update(good, "c/0").model_dump()).status_code == 200
    before = engine.status().adapters, _listed(engine)
    for name, (given, config, message) in misfits().items():
        bad = save_adapter(tmp_path / name, given, config)
        answer = engine.post("adapters", adapter_update(bad, "c/1").model_dump())
        assert (answer.status_code, message in answer.text) == (422, True), (name, answer.text)
    wrong = adapter_update(good, "c/1").model_copy(update={"state_hash": "0" * 32})
    assert "adapter not loaded" in engine.post("adapters", wrong.model_dump()).text
    assert (engine.status().adapters, _listed(engine)) == before
    _check(engine, expected, {"c": "a/0"})


def test_answers_of_adapters_stay_equal_while_slabs_move_and_versions_change(
    engine: RealEngine,
    num_stages: int,
    engines_dir: Path,
    models: ModelDirs,
    tmp_path: Path,
    expected: Expected,
) -> None:
    """Serving bursts take most of the rollout engine's slabs. Reclaimed turns count as far as they came."""
    if not num_stages:
        pytest.skip("without a pool no slab moves")
    versions = ("a/0", "a/1")
    saved = [
        save_adapter(tmp_path / str(n), adapter_tensors(SEEDS[each]), adapter_config("tiny"))
        for n, each in enumerate(versions)
    ]
    flags = ("--dtype", "float32", "--pipeline-parallel-size", str(num_stages))
    settings: dict[str, Any] = {"pool": POOL, "gate": GateMode.OFF, **SETTINGS}
    burst = [each for wave in range(2) for each in wave_prompts(Role.SERVING, wave)][:8]
    serving = RealEngine(models.serving, Role.SERVING, engines_dir, *flags, **settings)
    number = 0
    try:
        serving.wait_ready()
        with (
            PoolClient.observe(POOL, runtime_dir=runtime_dir(engines_dir)) as pool,
            LedgerLog(pool.ledger) as log,
        ):
            while log.num_moves < NUM_MOVES:
                update = adapter_update(saved[number % 2], f"d/{number}").model_dump()
                until(lambda: engine.post("adapters", update).status_code == 200, "a place")  # noqa: B023
                turns = engine.start_requests(WAVE, ROLLOUT_TOKENS, model="d")
                for request in serving.start_requests(burst, SERVING_TOKENS):
                    assert request.result().finish_reason == "length"
                wanted = expected.of(versions[number % 2])
                for given, turn in zip(WAVE, turns, strict=True):
                    answer = turn.result()
                    assert answer.finish_reason == "length" or answer.stop_reason in set(StopReason)
                    assert answer.tokens == wanted[tuple(given)][: len(answer.tokens)], number
                number += 1
                until(lambda: pool.ledger.serving_reserve_slabs == 0, "serving's recent peak has passed")
                engine.begin_rl_step(number)
            pool.ledger.check_integrity()
    finally:
        serving.stop()
    assert number > 2

    def come_whole() -> bool:
        """Whether no turn has stalled, as some do on a machine that stands still for a few seconds."""
        alone = [turn.result() for turn in engine.start_requests(WAVE, ROLLOUT_TOKENS, model="d")]
        for given, answer in zip(WAVE, alone, strict=True):
            assert answer.tokens == wanted[tuple(given)][: len(answer.tokens)]
        return all(answer.finish_reason == "length" for answer in alone)

    until(come_whole, "turns beside no serving engine come whole")


def test_adapters_stay_when_the_base_model_changes_in_place_or_leaves_the_device_for_a_while(
    engine: RealEngine, models: ModelDirs, expected: Expected, tmp_path: Path
) -> None:
    load_missing(engine, tmp_path, ("b/0",), SEEDS)
    mirrored = Mirrored(tmp_path / "mirror")
    for tensors in (load_file(models.untied[0] / "model.safetensors"), _changed_tensors(models.untied[0])):
        updated = engine.update_weights(mirrored.put(tensors))
        assert updated.status_code == 200, updated.text
    status = engine.status()
    counts = (status.weights_whole, status.weights_in_place)
    assert (status.weight_version, counts) == ("test/1", (1, 1)), status.whole_because
    _check(engine, expected, {"tiny": "base/1", "b": "b/0 on base/1"})
    engine.deactivate()
    came = save_adapter(tmp_path / "came", adapter_tensors(SEEDS["b/0"]), adapter_config("tiny"))
    kept = engine.post("adapters", adapter_update(came, "e/0").model_dump())
    assert kept.status_code == 200, kept.text
    assert "e@0" not in _listed(engine)
    engine.activate()
    assert {"b/0", "e/0"} <= set(engine.status().adapters or ())
    _check(engine, expected, {"b": "b/0 on base/1", "e": "b/0 on base/1", "tiny": "base/1"})
    mirrored.close()


def _check(engine: RealEngine, expected: Expected, models: Mapping[str, str]) -> None:
    for model, version in models.items():
        for turn in probes():
            answer = engine.complete(turn, PROBE_TOKENS, model=model)
            assert answer.tokens == expected.of(version)[tuple(turn)], (model, version, len(turn))


def _listed(engine: RealEngine) -> set[str]:
    return {card["id"] for card in engine.models()}
