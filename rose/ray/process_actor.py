"""The actor that keeps one process of ROSE on the node that Ray chose.

The process is the one that `rose relay`, `rose router` or `rose node` starts. It answers its clients itself,
so no turn passes the actor. It ends with the actor, however that ends, and is not started again.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
import yaml

from rose.config import Settings
from rose.node.launch import READY_TIMEOUT_S
from rose.node.node_config import EngineConfig
from rose.node.processes import ServerProcess, answers_ok
from rose.scheduler.rollout.placing.views import WorkerKind
from rose.types import Role

START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStatus:
    """What an actor knows about its process."""

    node: str
    """Ray's id of the node."""
    host: str
    urls: tuple[str, ...]
    """Where the process answers; empty until it does."""
    pid: int | None
    exit_status: int | None
    log: str


class ProcessActor:
    """A Ray actor with two threads: one starts or stops the process, the other answers meanwhile."""

    def __init__(self, name: str, keys: Mapping[str, str], is_insecure: bool) -> None:
        self._name = name
        self._host = str(ray.util.get_node_ip_address())
        self._folder = Settings.from_environment().make_runtime_dir() / f"ray-{name}"
        self._folder.mkdir(exist_ok=True)
        self._log = self._folder / "process.log"
        self._log.unlink(missing_ok=True)  # it holds an earlier process's URL
        self._process: ServerProcess | None = None
        self._urls: tuple[str, ...] = ()
        self._env = dict(keys)
        self._flags = ["--insecure"] if is_insecure else []

    def start_relay(self, config: Mapping[str, Any]) -> str:
        """Starts a relay and returns its URL. Raises: WorkerError with the end of the log."""
        host = config["host"] if config["host"] is not None else self._host
        argv = ["-m", "rose.transfer.relay.server", "--kind", config["kind"], "--host", host]
        argv += ["--port", str(config["port"]), "--capacity-bytes", str(config["capacity_bytes"])]
        argv += ["--protocol", config["protocol"]]
        argv += ["--devices", ",".join(config["devices"])] if config["devices"] else []
        self._run(argv)
        return self._wait_told("relay's URL", _relay_url)

    def start_router(self, config: Mapping[str, Any], workers: list[dict[str, Any]]) -> str:
        """Starts a router for these workers and those of its own configuration; returns its URL."""
        known = [*config.get("workers", ()), *workers]
        content = {"host": self._host, **config, "workers": known}
        self._run(["-m", "rose.scheduler.rollout.http.command", str(self._write(content))])
        return self._wait_told("router's URL", _router_url)

    def start_node(self, config: Mapping[str, Any], relay_url: str | None) -> list[dict[str, Any]]:
        """Starts a pool and its engines; returns the rollout engines as a router's workers."""
        engines = [{"host": self._host, **engine} for engine in config["engines"]]
        relay = {"relay": relay_url} if relay_url is not None else {}
        logs = self._folder / "logs"
        path = self._write({**relay, **config, "engines": engines})
        process = self._run(["-m", "rose.node.agent", str(path), "--log-dir", str(logs)])
        roles = {EngineConfig.model_validate(each).url: Role(each["role"]) for each in engines}
        healths = [f"{url}/health" for url in roles]
        process.wait_until(lambda: all(map(answers_ok, healths)), "healthy engines", READY_TIMEOUT_S)
        self._urls = tuple(roles)
        kind = WorkerKind.SERVING if Role.SERVING in roles.values() else WorkerKind.DEDICATED
        return [{"url": url, "kind": kind.value} for url, role in roles.items() if role is Role.ROLLOUT]

    def status(self) -> dict[str, Any]:
        """Returns a ProcessStatus as plain values."""
        process = self._process
        return asdict(
            ProcessStatus(
                node=str(ray.get_runtime_context().get_node_id()),
                host=self._host,
                urls=self._urls,
                pid=process.pid if process is not None else None,
                exit_status=process.exit_status if process is not None else None,
                log=str(self._log),
            )
        )

    def stop(self) -> None:
        """Ends the process with SIGTERM, then SIGKILL; returns when it has ended."""
        if self._process is not None:
            self._process.stop()

    def _write(self, content: Mapping[str, Any]) -> Path:
        path = self._folder / "process.yaml"
        path.touch()
        path.chmod(0o600)  # it may hold the keys of a router and its jobs
        path.write_text(yaml.safe_dump(dict(content)))
        return path

    def _run(self, argv: list[str]) -> ServerProcess:
        command = [sys.executable, *argv, *self._flags]
        process = ServerProcess(command, self._name, self._log, env=self._env)
        self._process = process.start()
        return self._process

    def _wait_told(self, what: str, find: Callable[[str], str | None]) -> str:
        """Waits for the URL that the process writes into its log once it is ready."""
        assert self._process is not None
        self._process.wait_until(lambda: find(self._told()) is not None, what, START_TIMEOUT_S)
        url = find(self._told())
        assert url is not None
        self._urls = (url,)
        return url

    def _told(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""


def _relay_url(log: str) -> str | None:
    for line in log.splitlines():
        if line.startswith("{") and line.endswith("}"):
            url: str = json.loads(line)["url"]
            return url
    return None


def _router_url(log: str) -> str | None:
    ready = "rose router ready "
    return next((line.removeprefix(ready) for line in log.splitlines() if line.startswith(ready)), None)
