"""Real engines over a real pool, for benchmarks: started as `rose serve` starts them, stopped in any case.

Owns the processes of one benchmark and its folder. Promises that leaving the context stops everything it
started, by id, also on an error. Never measures.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self, TypedDict

from lib.faults.signals import kill
from rose.config import Settings
from rose.demo.processes import ENGINE_ENV, pin_tree, write_models
from rose.errors import WorkerError
from rose.memory.daemon.daemon import DaemonHandle, start_daemon
from rose.memory.pool.pool import PoolClient
from rose.node import launch
from rose.node.checks import free_port
from rose.node.control import EngineControl
from rose.node.node_config import EngineConfig
from rose.node.processes import ProcessGroup, ServerProcess
from rose.types import Role

MAX_MODEL_LEN = 1024
MAX_SEQS = 32
ROUTER_START_S = 30.0
RELAY_START_S = 120.0


class PoolSize(TypedDict):
    """How a pool is made, and made again when its daemon was killed."""

    num_slabs: int
    slab_bytes: int
    headroom_slabs: int


class Rig:
    """A context manager: the demo's two tiny models, pools, engines and clients."""

    def __init__(self) -> None:
        self._temporary = TemporaryDirectory(prefix="rose-bench-")
        self.folder = Path(self._temporary.name)
        self._group = ProcessGroup()
        self._daemons: dict[str, DaemonHandle] = {}
        self._pool_sizes: dict[str, PoolSize] = {}
        self._observers: list[PoolClient] = []
        self._controls: list[EngineControl] = []
        self._starting: dict[str, tuple[ServerProcess, EngineConfig]] = {}
        self._settings = Settings.from_environment()

    def __enter__(self) -> Self:
        return self

    def model(self, role: Role) -> Path:
        """Returns the demo's checkpoint for a role; the first call makes both."""
        models = self.folder / "models"
        if not models.exists():
            argv = [sys.executable, *write_models(models)]
            made = subprocess.run(argv, capture_output=True, text=True, check=False)
            if made.returncode != 0:
                raise WorkerError(f"the models could not be made:\n{made.stderr}")
        return models / str(role)

    def pool(self, name: str, *, num_slabs: int, slab_bytes: int, headroom_slabs: int) -> PoolClient:
        """Starts a pool and returns an observer of it."""
        runtime_dir = self._settings.make_runtime_dir()
        self._pool_sizes[name] = PoolSize(
            num_slabs=num_slabs, slab_bytes=slab_bytes, headroom_slabs=headroom_slabs
        )
        self.start_daemon(name)
        observer = PoolClient.observe(name, runtime_dir=runtime_dir)
        self._observers.append(observer)
        return observer

    def start_daemon(self, name: str) -> None:
        """Starts the daemon of a pool; after ``kill_daemon``, one that takes the pool over."""
        self._daemons[name] = start_daemon(name, **self._pool_sizes[name])

    def kill_daemon(self, name: str) -> None:
        """Sends SIGKILL to a pool's daemon; returns once it is gone."""
        daemon = self._daemons.pop(name)
        kill(daemon.pid, whole_group=False)
        daemon.stop()

    def start_engine(
        self,
        name: str,
        role: Role,
        *,
        model: Path | None = None,
        vllm_args: tuple[str, ...] = (),
        **rose: Any,
    ) -> ServerProcess:
        """Begins to start an engine with ROSE, with the demo's model for its role unless told otherwise.

        ``rose``: its settings, such as pool and lease_s.
        """
        config = EngineConfig(
            model=str(model if model is not None else self.model(role)),
            port=free_port(),
            role=role,
            engine_id=f"{name}-{id(self)}",
            vllm_args=(*self.vllm_flags(str(role)), *vllm_args),
            **rose,
        )
        server = launch.engine_process(config, self.folder / f"{name}.log", extra_env=ENGINE_ENV)
        self._starting[name] = (self._group.start(server), config)
        return server

    def wait_engine(self, name: str, others: tuple[int, ...] | None = None) -> EngineControl:
        """Returns its control once it serves. ``others``: CPUs for everything but the model's own thread."""
        server, config = self._starting[name]
        launch.wait_engine_ready(server, config, self._settings)
        pin_tree(server.pid, others)
        control = EngineControl(config.url, str(config.role))
        self._controls.append(control)
        return control

    def config(self, name: str) -> EngineConfig:
        """Returns what an engine was started with."""
        return self._starting[name][1]

    def pid(self, name: str) -> int:
        """Returns the process id of an engine's API server, which is also its process group."""
        return self._starting[name][0].pid

    def start_stock_engine(self, name: str, role: Role, *vllm_args: str) -> ServerProcess:
        """vLLM without ROSE, as it comes, with a KV cache of its own. Wait for it with ``wait_stock``."""
        argv = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model(role))),
            *("--port", str(free_port()), *self.vllm_flags(str(role)), *vllm_args),
        ]
        server = ServerProcess(
            argv, name, self.folder / f"{name}.log", env={**ENGINE_ENV, "VLLM_PLUGINS": ""}
        )
        return self._group.start(server)

    def wait_stock(self, server: ServerProcess) -> str:
        """Returns its URL once it serves."""
        url = f"http://127.0.0.1:{server.argv[server.argv.index('--port') + 1]}"
        server.wait_ready(f"{url}/health", launch.READY_TIMEOUT_S)
        return url

    def run(
        self,
        argv: list[str],
        name: str,
        cpus: tuple[int, ...] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ServerProcess:
        """Starts a Python process beside the engines, its output in ``<name>.log`` of the folder."""
        log = self.folder / f"{name}.log"
        return self.start(ServerProcess([sys.executable, *argv], name, log, cpus=cpus, env=env))

    def start(self, process: ServerProcess) -> ServerProcess:
        """Starts any process beside the engines."""
        return self._group.start(process)

    def start_router(self, workers: Iterable[str], *flags: str, name: str = "router") -> str:
        """Returns its URL once it answers; without workers it is not healthy, but listens."""
        port = free_port()
        argv = ["-m", "rose.scheduler.rollout.http.command", "--port", str(port), *flags]
        for worker in workers:
            argv += ["--worker", worker]
        url = f"http://127.0.0.1:{port}"
        self.run(argv, name).wait_ready(f"{url}/workers", ROUTER_START_S)
        return url

    def start_relay(
        self, name: str, *, kind: str = "embedded", capacity_bytes: int, beside: str | None = None
    ) -> tuple[ServerProcess, str]:
        """Returns a relay and its URL. ``beside``: the URL of a Mooncake store whose frames it copies."""
        argv = ["-m", "rose.transfer.relay.server", "--kind", kind, "--capacity-bytes", str(capacity_bytes)]
        server = self.run([*argv, *(("--beside", beside) if beside is not None else ())], name)
        log = self.folder / f"{name}.log"
        server.wait_until(lambda: '"url"' in log.read_text(), "relay's URL", RELAY_START_S)
        line = next(line for line in log.read_text().splitlines() if line.startswith("{"))
        return server, str(json.loads(line)["url"])

    def vllm_flags(self, served_name: str) -> tuple[str, ...]:
        """Returns the flags that all engines share, stock ones too."""
        return (
            *("--served-model-name", served_name, "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_SEQS)),
            "--disable-uvicorn-access-log",
        )

    def __exit__(self, *_: object) -> None:
        try:
            self._group.stop()
            for server, config in self._starting.values():
                launch.remove_status_page(config, server, self._settings)
        finally:
            for control in self._controls:
                control.close()
            for observer in self._observers:
                observer.close()
            for daemon in self._daemons.values():
                daemon.stop()
            self._temporary.cleanup()
