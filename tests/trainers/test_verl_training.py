"""verl's own trainer with FSDP2 on the processor: its turns and weights go through ROSE to a real engine."""

import asyncio
import json
import os
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from rose.node.processes import ServerProcess
from rose.ports import free_port
from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.format import manifest as keys
from rose.transfer.publish.chain import read_ack
from rose.transfer.publish.torch_source import load_planes
from rose.transfer.relay.opening import open_relay
from tests.scheduler.rollout.conftest import running_router
from tests.scheduler.rollout.tiny_model import make_tiny_qwen3
from tests.trainers.verl_program import BATCH, NUM_STEPS, RUN, SAMPLES
from tests.transfer.relay_process import RelayProcess

pytest.importorskip("verl.trainer.ppo.v1", reason="verl is not installed (CONTRIBUTING.md)")

pytestmark = [pytest.mark.vllm, pytest.mark.clients, pytest.mark.slow]

READY_S, TRAINED_S = 900.0, 1500.0
HERE = Path(__file__).parent
MODES = ("sync", "colocate_async")


def engine_python() -> str:
    """The interpreter of the environment that vLLM is installed in; verl's has other versions of packages."""
    found = find_spec("vllm")
    assert found is not None and found.origin is not None
    return str(Path(found.origin).parents[4] / "bin" / "python")


def write_prompts(path: Path) -> None:
    from datasets import Dataset

    rows = [
        {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": f"w{number} w{number + 1}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number in range(5, 5 + BATCH * NUM_STEPS)
    ]
    Dataset.from_list(rows).to_parquet(path)


def write_tokenizer(model: Path, folder: Path) -> None:
    """The model's, with two tokens that verl looks for in a Qwen's, and that no turn here has."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["\n", "<|im_end|>"])
    tokenizer.save_pretrained(folder)


class Trained:
    """What is left when verl has trained: the relay, the engine, and what the router has counted."""

    def __init__(self, mode: str, folder: Path) -> None:
        self.folder, self.mode = folder, mode
        self.model = make_tiny_qwen3(folder / "model")
        write_prompts(folder / "train.parquet")
        write_tokenizer(self.model, folder / "tokenizer")
        self.relay = RelayProcess("embedded")
        self.engine_url = f"http://127.0.0.1:{(port := free_port())}"
        argv = [
            *(engine_python(), "-m", "rose.cli", "serve", str(self.model), "--role", "rollout"),
            *("--port", str(port), "--relay", self.relay.url, "--run", RUN, "--served-model-name", "tiny"),
            *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8"),
        ]
        self.engine = ServerProcess(argv, "engine", folder / "engine.log").start()
        self.engine.wait_ready(f"{self.engine_url}/health", READY_S)
        self.turns = asyncio.run(self._train(mode))

    async def _train(self, mode: str) -> Any:
        async with running_router(self.engine_url) as router:
            arguments = [router.url, self.relay.url, str(self.model), str(self.folder), mode]
            paths = [str(HERE.parents[1]), str(HERE), *(path for path in sys.path if path)]
            env = {
                "PYTHONPATH": os.pathsep.join(paths),
                "VERL_USE_EXTERNAL_MODULES": "verl_cpu,rose.trainers.verl",
                "VERL_PLATFORM": "cpu",
                "VERL_ENGINE_DEVICE": "cuda",  # the engines of that name run on any device of torch
                "GLOO_SOCKET_IFNAME": "lo",
            }
            command = [sys.executable, str(HERE / "verl_program.py"), *arguments]
            with ServerProcess(command, "verl", self.folder / "verl.log", env) as program:
                status = await asyncio.to_thread(program.wait, TRAINED_S)
                assert status == 0, program.log_tail(100)
            return router.plane.records.counters.as_json()

    def rollouts(self, step: int) -> list[Any]:
        lines = (self.folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def logged(self, metric: str) -> list[float]:
        """What verl says of each step; its numbers may be numpy's."""
        number = rf"{metric}:(?:np\.\w+\()?([-+.e\d]+)"
        return [float(each) for each in re.findall(number, (self.folder / "verl.log").read_text())]

    def close(self) -> None:
        self.engine.stop()
        self.relay.stop()


@pytest.fixture(scope="module", params=MODES)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    made = Trained(request.param, tmp_path_factory.mktemp(request.param))
    yield made
    made.close()


def test_each_turn_of_every_step_is_answered_by_the_router(trained: Trained) -> None:
    assert trained.turns["turns"]["finished"] >= BATCH * SAMPLES * NUM_STEPS
    for step in range(1, NUM_STEPS + 1):
        assert len(trained.rollouts(step)) == BATCH * SAMPLES


def test_turns_are_answered_by_the_weights_of_the_step_before(trained: Trained) -> None:
    """So the versions of the turns say, and the engine's logprobs, which verl compares with its own.

    The asynchronous trainer asks for turns while it trains, so they may be older.
    """
    lags = trained.logged("trajectory_staleness_worst/max")
    differences = trained.logged("rollout_probs_diff_mean")
    assert len(lags) == len(differences) == NUM_STEPS
    if trained.mode == "sync":
        assert lags == [0.0] * NUM_STEPS
        assert max(differences) < 0.005
    else:
        assert all(0 <= lag <= NUM_STEPS for lag in lags)


def test_the_engine_runs_what_verl_has_trained(trained: Trained) -> None:
    """The last version has the bits of the checkpoint that verl has saved, and the engine's own hash."""
    import safetensors.torch
    import torch

    relay = open_relay(trained.relay.url)
    follower = Follower(relay, RUN, WeightMirror())
    assert follower.advance() and follower.mirror.planes is not None
    assert str(follower.mirror.version) == f"{RUN}/{NUM_STEPS}"
    saved = trained.folder / "checkpoints" / f"global_step_{NUM_STEPS}" / "actor" / "huggingface"
    (file,) = saved.glob("*.safetensors")
    expected = {name: each.bfloat16() for name, each in safetensors.torch.load_file(file).items()}
    held = {name: torch.zeros_like(each) for name, each in expected.items()}
    load_planes(follower.mirror.planes, held)
    assert all(torch.equal(held[name], each) for name, each in expected.items())
    (key,) = relay.keys(keys.ack_prefix(RUN))
    ack = read_ack(key, relay.get(key) or b"")
    assert ack is not None
    assert (ack.version, ack.state_hash) == (NUM_STEPS, str(follower.mirror.state_hash))
    relay.close()
    status = httpx.get(f"{trained.engine_url}/rose/v1/status", trust_env=False).json()
    assert status["weight_version"] == f"{RUN}/{NUM_STEPS}"
