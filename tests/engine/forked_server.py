"""vLLM's API server, engine cores and ranks in forks of one with vLLM loaded: 20 s of CPU less each.

Command line, environment, session, log and watcher are those of the ``ServerProcess`` that production made.
From vLLM's ``main`` on, all code is vLLM's and ROSE's. What vLLM would spawn is forked off a second process
of the server's session. That one has loaded vLLM and never computes, so it has no threads, and nothing that
the API server has opened or changed. A command of ROSE is forked as well as a server, together with the
servers that it starts itself. The services of tests/ray are fresh processes.
"""

import asyncio
import contextlib
import importlib
import multiprocessing
import os
import runpy
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

from preloaded import FORKS, ensure_running, start_fork

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
    _modules: tuple[str, ...] = ()

    def __init__(self, server: ServerProcess, *modules: str) -> None:
        """``server`` is not started. The servers of ``modules`` that it starts itself are forked too."""
        vars(self).update(vars(server))
        self._modules = modules

    @property
    def exit_status(self) -> int | None:
        return self._process.process.exitcode if self._process is not None else None

    def send_signal(self, signum: int) -> None:
        """Its parent, the fork server, may have reaped it before its exit status is known here."""
        with contextlib.suppress(ProcessLookupError):
            super().send_signal(signum)

    def _spawn(self) -> Any:
        if self.log_path is not None:
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
        started, sink = FORKS.Pipe(duplex=False)
        program = _Program.of(self.argv)
        process = start_fork(_run, sink, self.log_path, dict(self._environment), program, self._modules)
        sink.close()
        # Watcher and signals go to the session.
        assert started.poll(START_S), f"{self.name} was not forked within {START_S:.0f} s"
        started.recv()
        return _Forked(process)


@contextlib.contextmanager
def forking(*modules: str) -> Iterator[None]:
    """Meanwhile servers of these modules that this process starts are forked. The process that has vLLM
    loaded is there before, and stays."""
    ensure_running()
    resource_tracker.ensure_running()
    with _forked(modules):
        yield


@contextlib.contextmanager
def _forked(modules: Sequence[str]) -> Iterator[None]:
    start, execute = ServerProcess.start, asyncio.create_subprocess_exec

    def fork(server: ServerProcess) -> ServerProcess:
        if any(module in server.argv for module in modules):
            server.__class__ = ForkedServer
        return start(server)

    async def fork_from_loop(*argv: str, **options: Any) -> Any:
        if any(module in argv for module in modules):
            return _ForkedWithInput(list(argv), options["env"])
        return await execute(*argv, **options)

    with (
        patch.object(ServerProcess, "start", fork),
        patch.object(asyncio, "create_subprocess_exec", fork_from_loop),
    ):
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class _Program:
    """What a command line runs: a module with its arguments, its CPUs, and its niceness."""

    argv: list[str]
    cpus: set[int] | None
    nice: int

    @classmethod
    def of(cls, argv: list[str]) -> "_Program":
        python = argv.index(sys.executable)
        before, (flag, *program) = argv[:python], argv[python + 1 :]
        given = dict(zip(before[::3], before[2::3], strict=True))  # taskset --cpu-list N,N, nice -n N
        assert flag == "-m" and set(given) <= {"taskset", "nice"}, argv
        cpus = {int(cpu) for cpu in given["taskset"].split(",")} if "taskset" in given else None
        return cls(argv=program, cpus=cpus, nice=int(given.get("nice", 0)))


class _Forked:
    """Has what a ServerProcess needs of ``subprocess.Popen``."""

    def __init__(self, process: BaseProcess) -> None:
        self.process = process
        self.pid = process.pid

    def wait(self) -> int | None:
        self.process.join()
        return self.process.exitcode


class _ForkedWithInput:
    """Has what a front of the router needs of ``asyncio.subprocess.Process``."""

    def __init__(self, argv: list[str], environment: dict[str, str]) -> None:
        source, self.stdin = FORKS.Pipe(duplex=False)
        self._started, sink = FORKS.Pipe(duplex=False)
        self._process = start_fork(_run, sink, None, dict(environment), _Program.of(argv), (), source)
        sink.close()
        source.close()
        self.kill = self._process.kill

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    async def wait(self) -> int | None:
        while self.returncode is None:
            await asyncio.sleep(0.1)
        return self.returncode


def _run(
    started: Connection,
    log: Path | None,
    environment: dict[str, str],
    program: _Program,
    modules: Sequence[str],
    standard_input: Connection | None = None,
) -> None:
    """Without a log its output goes where that of the process goes that it is forked off."""
    os.setsid()
    os.nice(program.nice)
    if program.cpus is not None:
        os.sched_setaffinity(0, program.cpus)
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) if log is not None else 1
    given = standard_input.fileno() if standard_input is not None else os.open(os.devnull, os.O_RDONLY)
    for source, target in ((given, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    # Python 3.11 preloads nothing from the folder of the tests.
    for module in ("async_on_cpu", "experts_on_cpu"):
        importlib.import_module(module)
    _fork_what_vllm_spawns()
    started.send(None)
    started.close()
    sys.argv = list(program.argv)
    with _forked(modules):
        runpy.run_module(program.argv[0], run_name="__main__", alter_sys=True)


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
