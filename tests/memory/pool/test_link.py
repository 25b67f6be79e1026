"""A client's first words with a daemon, when these do not come in the usual order."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from rose.errors import PoolError
from rose.memory.pool.link import exchange
from rose.memory.pool.pool import describe_pool
from rose.memory.pool.wire import ClientHello, Kind, Refusal


def listen(runtime_dir: Path, backlog: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(runtime_dir / "pool-p.sock"))
    listener.listen(backlog)
    return listener


def test_a_client_that_is_refused_before_it_said_hello_hears_why(runtime_dir: Path) -> None:
    refused = Event()

    class Slow(socket.socket):
        """Has nothing to say before the other side has hung up."""

        def connect(self, address: object) -> None:
            super().connect(address)  # type: ignore[arg-type]
            assert refused.wait(60)

    def refuse() -> None:
        client, _ = listener.accept()
        with client:
            client.sendall(Refusal(refused="full").to_line())
        refused.set()

    with listen(runtime_dir, 1) as listener, ThreadPoolExecutor(1) as threads:
        refusing = threads.submit(refuse)
        with Slow(socket.AF_UNIX) as connection:
            hello = ClientHello(engine_id="", kind=Kind.OBSERVER, pid=os.getpid())
            answer, fds = exchange(connection, runtime_dir / "pool-p.sock", hello)
        refusing.result()
    assert (answer, fds) == (Refusal(refused="full"), [])


def test_a_daemon_whose_queue_is_full_is_waited_for(runtime_dir: Path) -> None:
    with listen(runtime_dir, 0) as listener:
        waiting: list[socket.socket] = []
        with pytest.raises(BlockingIOError):
            while True:
                waiting.append(socket.socket(socket.AF_UNIX))
                waiting[-1].setblocking(False)
                waiting[-1].connect(listener.getsockname())
        with pytest.raises(PoolError, match="too many clients wait for the daemon"):
            describe_pool("p", runtime_dir=runtime_dir, timeout_s=0.2)
        for client in waiting:
            client.close()
