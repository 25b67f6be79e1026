"""Folders of servers that were killed together with all that would have removed them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from rose.node import scratch
from rose.node.scratch import ScratchFolder, remove_stale

PATIENCE_S = 300.0
SUPERVISOR = """
import sys, time
from rose.node.processes import ServerProcess
sleeps = "import time; time.sleep(600)"
server = ServerProcess([sys.executable, "-c", sleeps], "own", None, scratch="OWN").start()
print(server.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, in which every folder counts as old."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(scratch, "_NEW_S", -1.0)
    return tmp_path


def kill(*pids: int) -> None:
    """SIGKILLs the processes, in this order, and waits for their ends."""
    processes = [psutil.Process(pid) for pid in pids]
    for process in processes:
        process.send_signal(signal.SIGSTOP)  # else a watcher would see its supervisor die, and clean up
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, PATIENCE_S)


def test_a_folder_stays_while_its_server_lives_and_goes_at_the_next_start(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", SUPERVISOR], stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        server = int(supervisor.stdout.readline())
        watchers = {child.pid for child in psutil.Process(supervisor.pid).children()} - {server}
        try:
            (own,) = folder.glob(f"{scratch.PREFIX}*")
            kill(*watchers, supervisor.pid)
            remove_stale()
            assert own.is_dir()
        finally:
            kill(server)
    new = ScratchFolder()
    assert list(folder.glob(f"{scratch.PREFIX}*")) == [new.path]
    new.remove()
    assert list(folder.iterdir()) == []


def test_a_new_folder_and_other_peoples_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, linked = folder / f"{scratch.PREFIX}made", folder / f"{scratch.PREFIX}linked"
    made.mkdir()
    linked.symlink_to(folder)
    monkeypatch.setattr(scratch, "_NEW_S", 60.0)
    remove_stale()
    assert made.is_dir() and linked.is_symlink()
    os.utime(made, (0, time.time() - 61))
    remove_stale()
    assert not made.exists() and linked.is_symlink()
