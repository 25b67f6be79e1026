"""Starts server processes under one supervisor, waits until they are ready, and stops them all.

Owns: the child processes that it started, each leader of its own session, and their log files.
Promises: ``stop`` ends the server and everything it spawned; when the supervisor itself dies in any way, a
watcher process does the same (watcher.py). A server that fails to come up raises with the tail of its log.
Never restarts anything, and never signals a process that it didn't start.
"""

import http.client
import logging
import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from rose.config import child_environment
from rose.errors import WorkerError
from rose.node import watcher
from rose.node.scratch import ScratchFolder
from rose.node.signals import signals_wait

logger = logging.getLogger(__name__)

GRACE_S = 15.0
"""Between SIGTERM and SIGKILL: vLLM's API server takes up to 5 s to end its engine core."""
POLL_S = 0.1
LOG_TAIL_LINES = 25
CAUSE_LINES = 400
"""How many last lines of a log are searched for a cause. The tracebacks of vLLM's engine core and of its API
server have about 150 lines together."""
_VLLM_ERROR = re.compile(
    r"^\(\w+ pid=\d+\) ERROR [^\]]*\] ((?:\w+\.)*\w+(?:Error|Exception): .*)$", re.MULTILINE
)


class ServerProcess:
    """One child process in its own session, with a log file and a readiness check."""

    def __init__(
        self,
        argv: Sequence[str],
        name: str,
        log_path: Path | None,
        env: Mapping[str, str] | None = None,
        cpus: Iterable[int] | None = None,
        nice: int = 0,
        folder: Path | None = None,
        scratch: str | None = None,
    ) -> None:
        """Describes the process; ``start`` runs it.

        env: variables added to the inherited ones. cpus: pins the process to these. log_path: receives
        stdout and stderr (appended); None leaves both on the supervisor's terminal. folder: where it runs.
        scratch: an environment variable that is to name an empty folder, removed with the server; one that is
        set already keeps its value.
        """
        self.name = name
        self.log_path = log_path
        self.argv = [*_pinning(cpus, nice), *argv]
        self.added_env = dict(env) if env is not None else {}
        self._env = child_environment(env)
        self._folder = folder
        self._scratch_variable = scratch
        self._scratch: ScratchFolder | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None
        self._exit_status: int | None = None
        self._is_reaped = False

    @property
    def pid(self) -> int:
        """Returns the server's pid, which is also its process group and session."""
        if self._process is None:
            raise ValueError(f"{self.name} was not started")
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """Returns its exit status, -N for signal N; None while it runs."""
        if self._exit_status is None and self._process is not None:
            # WNOWAIT keeps the zombie, so its pid (and group id) can't be reused before stop().
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                is_exit = ended.si_code == os.CLD_EXITED
                self._exit_status = ended.si_status if is_exit else -ended.si_status
        return self._exit_status

    def is_alive(self) -> bool:
        """Returns whether the process was started and has not ended."""
        return self._process is not None and self.exit_status is None

    def start(self) -> Self:
        """Runs the process. Raises ValueError if it was started before."""
        if self._process is not None:
            raise ValueError(f"{self.name} was already started, pid {self.pid}")
        watch = [sys.executable, "-I", "-S", watcher.__file__, str(os.getpid())]
        with signals_wait():  # a signal between the two would leave a process that nobody ends
            scratch = self._make_scratch()
            self._process = self._spawn()
            watch += [str(self.pid), str(GRACE_S), *scratch]
            self._watcher = subprocess.Popen(watch, start_new_session=True, stdin=subprocess.DEVNULL)
        logger.info("started name=%s pid=%d log=%s", self.name, self.pid, self.log_path)
        return self

    def _make_scratch(self) -> list[str]:
        if self._scratch_variable is None or self._scratch_variable in self._env:
            return []
        self._scratch = ScratchFolder()
        return [str(self._scratch.path)]

    @property
    def _environment(self) -> dict[str, str]:
        """The variables of the process. The folder of one server is not that of another one like it."""
        if self._scratch_variable is None or self._scratch is None:
            return self._env
        return {**self._env, self._scratch_variable: str(self._scratch.path)}

    def _spawn(self) -> subprocess.Popen[bytes]:
        with ExitStack() as when_started:
            log = None
            if self.log_path is not None:
                self.log_path.parent.mkdir(parents=True, exist_ok=True)
                log = when_started.enter_context(self.log_path.open("ab"))
            return subprocess.Popen(
                self.argv,
                env=self._environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT if log is not None else None,
                start_new_session=True,
                # The folder stays locked as long as the server lives.
                pass_fds=[self._scratch.fd] if self._scratch is not None else [],
            )

    def wait_ready(self, url: str, timeout_s: float) -> None:
        """Returns once ``GET url`` answers 200.

        Raises: WorkerError with the log's tail when the process ends first or the time is over.
        """
        self.wait_until(lambda: answers_ok(url), url, timeout_s)

    def wait_until(self, is_ready: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Returns once ``is_ready()`` is true; raises like ``wait_ready``, naming ``what``."""
        deadline = time.monotonic() + timeout_s
        while self.is_alive():
            if is_ready():
                return
            if time.monotonic() >= deadline:
                raise WorkerError(f"{self.name}: no {what} after {timeout_s:.0f} s{self._log_note()}")
            time.sleep(POLL_S)
        ended = f"{self.name} ended with status {self.exit_status} before it was ready"
        raise WorkerError(f"{ended}{self._cause()}{self._log_note()}")

    def wait(self, timeout_s: float) -> int | None:
        """Waits for the process to end by itself. Returns its exit status, or None if it still runs."""
        deadline = time.monotonic() + timeout_s
        while self.is_alive() and time.monotonic() < deadline:
            time.sleep(min(POLL_S, timeout_s))
        return self.exit_status

    def send_signal(self, signum: int) -> None:
        """Signals the server itself (not its children); does nothing once it has ended."""
        if self.is_alive():
            os.kill(self.pid, signum)

    def stop(self, grace_s: float = GRACE_S) -> int | None:
        """Sends SIGTERM, then SIGKILL to the whole group. Returns the exit status; may be called again.

        Nothing of the group runs any more when it returns: what they used is free for others.
        """
        if self._process is None or self._is_reaped:  # another process may have its pid by now
            return self._exit_status
        self.send_signal(signal.SIGTERM)
        if self.wait(grace_s) is None:
            logger.warning(
                "killing name=%s pid=%d: still running %.0f s after SIGTERM", self.name, self.pid, grace_s
            )
        if left := watcher.kill_group(self.pid, GRACE_S):
            logger.error("still there after SIGKILL name=%s pids=%s", self.name, left)
        self._exit_status = self._process.wait()
        self._is_reaped = True
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.wait()
            self._watcher = None
            if self._scratch is not None:
                self._scratch.remove()
            logger.info("stopped name=%s pid=%d status=%s", self.name, self.pid, self.exit_status)
        return self._exit_status

    def log_tail(self, num_lines: int = LOG_TAIL_LINES) -> str:
        """Returns the last lines of the log, or an empty string when it writes to the terminal."""
        if self.log_path is None or not self.log_path.exists():
            return ""
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def _cause(self) -> str:
        """Returns the last error that vLLM logged: its API server ends with a traceback that has none."""
        found = _VLLM_ERROR.findall(self.log_tail(CAUSE_LINES))
        return f": {found[-1]}" if found else ""

    def _log_note(self) -> str:
        if self.log_path is None:
            return ""
        return f"; end of {self.log_path}:\n{self.log_tail()}"

    def __enter__(self) -> Self:
        return self if self._process is not None else self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


class ProcessGroup:
    """Servers that live and die together: leaving the ``with`` block stops them all, latest first."""

    def __init__(self) -> None:
        self._servers: list[ServerProcess] = []

    @property
    def servers(self) -> tuple[ServerProcess, ...]:
        """Returns the processes in the order in which they were started."""
        return tuple(self._servers)

    def start(self, server: ServerProcess) -> ServerProcess:
        """Starts ``server`` and takes it over."""
        self._servers.append(server)
        return server.start()

    def replace(self, dead: ServerProcess, server: ServerProcess) -> ServerProcess:
        """Starts ``server`` in place of one that has ended, of which nothing is left then."""
        dead.stop()
        self._servers[self._servers.index(dead)] = server
        return server.start()

    def dead(self) -> list[ServerProcess]:
        """Returns the servers that have ended without being stopped."""
        return [server for server in self._servers if not server.is_alive()]

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Stops every server; all get SIGTERM first, so the slow ones end side by side."""
        deadline = time.monotonic() + grace_s
        for server in reversed(self._servers):
            server.send_signal(signal.SIGTERM)
        while self._servers:
            self._servers[-1].stop(max(0.0, deadline - time.monotonic()))
            self._servers.pop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _pinning(cpus: Iterable[int] | None, nice: int) -> list[str]:
    """Returns the command prefix that pins and nices a process before its first thread exists."""
    prefix = []
    if cpus is not None:
        wanted = sorted(set(cpus))
        missing = [cpu for cpu in wanted if cpu not in os.sched_getaffinity(0)]
        if missing or not wanted:
            raise ValueError(f"cpus {wanted}: {missing} not among {sorted(os.sched_getaffinity(0))}")
        prefix += ["taskset", "--cpu-list", ",".join(map(str, wanted))]
    if nice:
        prefix += ["nice", "-n", str(nice)]
    return prefix


def answers_ok(url: str) -> bool:
    """Returns whether the URL answers 200, asked without proxies: the servers are on this host."""
    parts = urlsplit(url)
    host = parts.hostname or "127.0.0.1"
    connection = http.client.HTTPConnection(host, parts.port, timeout=5.0)
    if parts.scheme == "https":
        # The process is our own, and is sent nothing secret: it is asked before it is known what it shows.
        unverified = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection(host, parts.port, timeout=5.0, context=unverified)
    try:
        connection.request("GET", parts.path or "/")
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):  # not listening yet
        return False
    finally:
        connection.close()
