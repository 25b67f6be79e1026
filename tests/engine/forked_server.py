"""vLLM's API server in a process forked off one that has vLLM loaded, which spares it 20 s of imports.

Owns the start of that one interpreter. Command line, environment, session, log and watcher are those of the
``ServerProcess`` that production made; from vLLM's ``main`` on all code is vLLM's and ours, and it spawns its
core as ever. Starts of fresh API servers are tested where the commands are: in tests/node and in the demo.
"""

import os
import runpy
import sys
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from preloaded import FORKS

from rose.node.processes import ServerProcess

START_S = 900.0
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
    started.send(None)
    started.close()
    sys.argv = argv
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
