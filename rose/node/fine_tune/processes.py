"""The processes beside a serving engine that is fine-tuned: a relay, the trainer, and a pool if it has none.

Promises that serving never depends on them. If the trainer or the relay dies, the log says so, the rest of
the trainer ends too, and the engine goes on serving with the weights that it has. Never starts a process
again.
"""

import logging
import math
import secrets
import signal
import sys
import time

from rose import ports
from rose.config import Settings, worker_api_key
from rose.errors import RelayError
from rose.node import checks, launch
from rose.node.fine_tune.options import FineTuneOptions, flag
from rose.node.node_config import EngineConfig, PoolConfig
from rose.node.processes import ProcessGroup, ServerProcess
from rose.ports import free_port
from rose.transfer.relay.opening import open_relay

logger = logging.getLogger(__name__)

TRAINER_NICE = 10
"""The trainer's niceness: its work outside of grants gives way to the engine's API server."""
_RELAY_START_S = 120.0
_SAVE_S = 300.0
"""How long a stopped trainer may take to save its model."""
_WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Launchers give the number of processes under these names; accelerate reads them all."""
_END_S = 10.0
"""How long it may take to end without saving."""


class FineTuning:
    """One engine's fine-tuning."""

    def __init__(self, options: FineTuneOptions, engine: EngineConfig) -> None:
        """Starts nothing. ``engine`` has no relay and no run yet; it gets both here."""
        self._options = options
        port = free_port()
        self._relay_port, relay = port, f"embedded://127.0.0.1:{port}"
        self._own_pool = f"serve-{engine.port}" if engine.pool is None else None
        self.engine = engine.model_copy(
            update={
                "pool": engine.pool if engine.pool is not None else self._own_pool,
                "relay": relay,
                "run": f"fine-tune-{secrets.token_hex(4)}",
                "takes_weights": True,
            }
        )
        """The configuration with which the engine has to be started."""
        self._relay: ServerProcess | None = None
        self._trainers: list[ServerProcess] = []
        """The trainer's processes; the first one saves the model."""
        self._told: set[str] = set()
        """The processes whose ends were logged."""
        self._is_done = False
        """Whether the first process has ended well. What the others say then is of no use."""
        self._kill_s: float | None = None
        """When the rest of a trainer is killed that has lost a process or is done."""

    def start_ahead(self, group: ProcessGroup, settings: Settings) -> None:
        """Starts the pool and the relay that the engine needs, and returns once they answer. Raises:
        WorkerError."""
        if self._own_pool is not None:
            name = self._own_pool
            daemon = group.start(launch.pool_process(PoolConfig(name=name), [self.engine.model], None))
            daemon.wait_until(
                lambda: checks.find_pool(settings, name) is not None, "answer", launch.POOL_READY_TIMEOUT_S
            )
        argv = ["-m", "rose.transfer.relay.server", "--port", str(self._relay_port)]
        relay = group.start(ServerProcess([sys.executable, *argv], "relay", None, cpus=self.engine.cpus))
        relay.wait_until(lambda: self._answers(settings), "answer", _RELAY_START_S)
        self._relay = relay

    def _answers(self, settings: Settings) -> bool:
        assert self.engine.relay is not None
        try:
            open_relay(self.engine.relay, settings.key).close()
        except RelayError:
            return False
        return True

    def start_trainer(self, group: ProcessGroup) -> None:
        """Starts the trainer. Call it once the engine serves."""
        if self._options.output is None:
            logger.warning(
                "the trained weights live as long as this engine; %s DIR saves them", flag("output")
            )
        argv = [sys.executable, "-m", "rose.trainers.fine_tune.command", *self._trainer_flags()]
        count = self._options.processes
        key = self._engine_key()
        for rank, environment in enumerate(_rank_environments(count)):
            if key is not None:  # rollouts take the engine for a router
                environment["ROSE_ROUTER_API_KEY"] = key
            name = "trainer" if count == 1 else f"trainer-{rank}"
            process = ServerProcess(argv, name, None, environment, cpus=self.engine.cpus, nice=TRAINER_NICE)
            self._trainers.append(group.start(process))

    def let_save(self) -> None:
        """Stops a trainer that saves its model, and waits until its first process has saved it."""
        if self._trainers and self._options.output is not None:
            leader, *others = self._trainers
            for process in self._trainers:
                _ask_to_end(process)
            # The first one may wait for one that hangs. One that is killed while it computes with the others
            # on a GPU would have them wait.
            for process, seconds in [*((other, _END_S) for other in others), (leader, _SAVE_S)]:
                process.wait(seconds)  # a second SIGTERM would kill one that is about to end
                process.stop(0.0)

    def _engine_key(self) -> str | None:
        own = self.engine.vllm_flag("--api-key")
        return own if own is not None else worker_api_key()

    def _trainer_flags(self) -> list[str]:
        engine, options = self.engine, self._options
        flags = {
            "--model": engine.model,
            "--pool": engine.pool,
            "--relay": engine.relay,
            "--run": engine.run,
            "--cpus": engine.compute_cpus,
            "--engine": engine.url if options.reward is not None else None,
            **{
                flag(name): value
                for name, value in options.model_dump(mode="json", exclude_unset=True).items()
            },
        }
        return [text for key, value in flags.items() if value is not None for text in (key, str(value))]

    def watch(self) -> None:
        """Logs the end of each process, once. A trainer that has lost a process or its relay is ended."""
        relay = [self._relay] if self._relay is not None else []
        for process in [*relay, *self._trainers]:
            if process.is_alive() or process.name in self._told:
                continue
            self._told.add(process.name)
            if self._is_done:
                continue
            if process.exit_status != 0:
                logger.error(
                    "died name=%s status=%s: fine-tuning has stopped, serving goes on",
                    process.name,
                    process.exit_status,
                )
                self._end_trainer(_SAVE_S if self._options.output is not None else _END_S)
            elif process is self._trainers[0] and self._kill_s is None:
                logger.info("fine-tuning is done; serving goes on with the last weights that went live")
                self._is_done = True
                self._end_trainer(_END_S)
        if self._kill_s is not None and time.monotonic() >= self._kill_s:
            self._kill_s = math.inf
            for process in self._trainers:
                process.stop(0.0)

    def _end_trainer(self, grace_s: float) -> None:
        if self._kill_s is None:
            self._kill_s = time.monotonic() + grace_s
            for process in self._trainers:
                _ask_to_end(process)


def _ask_to_end(process: ServerProcess) -> None:
    """Sends SIGTERM, and lets a process act on it that someone has stopped by SIGSTOP."""
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)


def _rank_environments(count: int) -> list[dict[str, str]]:
    """Returns what tells each of a trainer's processes about the others, by torch's names."""
    if count == 1:  # a launcher of this command may have set these names for its own processes
        sizes = dict.fromkeys(_WORLD_SIZES, "1")
        return [{**sizes, "RANK": "0", "LOCAL_RANK": "-1"}]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports.free_port())}
    shared |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
