"""A real engine behind a router, for a whole trainer that runs as a program of its own environment."""

import asyncio
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import httpx

from rose.node.processes import ServerProcess
from rose.ports import free_port
from rose.scheduler.rollout.http.command import RunningRouter
from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.format import manifest as keys
from rose.transfer.publish.chain import read_ack
from rose.transfer.publish.torch_source import load_planes
from rose.transfer.relay.opening import open_relay
from tests.scheduler.rollout.conftest import running_router
from tests.scheduler.rollout.tiny_model import make_tiny_qwen3
from tests.transfer.relay_process import RelayProcess

READY_S, TRAINED_S = 900.0, 1500.0
HERE = Path(__file__).parent


def engine_python() -> str:
    """The interpreter of the environment that vLLM is installed in; the trainer's has other versions of
    packages."""
    found = find_spec("vllm")
    assert found is not None and found.origin is not None
    return str(Path(found.origin).parents[4] / "bin" / "python")


class TrainedEngine:
    """A relay, and an engine that follows a run on it, whose model is named tiny."""

    def __init__(self, folder: Path, run: str) -> None:
        self.folder, self._run = folder, run
        self.model = make_tiny_qwen3(folder / "model")
        self.relay = RelayProcess("embedded")
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        argv = [
            *(engine_python(), "-m", "rose.cli", "serve", str(self.model), "--role", "rollout"),
            *("--port", str(port), "--relay", self.relay.url, "--run", run, "--served-model-name", "tiny"),
            *("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8"),
        ]
        self._engine = ServerProcess(argv, "engine", folder / "engine.log")
        self.log = ""
        """What the trainer has said."""
        self.announced = -1
        """The number of the newest version that the trainer has announced to the router."""

    def start(self) -> None:
        self._engine.start().wait_ready(f"{self._url}/health", READY_S)

    async def train(
        self,
        program: str,
        env: dict[str, str],
        *arguments: str,
        watch: Callable[[RunningRouter], None] = lambda _: None,
    ) -> RunningRouter:
        """Runs `program ROUTER RELAY MODEL FOLDER ARGUMENTS`. Returns the router, which has ended."""
        async with running_router(self._url) as router:
            watch(router)
            given = [router.url, self.relay.url, str(self.model), str(self.folder), *arguments]
            paths = [str(HERE.parents[2]), str(HERE), *(path for path in sys.path if path)]
            env = {**env, "PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo"}
            command, log = [sys.executable, str(HERE / program), *given], self.folder / "trainer.log"
            with ServerProcess(command, "trainer", log, env) as trainer:
                status = await asyncio.to_thread(trainer.wait, TRAINED_S)
                assert status == 0, trainer.log_tail(100)
            self.log = log.read_text()
            self.announced = router.plane.registry.newest.bound(self._run)
            return router

    def assert_runs(self, saved: Path, number: int) -> None:
        """The last version has this number and the bits of the checkpoint, and the engine's own hash."""
        import safetensors.torch
        import torch

        relay = open_relay(self.relay.url)
        follower = Follower(relay, self._run, WeightMirror())
        assert follower.advance() and follower.mirror.planes is not None
        assert str(follower.mirror.version) == f"{self._run}/{number}"
        (file,) = saved.glob("*.safetensors")
        expected = {name: each.bfloat16() for name, each in safetensors.torch.load_file(file).items()}
        held = {name: torch.zeros_like(each) for name, each in expected.items()}
        load_planes(follower.mirror.planes, held)
        assert all(torch.equal(held[name], each) for name, each in expected.items())
        (key,) = relay.keys(keys.ack_prefix(self._run))
        ack = read_ack(key, relay.get(key) or b"")
        assert ack is not None
        assert (ack.version, ack.state_hash) == (number, str(follower.mirror.state_hash))
        relay.close()
        status = httpx.get(f"{self._url}/rose/v1/status", trust_env=False).json()
        assert status["weight_version"] == f"{self._run}/{number}"
        assert self.announced == number

    def close(self) -> None:
        self._engine.stop()
        self.relay.stop()
