"""The demo's processes: pool, relay, four kinds of engine, subscribers, router.

Owns their command lines, CPUs and priorities. Promises that everything started is stopped with the
``ProcessGroup`` that is passed in. The layout on two cores: both shared engines' models run on the first CPU,
which stands for the GPU; all else runs on the others. The dedicated engine, the subscribers and the trainer
stand for other machines, so the kernel lets them run only when nothing else wants a CPU.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil

from rose.config import Settings
from rose.demo.plan import DemoPlan
from rose.errors import RelayError
from rose.node import launch
from rose.node.checks import free_port
from rose.node.control import EngineControl
from rose.node.node_config import EngineConfig, PoolConfig
from rose.node.processes import ProcessGroup, ServerProcess
from rose.transfer.relay.mooncake import mooncake_available
from rose.types import Role

RUN_ID = "demo"
ENGINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # vLLM would bind threads to CPUs of its own choice.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
CLIENT_ENV = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
GUEST_NICE = 10
"""The priority of a rollout engine's threads under ROSE (rose/engine/hooks/priority.py)."""
RELAY_TIMEOUT_S = 120.0
RELAY_CAPACITY_BYTES = 512 << 20
ROUTER_TIMEOUT_S = 120.0
MAX_MODEL_LEN = 1024
ENGINE_DTYPE = "float32"
"""See rose.demo.models.KV_ELEMENT_BYTES; weights are published, checked and loaded as bfloat16."""


class Cluster:
    """The running processes of one demo."""

    def __init__(self, plan: DemoPlan, group: ProcessGroup, stack: ExitStack, models: "ModelDirs") -> None:
        self._plan = plan
        self._group = group
        self._stack = stack
        self._models = models
        self._settings = Settings.from_environment()
        self._logs = plan.options.out_dir / "logs"
        self._servers: dict[str, tuple[ServerProcess, EngineConfig]] = {}
        self.relay_url = ""
        self.relay_kind = ""
        self._router_port = free_port()

    # Engines ----------------------------------------------------------------------------------------

    def start_engines(self) -> None:
        """Starts pool and engines side by side; ``wait_engines`` returns their controls."""
        plan = self._plan
        pool = PoolConfig(
            name=plan.pool.name,
            num_slabs=plan.pool.num_slabs,
            slab_bytes=plan.pool.slab_bytes,
            headroom_slabs=plan.pool.headroom_slabs,
        )
        self._start(launch.pool_process(pool, (), self._logs / "pool.log"))
        socket_path = self._settings.pool_socket(plan.pool.name)
        self._group.servers[-1].wait_until(socket_path.exists, f"{socket_path}", launch.POOL_READY_TIMEOUT_S)
        self._start_engine("serving", self._models.serving, Role.SERVING, shares_gpu=True)
        self._start_engine("rollout", self._models.rollout, Role.ROLLOUT, shares_gpu=True)
        self._start_engine("dedicated", self._models.rollout, Role.ROLLOUT, shares_gpu=False)

    def wait_engines(self) -> dict[str, EngineControl]:
        """Controls by name: serving, rollout (co-located), dedicated; the last two serve the same model."""
        controls = {}
        for name, (server, config) in self._servers.items():
            launch.wait_engine_ready(server, config, self._settings)
            pin_tree(server.pid, self._plan.cpus.others)
            if config.pool is None:  # now that it has started
                give_way(server.pid)
            controls[name] = EngineControl(config.url, str(config.role))
            self._stack.callback(controls[name].close)
        return controls

    def _start_engine(self, name: str, model: Path, role: Role, *, shares_gpu: bool) -> None:
        plan = self._plan
        config = EngineConfig(
            model=str(model),
            port=free_port(),
            role=role,
            pool=plan.pool.name if shares_gpu else None,
            engine_id=f"{name}-{os.getpid()}",
            slo_ttft_ms=plan.slo.ttft_s * 1000,
            slo_tpot_ms=plan.slo.tpot_s * 1000,
            compute_cpus=plan.cpus.compute if shares_gpu else None,
            vllm_args=("--served-model-name", str(role), *_vllm_flags()),
        )
        server = launch.engine_process(config, self._logs / f"{name}.log", extra_env=ENGINE_ENV)
        self._servers[name] = (self._start(server), config)

    # Weights and routing ----------------------------------------------------------------------------

    def start_relay(self) -> None:
        """Mooncake Store where its libraries are (or as the user asked), else the embedded relay."""
        wanted = self._plan.options.relay
        has_mooncake, reason = mooncake_available()
        if wanted == "mooncake" and not has_mooncake:
            raise RelayError(f"--relay mooncake: {reason}")
        self.relay_kind = "mooncake" if has_mooncake and wanted != "embedded" else "embedded"
        ready = self._logs / "relay.json"
        argv = [
            *(sys.executable, "-m", "rose.transfer.relay.server", "--kind", self.relay_kind),
            *("--capacity-bytes", str(RELAY_CAPACITY_BYTES)),
        ]
        server = self._start(ServerProcess(argv, "relay", ready, cpus=self._plan.cpus.others))
        server.wait_until(lambda: _ready_line(ready) is not None, "relay's ready line", RELAY_TIMEOUT_S)
        self.relay_url = _ready_line(ready) or ""

    def start_subscribers(self) -> None:
        """One per rollout engine; each brings the engine to the newest version and acknowledges it."""
        for name in ("rollout", "dedicated"):
            _, config = self._servers[name]
            following = config.model_copy(update={"relay": self.relay_url, "run": RUN_ID})
            process = launch.subscriber_process(
                following, self._settings, self._logs / f"subscriber-{name}.log"
            )
            assert process is not None
            self._stack.callback(launch.remove_staging_dir, following, self._settings)
            self._start(process, is_elsewhere=True)

    def start_router(self) -> None:
        argv = [
            *(sys.executable, "-m", "rose.scheduler.rollout.http.command", "--port", str(self._router_port)),
            *("--worker", f"{self.url('dedicated')},dedicated", "--worker", f"{self.url('rollout')},serving"),
        ]
        server = self._start(
            ServerProcess(argv, "router", self._logs / "router.log", cpus=self._plan.cpus.others)
        )
        server.wait_ready(f"{self.router_url}/health", ROUTER_TIMEOUT_S)

    @property
    def router_url(self) -> str:
        """Known before the router runs."""
        return f"http://127.0.0.1:{self._router_port}"

    def pin(self, process: ServerProcess) -> None:
        """Move a running process to the CPUs that don't stand for the GPU."""
        pin_tree(process.pid, self._plan.cpus.others)

    def url(self, name: str) -> str:
        return self._servers[name][1].url

    def run(
        self,
        argv: Sequence[str],
        name: str,
        *,
        is_elsewhere: bool = False,
        env: Mapping[str, str] | None = None,
        is_pinned: bool = True,
    ) -> ServerProcess:
        """Starts a Python process beside the engines, with its output in ``logs/<name>.log``.

        ``is_elsewhere``: it stands for another machine, and never takes a CPU from the engines.
        """
        process = ServerProcess(
            [sys.executable, *argv],
            name,
            self._logs / f"{name}.log",
            env={**CLIENT_ENV, **(env if env is not None else {})},
            cpus=self._plan.cpus.others if is_pinned else None,
        )
        return self._start(process, is_elsewhere=is_elsewhere)

    def share_compute_equally(self) -> None:
        """Gives the steps of both shared engines one priority, as a GPU does without ROSE.

        Only a privileged user could raise a priority again, so naive co-location is measured last.
        """
        compute = self._plan.cpus.compute
        for name in ("serving", "rollout"):
            leader = psutil.Process(self._servers[name][0].pid)
            for process in [leader, *leader.children(recursive=True)]:
                for thread in process.threads():
                    if compute is not None and os.sched_getaffinity(thread.id) == {int(compute)}:
                        os.setpriority(os.PRIO_PROCESS, thread.id, GUEST_NICE)

    def _start(self, server: ServerProcess, *, is_elsewhere: bool = False) -> ServerProcess:
        self._group.start(server)
        if is_elsewhere:
            give_way(server.pid)
        return server


class ModelDirs:
    """Where the two checkpoints lie, and how fast this machine computes the serving one."""

    def __init__(self, root: Path) -> None:
        self.serving = root / "serving"
        self.speed = root / "prefill_token_s"
        self.rollout = root / "rollout"


def _vllm_flags() -> tuple[str, ...]:
    return (
        *(
            "--dtype",
            ENGINE_DTYPE,
            "--enforce-eager",
            "--max-model-len",
            str(MAX_MODEL_LEN),
            "--max-num-seqs",
            "32",
        ),
        "--disable-uvicorn-access-log",
    )


def _ready_line(path: Path) -> str | None:
    """The URL in a relay server's ready line, once it is there."""
    if not path.exists():
        return None
    for line in path.read_text(errors="replace").splitlines():
        if line.startswith("{") and '"url"' in line:
            url: str = json.loads(line)["url"]
            return url
    return None


def write_models(root: Path) -> list[str]:
    """The Python arguments that write ``ModelDirs``: torch stays out of this process."""
    code = (
        "import sys; from pathlib import Path; from rose.demo.models import *; root = Path(sys.argv[1]); "
        "make_serving_model(root / 'serving'); make_rollout_model(root / 'rollout'); "
        "(root / 'prefill_token_s').write_text(str(prefill_token_s(root / 'serving')))"
    )
    return ["-c", code, str(root)]


def give_way(pid: int) -> None:
    """Lets every thread of a process and its descendants run only when nothing else wants a CPU."""
    leader = psutil.Process(pid)
    for process in [leader, *leader.children(recursive=True)]:
        for thread in process.threads():
            os.sched_setscheduler(thread.id, os.SCHED_IDLE, os.sched_param(0))


def pin_tree(pid: int, cpus: Sequence[int] | None) -> None:
    """Move every thread of a process and its descendants to ``cpus``; None leaves them.

    After start-up, which is better off with all CPUs; a shared engine's model thread moves itself to the CPUs
    that stand for the GPU when it runs its first step.
    """
    if cpus is None:
        return
    leader = psutil.Process(pid)
    for process in [leader, *leader.children(recursive=True)]:
        for thread in process.threads():
            os.sched_setaffinity(thread.id, cpus)
