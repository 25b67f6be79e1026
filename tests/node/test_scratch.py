"""Folders of servers that were killed together with all that would have removed them."""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
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
    """The folder for temporary files, in which no folder counts as new."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(scratch, "NEW_S", float("-inf"))
    return tmp_path


def kill(processes: Sequence[psutil.Process]) -> None:
    """Kills the processes at once: a watcher does not see its supervisor die, and cleans nothing up."""
    for act in (psutil.Process.suspend, psutil.Process.kill):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                act(process)
    deadline = time.monotonic() + PATIENCE_S
    while any(is_running(process) for process in processes):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def is_running(process: psutil.Process) -> bool:
    """Returns whether it has not ended; nobody may have waited for it yet."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def folders(parent: Path) -> list[Path]:
    return list(parent.glob(f"{scratch.PREFIX}*"))


def test_a_folder_stays_while_its_server_lives_and_goes_at_the_next_start(folder: Path) -> None:
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR], stdout=subprocess.PIPE)
    assert supervisor.stdout is not None
    with supervisor.stdout as output:
        server = psutil.Process(int(output.readline()))
    own_supervisor = psutil.Process(supervisor.pid)
    others = [child for child in own_supervisor.children() if child != server]
    try:
        (own,) = folders(folder)
        remove_stale()
        assert own.is_dir(), "supervisor and server live"
        kill([*others, own_supervisor])
        supervisor.wait()
        remove_stale()
        assert own.is_dir(), "the server lives"
    finally:
        kill([*others, own_supervisor, server])
        supervisor.wait()
    new = ScratchFolder()
    assert folders(folder) == [new.path]
    new.remove()
    assert folders(folder) == []


def test_a_supervisor_keeps_the_folder_of_its_server_that_has_died(folder: Path) -> None:
    own = ScratchFolder()
    remove_stale()
    assert folders(folder) == [own.path]
    own.remove()


def test_new_folders_and_links_stay(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, linked = folder / f"{scratch.PREFIX}made", folder / f"{scratch.PREFIX}linked"
    made.mkdir()
    linked.symlink_to(folder)
    monkeypatch.setattr(scratch, "NEW_S", 3600.0)
    remove_stale()
    assert made.is_dir() and linked.is_symlink()
    os.utime(made, (0, time.time() - 3601.0))
    remove_stale()
    assert not made.exists() and linked.is_symlink()
