"""Pool daemons that die are started again, unless one after another ends at once."""

import logging
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest

from rose.node import pool_keeper
from rose.node.pool_keeper import PoolKeeper
from rose.node.processes import ProcessGroup, ServerProcess

PATIENCE_S = 300.0
RUNS = [sys.executable, "-c", "import time; time.sleep(600)"]
FAILS = [sys.executable, "-c", "raise SystemExit('no memory')"]
CANNOT_START = ["/no/such/program"]


class Node:
    """A node with one pool, whose next daemon runs ``argv``, and a clock."""

    def __init__(self, group: ProcessGroup, folder: Path) -> None:
        self._folder = folder
        self._group = group
        self.now_s = 0.0
        self.num_described = 0
        self.argv = RUNS
        pools = [group.start(each) for each in self._describe()]
        self.keeper = PoolKeeper(group, pools, self._describe, now=lambda: self.now_s)

    def _describe(self) -> list[ServerProcess]:
        self.num_described += 1
        log, env = self._folder / "pool-gpu0.log", {"CUDA_VISIBLE_DEVICES": "2,3"}
        return [ServerProcess(self.argv, "pool-gpu0", log, env)]

    @property
    def daemon(self) -> ServerProcess:
        (daemon,) = self._group.servers
        return daemon

    def kill(self) -> None:
        os.kill(self.daemon.pid, signal.SIGKILL)
        assert self.daemon.wait(PATIENCE_S) is not None

    def pause_s(self) -> float:
        """Returns how long the keeper waits before it starts the next daemon; inf if it never does."""
        began_s, num_described = self.now_s, self.num_described
        while self.num_described == num_described:
            self.keeper.keep()
            if self.num_described == num_described:
                self.now_s += 1.0
            if self.now_s > began_s + 1000.0:
                return float("inf")
        return self.now_s - began_s


def test_a_daemon_that_ran_for_long_is_started_again_at_once_and_once(tmp_path: Path) -> None:
    with ProcessGroup() as group:
        node = Node(group, tmp_path)
        node.now_s += pool_keeper.STEADY_S
        node.kill()
        assert node.pause_s() <= 1.0
        assert node.daemon.is_alive()
        assert node.pause_s() == float("inf")


def test_a_daemon_that_ran_for_long_ends_a_row_of_failures(tmp_path: Path) -> None:
    with ProcessGroup() as group:
        node = Node(group, tmp_path)
        for ran_s, pause_s in ((0.0, 10), (0.0, 20), (pool_keeper.STEADY_S, 0), (0.0, 10)):
            node.now_s += ran_s
            node.kill()
            assert node.pause_s() == pytest.approx(pause_s, abs=1)


@pytest.mark.parametrize("argv", [FAILS, CANNOT_START])
def test_a_daemon_that_keeps_failing_is_started_ever_later_and_then_given_up_with_its_command(
    argv: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ProcessGroup() as group, caplog.at_level(logging.WARNING, pool_keeper.logger.name):
        node = Node(group, tmp_path)
        node.argv = argv
        node.kill()
        for pause_s in (10, 20, 40, 80, 160):
            assert node.pause_s() == pytest.approx(pause_s, abs=1)
            node.daemon.wait(PATIENCE_S)
        assert node.pause_s() == float("inf")
    (last_word,) = [text for text in caplog.messages if text.startswith("gave up")]
    assert "name=pool-gpu0: it ended 6 times in a row within 60 s" in last_word
    assert last_word.endswith(f": env CUDA_VISIBLE_DEVICES=2,3 {shlex.join(argv)}")
