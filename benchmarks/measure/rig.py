"""Real engines over a real pool, started as `rose serve` starts them: for `rose demo` and the benchmarks.

Owns the processes of one measurement and its folder. Promises that leaving the context stops everything it
started, by id, also on an error. Never measures.
"""

import json
import os
import signal
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self, TypedDict

import psutil

from rose.config import Settings
from rose.errors import RelayError, WorkerError
from rose.memory.daemon.daemon import DaemonHandle, start_daemon
from rose.memory.pool.pool import PoolClient
from rose.memory.pool.sizing import engines_backend
from rose.memory.slabs.backend import open_backend
from rose.node import launch
from rose.node.control import EngineControl
from rose.node.node_config import EngineConfig
from rose.node.processes import ProcessGroup, ServerProcess
from rose.ports import free_port
from rose.transfer.relay.mooncake import mooncake_available
from rose.types import Role

ENGINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # vLLM would bind threads to CPUs of its own choice.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # On a GPU, attention in float32 would round its factors to 10 bits, and with the batch to others.
    "TRITON_F32_DEFAULT": "ieee",
}
CLIENT_ENV = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
ENGINE_DTYPE = "float32"
"""See rose.measure.models.KV_ELEMENT_BYTES; weights are published, checked and loaded as bfloat16."""
MAX_MODEL_LEN = 1024
MAX_SEQS = 32
MODELS_S = 600.0
ROUTER_START_S = 120.0
RELAY_START_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuPlan:
    """Which CPUs stand for the GPU, and which carry everything else; None: no pinning."""

    compute: str | None
    others: tuple[int, ...] | None

    @classmethod
    def choose(cls) -> "CpuPlan":
        cpus = sorted(os.sched_getaffinity(0))
        if len(cpus) < 2:
            return cls(compute=None, others=None)
        return cls(compute=str(cpus[0]), others=tuple(cpus[1:]))


class PoolSetup(TypedDict):
    """How a pool is made, and made again when its daemon was killed."""

    num_slabs: int
    slab_bytes: int
    headroom_slabs: int


class Rig:
    """A context manager: two tiny models, pools, engines and clients."""

    def __init__(self, folder: Path | None = None, words: Sequence[str] = ()) -> None:
        """Keeps everything in ``folder``, its logs in logs/; None: in a temporary one.

        ``words``: what the rollout model speaks.
        """
        self._stack = ExitStack()
        if folder is None:
            folder = Path(self._stack.enter_context(TemporaryDirectory(prefix="rose-bench-")))
        self.folder = folder
        self.others: tuple[int, ...] | None = None
        """CPUs for everything but the models' own threads; None: all."""
        self._words = words
        self._group = ProcessGroup()
        self._daemons: dict[str, DaemonHandle] = {}
        self._pool_sizes: dict[str, PoolSetup] = {}
        self._starting: dict[str, tuple[ServerProcess, EngineConfig]] = {}
        self._settings = Settings.from_environment()

    def __enter__(self) -> Self:
        return self

    def log(self, name: str) -> Path:
        """Returns where a process of this name writes its output."""
        return self.folder / "logs" / f"{name}.log"

    def model(self, role: Role) -> Path:
        """Returns the checkpoint for a role; the first call makes both. torch stays out of this process."""
        models = self.folder / "models"
        if not models.exists():
            made = self.run(["-m", "rose.measure.models", str(models), *self._words], "models")
            if made.wait(MODELS_S) != 0:
                raise WorkerError(f"the models could not be made:\n{made.log_tail()}")
        return models / str(role)

    def pool(self, name: str, *, num_slabs: int, slab_bytes: int, headroom_slabs: int) -> PoolClient:
        """Starts a pool where engines compute, and returns an observer of it.

        ``slab_bytes``: rounded up to what the memory there allows.
        """
        runtime_dir = self._settings.make_runtime_dir()
        granularity = open_backend(engines_backend()).granularity
        self._pool_sizes[name] = PoolSetup(
            num_slabs=num_slabs,
            slab_bytes=-(-slab_bytes // granularity) * granularity,
            headroom_slabs=headroom_slabs,
        )
        self.start_daemon(name)
        observer = PoolClient.observe(name, runtime_dir=runtime_dir)
        self._stack.callback(observer.close)
        return observer

    def start_daemon(self, name: str) -> None:
        """Starts the daemon of a pool; after ``kill_daemon``, one that takes the pool over."""
        log = self.log(f"pool-{name}")
        log.parent.mkdir(parents=True, exist_ok=True)
        sizes = self._pool_sizes[name]
        self._daemons[name] = start_daemon(name, **sizes, backend=engines_backend(), log_path=log)

    def kill_daemon(self, name: str) -> None:
        """Sends SIGKILL to a pool's daemon; returns once it is gone."""
        daemon = self._daemons.pop(name)
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.stop()

    def start_engine(
        self,
        name: str,
        role: Role,
        *,
        model: Path | None = None,
        port: int | None = None,
        vllm_args: tuple[str, ...] = (),
        **rose: Any,
    ) -> ServerProcess:
        """Begins to start an engine with ROSE, with the tiny model for its role unless told otherwise.

        ``port``: that of an engine in whose place this one comes. ``rose``: its settings, such as pool and
        lease_s.
        """
        config = EngineConfig(
            model=str(model if model is not None else self.model(role)),
            port=port if port is not None else free_port(),
            role=role,
            engine_id=f"{name}-{id(self)}",
            vllm_args=(*self.vllm_flags(str(role)), *vllm_args),
            **rose,
        )
        server = launch.engine_process(config, self.log(name), extra_env=ENGINE_ENV)
        self._starting[name] = (self._group.start(server), config)
        return server

    def wait_engine(self, name: str) -> EngineControl:
        """Returns its control once it serves; from then on it computes where ``others`` allows it."""
        server, config = self._starting[name]
        launch.wait_engine_ready(server, config, self._settings)
        if self.others is not None:
            pin_tree(server.pid, self.others)
        control = EngineControl(config.url, str(config.role))
        self._stack.callback(control.close)
        return control

    def start_subscriber(self, *names: str) -> ServerProcess:
        """Starts the process that brings new weights to rollout engines that follow the same ones."""
        configs = [self.config(name) for name in names]
        for config in configs:
            self._stack.callback(launch.remove_staging_dir, config, self._settings)
        (subscriber,) = launch.subscriber_processes(configs, self._settings, self.folder / "logs")
        return self.start(subscriber)

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
        return self.start(ServerProcess(argv, name, self.log(name), env={**ENGINE_ENV, "VLLM_PLUGINS": ""}))

    def wait_stock(self, server: ServerProcess) -> str:
        """Returns its URL once it serves."""
        url = f"http://127.0.0.1:{server.argv[server.argv.index('--port') + 1]}"
        server.wait_ready(f"{url}/health", launch.READY_TIMEOUT_S)
        return url

    def run(
        self,
        argv: Sequence[str],
        name: str,
        *,
        env: Mapping[str, str] | None = None,
        nice: int = 0,
        gives_way: bool = False,
    ) -> ServerProcess:
        """Starts a Python process beside the engines.

        ``gives_way``: it stands for another machine, and runs only when nothing else wants a CPU.
        """
        state = {"ROSE_STATE_DIR": str(self.folder / "state")}
        env = {**CLIENT_ENV, **state, **(env if env is not None else {})}
        command = [sys.executable, *argv]
        process = self.start(
            ServerProcess(command, name, self.log(name), env=env, cpus=self.others, nice=nice)
        )
        if gives_way:
            give_way(process.pid)
        return process

    def start(self, process: ServerProcess) -> ServerProcess:
        """Starts any process beside the engines."""
        return self._group.start(process)

    def start_router(
        self,
        workers: Iterable[str],
        *flags: str,
        name: str = "router",
        nice: int = 0,
        behind: Sequence[str] = (),
    ) -> str:
        """Returns its URL once it answers; without workers it is not healthy, but listens.

        ``behind``: what ends the command line, such as the flags of fronts.
        """
        return self.run_router(workers, *flags, name=name, nice=nice, behind=behind)[1]

    def run_router(
        self,
        workers: Iterable[str],
        *flags: str,
        name: str = "router",
        nice: int = 0,
        behind: Sequence[str] = (),
        port: int | None = None,
    ) -> tuple[ServerProcess, str]:
        """Like ``start_router``, and returns the process as well, for a router that is stopped early."""
        port = port if port is not None else free_port()
        argv = ["-m", "rose.scheduler.rollout.http.command", "--port", str(port), *flags]
        for worker in workers:
            argv += ["--worker", worker]
        argv += behind
        url = f"http://127.0.0.1:{port}"
        process = self.run(argv, name, nice=nice)
        process.wait_ready(f"{url}/workers", ROUTER_START_S)
        return process, url

    def start_relay(
        self,
        name: str,
        *,
        kind: str = "embedded",
        capacity_bytes: int,
        beside: str | None = None,
        port: int | None = None,
    ) -> tuple[ServerProcess, str]:
        """Returns a relay and its URL. ``beside``: the URL of a Mooncake store whose frames it copies.
        ``port``: that of a relay in whose place this one comes, under a name of its own."""
        argv = ["-m", "rose.transfer.relay.server", "--kind", kind, "--capacity-bytes", str(capacity_bytes)]
        argv += ["--beside", beside] if beside is not None else []
        argv += ["--port", str(port)] if port is not None else []
        server = self.run(argv, name)
        log = self.log(name)
        server.wait_until(lambda: '"url"' in log.read_text(), "relay's URL", RELAY_START_S)
        line = next(line for line in log.read_text().splitlines() if line.startswith("{"))
        return server, str(json.loads(line)["url"])

    def vllm_flags(self, served_name: str) -> tuple[str, ...]:
        """Returns the flags that all engines share, stock ones too."""
        return (
            *("--served-model-name", served_name, "--dtype", ENGINE_DTYPE, "--enforce-eager"),
            *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_SEQS)),
            "--disable-uvicorn-access-log",
        )

    def stop(self) -> None:
        """Stops all processes but the pools' daemons, and removes the engines' status pages."""
        self._group.stop()
        for server, config in self._starting.values():
            launch.remove_status_page(config, server, self._settings)

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            for daemon in self._daemons.values():
                daemon.stop()
            self._stack.close()


def relay_kind(wanted: str) -> str:
    """Returns "mooncake" where its libraries are or ``wanted`` is that, else "embedded".

    Raises: RelayError where Mooncake is wanted and can't be loaded.
    """
    has_mooncake, reason = mooncake_available()
    if wanted == "mooncake" and not has_mooncake:
        raise RelayError(f"--relay mooncake: {reason}")
    return "mooncake" if has_mooncake and wanted != "embedded" else "embedded"


def _threads(leader_pid: int) -> Iterable[int]:
    leader = psutil.Process(leader_pid)
    for process in [leader, *leader.children(recursive=True)]:
        yield from (thread.id for thread in process.threads())


def give_way(pid: int) -> None:
    """Lets every thread of a process and its descendants run only when nothing else wants a CPU."""
    for thread in _threads(pid):
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))


def pin_tree(pid: int, cpus: Sequence[int]) -> None:
    """Moves every thread of a process and its descendants to ``cpus``.

    After start-up, which is better off with all CPUs; a shared engine's model thread moves itself to the CPUs
    that stand for the GPU when it runs its first step.
    """
    for thread in _threads(pid):
        os.sched_setaffinity(thread, cpus)
