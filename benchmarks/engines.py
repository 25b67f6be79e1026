"""A serving and a rollout engine over one pool, for benchmarks: real engines of the demo's tiny models.

Owns every process it starts: pool daemon, engines, the one that writes the models. Promises that all of them
are stopped, by id, when the ``with`` block ends in whatever way. Never measures anything.

    with SharedEngines(Path(folder)) as engines:
        engines.start(Role.SERVING, Role.ROLLOUT)
        answers = [request.result() for request in engines.request(Role.SERVING, prompts, max_tokens=32)]
"""

import os
import random
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from rose.config import Settings, child_environment
from rose.demo.cluster import ENGINE_DTYPE, ENGINE_ENV, MAX_MODEL_LEN, ModelDirs, write_models
from rose.demo.frozenlake import VOCAB_SIZE
from rose.errors import WorkerError
from rose.memory.daemon import SLAB_BYTES, DaemonHandle, start_daemon
from rose.memory.ledger import Ledger
from rose.memory.pool import PoolClient
from rose.node import launch
from rose.node.checks import free_port
from rose.node.config import EngineConfig
from rose.node.control import EngineControl
from rose.node.processes import ProcessGroup, ServerProcess
from rose.types import Role

POOL = "bench"
MODEL_TIMEOUT_S = 120.0
KILL_TIMEOUT_S = 10.0
MAX_REQUESTS_AT_ONCE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Sizes of the pool, and settings of the engines beside pool and role."""

    num_slabs: int = 64
    headroom_slabs: int = 16
    slab_bytes: int = SLAB_BYTES
    settings: dict[str, Any] = field(default_factory=dict)
    vllm_args: tuple[str, ...] = ("--max-num-seqs", "16")


class SharedEngines:
    """The pool, its ledger and its engines, under one folder. A context manager."""

    def __init__(self, folder: Path, setup: Setup | None = None) -> None:
        """``folder``: for models, logs, profiles, and sockets, whose path may have 107 bytes."""
        self.setup = setup if setup is not None else Setup()
        self._folder = folder
        self._environment = {
            "ROSE_RUNTIME_DIR": str(folder / "run"),
            "ROSE_CACHE_DIR": str(folder / "cache"),
            **ENGINE_ENV,
        }
        self._settings = Settings.from_environment(child_environment(self._environment))
        self._models = ModelDirs(folder / "models")
        self._group = ProcessGroup()
        self._servers: dict[Role, tuple[ServerProcess, EngineConfig]] = {}
        self._controls: dict[Role, EngineControl] = {}
        self._daemon: DaemonHandle | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with self._stack:
            # Ends after the engines, which end the requests that are still under way.
            self._threads = self._stack.enter_context(ThreadPoolExecutor(MAX_REQUESTS_AT_ONCE))
            self._stack.enter_context(self._group)
            self._stack.callback(self._stop_daemon)
            self._settings.make_runtime_dir()
            self._write_models()
            self.start_daemon()
            observer = PoolClient.observe(POOL, runtime_dir=self._settings.runtime_dir)
            self._stack.callback(observer.close)
            self.ledger: Ledger = observer.ledger
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # The daemon -----------------------------------------------------------------------------------

    def start_daemon(self) -> None:
        """The pool's first daemon, or the successor of a killed one; returns once it serves clients."""
        self._daemon = start_daemon(
            POOL,
            num_slabs=self.setup.num_slabs,
            headroom_slabs=self.setup.headroom_slabs,
            slab_bytes=self.setup.slab_bytes,
            runtime_dir=self._settings.runtime_dir,
        )

    def kill_daemon(self) -> None:
        """SIGKILL; returns once it is gone."""
        assert self._daemon is not None
        os.kill(self._daemon.pid, signal.SIGKILL)
        self._stop_daemon()

    def _stop_daemon(self) -> None:
        if self._daemon is not None:
            self._daemon.stop()
            self._daemon = None

    # Engines --------------------------------------------------------------------------------------

    def start(self, *roles: Role, is_profiled: bool = True) -> None:
        """Starts engines side by side and waits until they serve; again for one that was killed.

        is_profiled: measures their step times first, without which the gate admits next to nothing. An engine
        that starts again finds its profile in the folder.
        """
        for role in roles:
            self._servers[role] = self._start_engine(role)
        is_first = {role: role not in self._controls for role in roles}
        # Rollout first: profiling serving takes the whole pool, and so cuts rollout's budget to nothing.
        for role in sorted(roles):
            server, config = self._servers[role]
            launch.wait_engine_ready(server, config, self._settings)
            self._controls[role] = EngineControl(config.url, str(role))
            self._stack.callback(self._controls[role].close)
            if is_profiled and is_first[role]:
                self._controls[role].profile()

    def control(self, role: Role) -> EngineControl:
        return self._controls[role]

    def kill(self, role: Role) -> None:
        """SIGKILL to an engine's API server and all that it started, at once."""
        os.killpg(self._servers[role][0].pid, signal.SIGKILL)

    def forget(self, role: Role) -> None:
        """Clears away what an engine that was killed left; ``start`` may start another one then."""
        server, config = self._servers.pop(role)
        server.wait(KILL_TIMEOUT_S)
        launch.remove_status_page(config, server, self._settings)

    def held(self, role: Role) -> int:
        """Slabs that the engines of a role own."""
        engines = self.ledger.engines().items()
        return sum(self.ledger.num_owned(slot) for slot, engine in engines if engine.role is role)

    def request(
        self, role: Role, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[Future[list[tuple[list[int], str]]]]:
        """Greedy completions, all at once, each in a thread: see EngineControl.complete."""
        control = self._controls[role]
        return [self._threads.submit(control.complete, [prompt], max_tokens) for prompt in prompts]

    def _start_engine(self, role: Role) -> tuple[ServerProcess, EngineConfig]:
        config = EngineConfig(
            model=str(self._models.serving if role is Role.SERVING else self._models.rollout),
            port=free_port(),
            role=role,
            pool=POOL,
            vllm_args=(
                *("--served-model-name", str(role), "--dtype", ENGINE_DTYPE, "--enforce-eager"),
                *("--max-model-len", str(MAX_MODEL_LEN), "--disable-uvicorn-access-log"),
                *self.setup.vllm_args,
            ),
            **self.setup.settings,
        )
        log = self._folder / "logs" / f"{config.name}.log"
        return self._group.start(launch.engine_process(config, log, self._environment)), config

    def _write_models(self) -> None:
        if self._models.rollout.exists():
            return
        argv = [sys.executable, *write_models(self._folder / "models")]
        with ServerProcess(argv, "models", self._folder / "logs" / "models.log") as process:
            if process.wait(MODEL_TIMEOUT_S) != 0:
                raise WorkerError(f"the models were not written: {process.log_tail()}")


def random_prompt(seed: object, length: int) -> list[int]:
    """Token ids that both models know."""
    rng = random.Random(f"{seed}")
    return [rng.randrange(VOCAB_SIZE) for _ in range(length)]
