"""A command of ROSE with its servers, which are forked off a process that has loaded vLLM."""

import dataclasses
import re
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from forked_server import ForkedServer

from rose.config import Settings
from rose.node import checks
from rose.node.processes import ServerProcess
from rose.ports import free_port
from tests.commands import in_sessions

READY_TIMEOUT_S = 900
END_TIMEOUT_S = 300.0


def wait_until(is_true: Callable[[], bool], timeout_s: float = END_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.1)


class Home:
    """What a command has for itself alone: a model, a port, a runtime directory, a cache, logs."""

    def __init__(self, folder: Path, model: Path, undo: ExitStack) -> None:
        self.folder = folder
        self.model = shutil.copytree(model, folder / "model")
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.runtime_dir = folder / "run"
        self.runtime_dir.mkdir(mode=0o700)
        self._environment = {
            "ROSE_RUNTIME_DIR": str(self.runtime_dir),
            "ROSE_CACHE_DIR": str(folder / "cache"),
        }
        self._undo = undo
        self.processes: dict[str, ServerProcess] = {}

    def start(self, name: str, *arguments: str) -> None:
        """`rose NAME ARGUMENTS`, stopped after the tests."""
        argv = [sys.executable, "-m", "rose.cli", name, *arguments]
        command = ServerProcess(argv, name, self.folder / f"{name}.log", self._environment)
        process = ForkedServer(command, "vllm.entrypoints.openai.api_server")
        self.processes[name] = self._undo.enter_context(process)

    def running(self, name: str) -> list[int]:
        """Returns the processes of the command and of all servers that it has started."""
        started = re.findall(r"started name=\S+ pid=(\d+)", self.log(name))
        return in_sessions({self.processes[name].pid, *map(int, started)})

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def status_pages(self) -> list[Path]:
        return list(self.runtime_dir.glob("engine-*.page"))

    @property
    def settings(self) -> Settings:
        return dataclasses.replace(Settings.from_environment(), runtime_dir=self.runtime_dir)

    def has_pool(self, name: str) -> bool:
        return checks.find_pool(self.settings, name) is not None
