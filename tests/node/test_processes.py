"""ServerProcess and ProcessGroup on real child processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rose.errors import WorkerError
from rose.node import watcher
from rose.node.processes import ProcessGroup, ServerProcess

SLEEPER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
SPAWNS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
PARENT = [sys.executable, "-c", SPAWNS]
IGNORES = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""
DEAF = [sys.executable, "-c", IGNORES]
FORKS = """
import os, time
if all(os.fork() for _ in range(50)):
    print("up", flush=True)
time.sleep(600)
"""
CROWD = [sys.executable, "-c", FORKS]
PATIENCE_S = 300.0
"""For what takes milliseconds, on a machine that is busy with something else."""


def wait_until(is_true: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def first_line(path: Path) -> str:
    wait_until(lambda: path.exists() and "\n" in path.read_text())
    return path.read_text().splitlines()[0]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_stop_ends_the_server_and_its_children(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with ServerProcess(PARENT, "parent", log) as server:
        child = int(first_line(log))
        assert server.is_alive() and is_running(child)
    assert server.exit_status == -signal.SIGTERM
    assert not is_running(server.pid) and not is_running(child)


def test_stop_kills_a_server_that_ignores_sigterm(tmp_path: Path) -> None:
    server = ServerProcess(DEAF, "deaf", tmp_path / "log").start()
    first_line(tmp_path / "log")
    assert server.stop(grace_s=0.2) == -signal.SIGKILL
    assert server.stop() == -signal.SIGKILL


def test_nothing_of_a_server_runs_when_stop_returns(tmp_path: Path) -> None:
    with ServerProcess(CROWD, "crowd", tmp_path / "log") as server:
        first_line(tmp_path / "log")
        server.stop(grace_s=0.0)
        assert watcher.group_members(server.pid) == []


def test_a_killed_server_takes_its_children_along(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with ServerProcess(PARENT, "parent", log) as server:
        child = int(first_line(log))
        os.kill(server.pid, signal.SIGKILL)
        wait_until(lambda: not is_running(child))
        assert not server.is_alive() and server.exit_status == -signal.SIGKILL


def test_a_killed_supervisor_leaves_nothing_running(tmp_path: Path) -> None:
    script = f"""
import time
from pathlib import Path
from rose.node.processes import ServerProcess
server = ServerProcess({PARENT!r}, "parent", Path({str(tmp_path / "log")!r})).start()
print(server.pid, flush=True)
time.sleep(600)
"""
    supervisor = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    server = int(supervisor.stdout.readline())
    child = int(first_line(tmp_path / "log"))
    supervisor.kill()
    supervisor.wait()
    supervisor.stdout.close()
    wait_until(lambda: not is_running(child) and not is_running(server))


def test_a_server_that_is_replaced_or_stopped_leaves_no_zombie_and_is_never_signalled_again(
    tmp_path: Path,
) -> None:
    with ProcessGroup() as group:
        dead = group.start(ServerProcess([sys.executable, "-c", ""], "dead", tmp_path / "dead"))
        assert dead.wait(PATIENCE_S) == 0
        new = group.replace(dead, ServerProcess(SLEEPER, "new", tmp_path / "log"))
        assert (group.servers, group.dead()) == ((new,), [])
        with pytest.raises(ChildProcessError):  # it has been reaped
            os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOHANG)
        first_line(tmp_path / "log")
        status = new.stop()
        other = subprocess.Popen(SLEEPER, stdout=subprocess.PIPE, start_new_session=True)
        assert new._process is not None and other.stdout is not None
        new._process.pid = other.pid  # as if the kernel gave the pid away again
        assert (new.stop(), other.poll()) == (status, None)
        other.kill()
        other.communicate()


def test_wait_ready_returns_when_health_answers(tmp_path: Path) -> None:
    (tmp_path / "health").write_text("ok")
    argv = [
        sys.executable,
        "-u",
        "-m",
        "http.server",
        "0",
        "--bind",
        "127.0.0.1",
        "--directory",
        str(tmp_path),
    ]
    with ServerProcess(argv, "http", tmp_path / "log") as server:
        port = first_line(tmp_path / "log").split(" port ")[1].split()[0]
        server.wait_ready(f"http://127.0.0.1:{port}/health", timeout_s=PATIENCE_S)


def test_wait_ready_reports_an_early_end_with_the_log(tmp_path: Path) -> None:
    server = ServerProcess(
        [sys.executable, "-c", "raise SystemExit('no memory')"], "broken", tmp_path / "log"
    )
    with server, pytest.raises(WorkerError, match=r"(?s)broken ended with status 1 .*no memory"):
        server.wait_ready("http://127.0.0.1:1/health", timeout_s=PATIENCE_S)


def test_an_engine_that_ends_early_is_reported_with_what_its_core_raised(tmp_path: Path) -> None:
    """As vLLM 0.32 logs it: the core's error, and the API server's traceback behind it."""
    where = "(EngineCore pid=7) ERROR 11-29 00:01:54 [core.py:1510]"
    log = [f"{where} Traceback (most recent call last):", f"{where} ValueError: 18.6 of 23.5 GiB are free"]
    log += ["RuntimeError: Engine core initialization failed. See root cause above."]
    script = f"print(*{log!r}, *['  File'] * 100, sep=chr(10)); raise SystemExit(1)"
    server = ServerProcess([sys.executable, "-c", script], "engine", tmp_path / "log")
    message = "engine ended with status 1 before it was ready: ValueError: 18.6 of 23.5 GiB are free; end of"
    with server, pytest.raises(WorkerError, match=message):
        server.wait_ready("http://127.0.0.1:1/health", timeout_s=PATIENCE_S)


def test_wait_ready_gives_up_at_the_deadline(tmp_path: Path) -> None:
    with (
        ServerProcess(SLEEPER, "mute", tmp_path / "log") as server,
        pytest.raises(WorkerError, match="mute: no http"),
    ):
        server.wait_ready("http://127.0.0.1:1/health", timeout_s=0.2)


def test_cpus_and_nice_apply_before_the_server_runs(tmp_path: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    argv = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0), os.nice(0))"]
    server = ServerProcess(argv, "pinned", tmp_path / "log", cpus=[cpu], nice=3).start()
    assert server.wait(PATIENCE_S) == 0
    server.stop()
    assert server.log_tail() == f"{{{cpu}}} {os.nice(0) + 3}"


def test_unknown_cpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\[4097\] not among"):
        ServerProcess(SLEEPER, "pinned", tmp_path / "log", cpus=[4097])


def test_environment_is_added_to_the_inherited_one(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import os; print(os.environ['ROSE_X'], 'PATH' in os.environ)"]
    server = ServerProcess(argv, "env", tmp_path / "log", env={"ROSE_X": "1"}).start()
    assert server.wait(PATIENCE_S) == 0
    server.stop()
    assert server.log_tail() == "1 True"


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_servers_own_folder_goes_with_it(tmp_path: Path, is_killed: bool) -> None:
    program = (
        "import os, time; open(os.environ['OWN'] + '/file', 'w'); print(os.environ['OWN'], flush=True); "
    )
    argv = [sys.executable, "-c", program + "time.sleep(600)"]
    with ServerProcess(argv, "own", tmp_path / "log", scratch="OWN") as server:
        own = Path(first_line(tmp_path / "log"))
        assert (own / "file").exists()
        if is_killed:
            os.kill(server.pid, signal.SIGKILL)
            wait_until(lambda: not own.exists())
    assert not own.exists()


def test_group_reports_the_dead_and_stops_all(tmp_path: Path) -> None:
    with ProcessGroup() as group:
        first = group.start(ServerProcess(SLEEPER, "first", tmp_path / "1"))
        second = group.start(ServerProcess(SLEEPER, "second", tmp_path / "2"))
        assert group.dead() == []
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: group.dead() == [first])
        assert group.servers == (first, second)
    assert not is_running(second.pid)


def test_start_failure_in_a_group_stops_the_others(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), ProcessGroup() as group:
        first = group.start(ServerProcess(SLEEPER, "first", tmp_path / "1"))
        group.start(ServerProcess(["/no/such/program"], "second", tmp_path / "2"))
    assert not is_running(first.pid)


def test_watcher_ignores_processes_outside_the_session() -> None:
    with subprocess.Popen(SLEEPER) as sleeper:  # in this process's group, so none is named after it
        try:
            assert watcher.group_members(sleeper.pid) == []
        finally:
            sleeper.kill()
