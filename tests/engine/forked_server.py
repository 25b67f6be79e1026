"""vLLM's API server, engine cores and ranks in forks of one with vLLM loaded: 20 s of CPU less each.

Command line, environment, session, log and watcher are those of the ``ServerProcess`` that production made.
From vLLM's ``main`` on, all code is vLLM's and ROSE's. What vLLM would spawn is forked off a second process
of the server's session. That one has loaded vLLM and never computes, so it has no threads, and nothing that
the API server has opened or changed. tests/node and tests/ray start fresh processes.
"""

import contextlib
import importlib
import multiprocessing
import os
import runpy
import signal
import socket
import sys
from collections.abc import Iterator
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

from preloaded import FORKS

from rose.node.processes import ServerProcess

# Their stubs leave out what is used here.
_connection: Any = connection
_multiprocessing: Any = multiprocessing
_forkserver: Any = importlib.import_module("multiprocessing.forkserver")
START_S = 900.0
"""The first one waits for the imports."""


class ForkedServer(ServerProcess):
    """Runs what another ServerProcess describes, ``python -m MODULE ARGUMENTS``, without its imports."""

    _process: Any

    def __init__(self, server: ServerProcess) -> None:
        """``server`` is not started and has a log."""
        vars(self).update(vars(server))

    @property
    def exit_status(self) -> int | None:
        return self._process.process.exitcode if self._process is not None else None

    def send_signal(self, signum: int) -> None:
        """Its parent, the fork server, may have reaped it before its exit status is known here."""
        with contextlib.suppress(ProcessLookupError):
            super().send_signal(signum)

    def _spawn(self) -> Any:
        assert self.log_path is not None
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        started, sink = FORKS.Pipe(duplex=False)
        cpus, argv = _module_of(self.argv)
        process = FORKS.Process(target=_run, args=(sink, self.log_path, dict(self._env), cpus, argv))
        process.start()
        sink.close()
        # Watcher and signals go to the session.
        assert started.poll(START_S), f"{self.name} was not forked within {START_S:.0f} s"
        started.recv()
        return _Forked(process)


@contextlib.contextmanager
def forking(*modules: str) -> Iterator[None]:
    """Meanwhile servers of these modules that this process starts are forked. The process that has vLLM
    loaded is there before, and stays."""
    start = ServerProcess.start

    def fork(server: ServerProcess) -> ServerProcess:
        if any(module in server.argv for module in modules):
            server.__class__ = ForkedServer
        return start(server)

    _forkserver.ensure_running()
    resource_tracker.ensure_running()
    with patch.object(ServerProcess, "start", fork):
        yield


def _module_of(argv: list[str]) -> tuple[set[int] | None, list[str]]:
    """The CPUs that the command line pins its process to, if it does; and the module with its arguments."""
    at = argv.index(sys.executable)
    assert argv[at + 1] == "-m" and argv[:at] in ([], ["taskset", "--cpu-list", argv[at - 1]]), argv
    return ({int(cpu) for cpu in argv[at - 1].split(",")} if at else None), argv[at + 2 :]


class _Forked:
    """Has what a ServerProcess needs of ``subprocess.Popen``."""

    def __init__(self, process: BaseProcess) -> None:
        self.process = process
        self.pid = process.pid

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode


def _run(
    started: Connection, log: Path, environment: dict[str, str], cpus: set[int] | None, argv: list[str]
) -> None:
    """``argv``: a module and its arguments."""
    os.setsid()
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment)
    _fork_what_vllm_spawns()
    started.send(None)
    started.close()
    sys.argv = argv
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


def _fork_what_vllm_spawns() -> None:
    """Starts a fork server of this session, off which all that is to be spawned will be forked."""
    alive_source, alive_sink = os.pipe()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(_connection.arbitrary_address("AF_UNIX"))
    listener.listen()
    # Engine cores inherit all this and fork their ranks off the same process.
    server = _forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd = listener.getsockname(), alive_sink
    server.ensure_running = resource_tracker.ensure_running
    get_context = _multiprocessing.get_context
    _multiprocessing.get_context = lambda method=None: (
        _Forking() if method == "spawn" else get_context(method)
    )
    if os.fork() == 0:
        os.close(alive_sink)
        # It ends with its last client: the server's stop signal goes to the whole session.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
        try:
            _forkserver.main(listener.fileno(), alive_source, [])
        finally:
            os._exit(0)
    os.close(alive_source)
    listener.close()


class _ForkedChild(ForkServerProcess):
    """Gets the environment that its parent has by the time it starts it, as a spawned process does."""

    def start(self) -> None:
        self._environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class _Forking(ForkServerContext):
    Process = _ForkedChild
