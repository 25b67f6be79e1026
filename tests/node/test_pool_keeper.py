"""Pool daemons that die are started again, unless one after another ends at once."""

import logging
import os
import signal
import sys
from pathlib import Path

import pytest

from rose.node import pool_keeper
from rose.node.pool_keeper import PoolKeeper
from rose.node.processes import ProcessGroup, ServerProcess

PATIENCE_S = 300.0
POOL = ("gpu0", "--num-slabs", "4")
RUNS = "import time; time.sleep(600)"
FAILS = "raise SystemExit('rose: error: pool: no memory')"


class Node:
    """A node's pool, whose daemons are ``programs``, and a clock."""

    def __init__(self, group: ProcessGroup, folder: Path) -> None:
        self._folder = folder
        self.now_s = 0.0
        self.num_started = 0
        self.program = RUNS
        (first,) = self._describe()
        self.daemons = [group.start(first)]
        self._group = group
        self.keeper = PoolKeeper(group, self.daemons, self._describe, now=lambda: self.now_s)

    def _describe(self) -> list[ServerProcess]:
        self.num_started += 1
        argv = [sys.executable, "-c", self.program, *POOL]
        return [ServerProcess(argv, "pool-gpu0", self._folder / "pool-gpu0.log")]

    @property
    def daemon(self) -> ServerProcess:
        (daemon,) = self._group.servers
        return daemon

    def end(self, after_s: float) -> None:
        """The daemon ends ``after_s`` after its start."""
        self.now_s += after_s
        if self.program == RUNS:
            os.kill(self.daemon.pid, signal.SIGKILL)
        assert self.daemon.wait(PATIENCE_S) is not None
        self.keeper.keep()


def test_a_daemon_that_had_come_up_is_started_again_at_once(tmp_path: Path) -> None:
    with ProcessGroup() as group:
        node = Node(group, tmp_path)
        node.end(after_s=pool_keeper.STEADY_S)
        node.keeper.keep()
        assert node.num_started == 2 and node.daemon.is_alive()
        node.keeper.keep()
        assert node.num_started == 2


def test_daemons_that_never_come_up_are_started_ever_later_and_then_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ProcessGroup() as group, caplog.at_level(logging.WARNING, pool_keeper.logger.name):
        node = Node(group, tmp_path)
        node.program = FAILS
        os.kill(node.daemon.pid, signal.SIGKILL)
        pauses = []
        while True:
            began_s = node.now_s
            num_started = node.num_started
            assert node.daemon.wait(PATIENCE_S) is not None
            while node.num_started == num_started and node.now_s < began_s + 1000:
                node.keeper.keep()
                node.now_s += 1.0
            if node.num_started == num_started:
                break
            pauses.append(node.now_s - began_s)
    assert pauses == pytest.approx([10, 20, 40, 80, 160], abs=1)
    (last_word,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    said = last_word.getMessage()
    assert "6 daemons in a row ended within 60 s" in said and "run: rose pool gpu0 --num-slabs 4;" in said
    assert said.endswith("ends with: rose: error: pool: no memory")
