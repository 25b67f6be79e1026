"""vLLM's API server in a process forked off one that has vLLM loaded: seconds to start instead of forty.

Owns the start of two interpreters: of the API server, and of the engine core, which vLLM spawns on a CPU.
Command line, environment, session, log and watcher are those of the ``ServerProcess`` that production made;
from vLLM's ``main`` on all code is vLLM's and ours, and the workers of several ranks are spawned. Starts of
fresh interpreters are tested where the commands are: in tests/node and in the demo.
"""

import multiprocessing
import os
import runpy
import sys
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from preloaded import FORKS

from rose.node.processes import ServerProcess

START_S = 120.0
"""The first one waits for the imports."""


class ForkedServer(ServerProcess):
    """Runs what another ServerProcess describes, ``python -m MODULE ARGUMENTS``, without its imports."""

    def __init__(self, server: ServerProcess) -> None:
        """``server`` is not started and has a log."""
        vars(self).update(vars(server))
        assert self.argv[:2] == [sys.executable, "-m"] and self.log_path is not None, self.argv

    @property
    def exit_status(self) -> int | None:
        return self._process.process.exitcode if self._process is not None else None

    def _spawn(self) -> Any:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        started, sink = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=_run, args=(sink, self.log_path, dict(self._env), self.argv[2:]))
        process.start()
        sink.close()
        # Watcher and signals go to the session.
        assert started.poll(START_S), f"{self.name} was not forked within {START_S:.0f} s"
        started.recv()
        return _Forked(process)


class _Forked:
    """As much of ``subprocess.Popen`` as a ServerProcess needs."""

    def __init__(self, process: BaseProcess) -> None:
        self.process = process
        self.pid = process.pid

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode


def _run(started: Connection, log: Path, environment: dict[str, str], argv: list[str]) -> None:
    """``argv``: a module and its arguments."""
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment)
    _fork_the_core()
    started.send(None)
    started.close()
    sys.argv = argv
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


def _fork_the_core() -> None:
    """This process forks where vLLM asks it to spawn; a process that it forks spawns again."""
    get_context: Any = multiprocessing.get_context

    def spawn_again() -> None:
        multiprocessing.get_context = get_context

    os.register_at_fork(after_in_child=spawn_again)
    multiprocessing.get_context = lambda method=None: get_context("fork" if method == "spawn" else method)
