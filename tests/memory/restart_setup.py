"""What the tests of restarted daemons share: daemons on one pool, and clients without a link of their own."""

import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from pool_setup import PATIENCE_S, POOL, EngineProcess, StartEngine, start_pool, wait_until

from rose.errors import PoolError
from rose.memory.daemon.daemon import DaemonHandle
from rose.memory.ledger.ledger import Ledger
from rose.memory.pool.link import exchange
from rose.memory.pool.pool import PoolClient
from rose.memory.pool.wire import ClientHello, Kind, Refusal, Welcome
from rose.types import Role


class Daemons:
    """Starts one daemon after the other on the same pool."""

    def __init__(self, runtime_dir: Path, stack: ExitStack, num_shards: int = 1) -> None:
        self._runtime_dir = runtime_dir
        self._num_shards = num_shards
        self._stack = stack
        self._current = self.start()

    def start(self, **sizes: int) -> DaemonHandle:
        self._current = self._stack.enter_context(
            start_pool(self._runtime_dir, num_shards=self._num_shards, **sizes)
        )
        return self._current

    def kill(self) -> None:
        os.kill(self._current.pid, signal.SIGKILL)
        self._current.stop()

    def restart(self) -> DaemonHandle:
        self.kill()
        return self.start()


def wait_all_back(ledger: Ledger) -> None:
    wait_until(ledger, lambda: not any(engine.is_leaving for engine in ledger.engines().values()))


def tensor_parallel(start_engine: StartEngine, role: str, engine_id: str) -> list[EngineProcess]:
    """Starts a scheduler and two workers."""
    return [
        start_engine(role, engine_id, "scheduler", 0, 2),
        *(start_engine(role, engine_id, "worker", rank, 2) for rank in (0, 1)),
    ]


def wait_taking_over(runtime_dir: Path) -> None:
    """Returns once a daemon waits for its predecessor's memory."""
    with pytest.raises(PoolError, match="pool p is being taken over from its former daemon"):
        while True:  # the daemon's own start takes its time
            try:
                PoolClient.observe(POOL, runtime_dir=runtime_dir, timeout_s=0.0)
            except PoolError as error:
                if "no daemon" not in str(error):
                    raise
            time.sleep(0.01)


def raw_hello(slot: int = 0) -> ClientHello:
    return ClientHello(role=Role.ROLLOUT, engine_id="raw", kind=Kind.SCHEDULER, pid=os.getpid(), slot=slot)


def attach_raw(runtime_dir: Path) -> tuple[socket.socket, list[int]]:
    """Attaches as slot 1 without a thread that would come back by itself."""
    connection = socket.socket(socket.AF_UNIX)
    answer, fds = exchange(connection, runtime_dir / "pool-p.sock", raw_hello())
    assert isinstance(answer, Welcome) and answer.slot == 1
    return connection, fds


def attach_again(runtime_dir: Path) -> tuple[socket.socket, list[int]]:
    """Attaches as PoolClient does, once a daemon is there and has memory."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            answer, fds = exchange(connection, runtime_dir / "pool-p.sock", raw_hello())
            if isinstance(answer, Welcome):
                return connection, fds
            assert answer.is_transient, answer
        except (ConnectionError, FileNotFoundError):
            pass
        connection.close()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def come_back(runtime_dir: Path, fds: Sequence[int]) -> tuple[socket.socket, list[int]]:
    connection = socket.socket(socket.AF_UNIX)
    answer, received = exchange(connection, runtime_dir / "pool-p.sock", raw_hello(slot=1), fds)
    assert isinstance(answer, Welcome), answer
    return connection, received


def refuse_back(runtime_dir: Path, fds: Sequence[int], reason: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        answer, _ = exchange(connection, runtime_dir / "pool-p.sock", raw_hello(slot=1), fds)
        assert isinstance(answer, Refusal) and not answer.is_transient
        assert re.search(reason, answer.refused), answer
