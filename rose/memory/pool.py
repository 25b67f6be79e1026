"""One process's connection to a slab pool.

Owns the client's side of the daemon's socket and the shared memory received over it. Promises one clear
PoolError when there is no pool or it won't have us, and that everything received keeps working if the
daemon dies later. Never moves a slab itself: that is the ledger's and the address range's work.
"""

import logging
import mmap
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from rose._shm import Words
from rose._vmm import SlabFile
from rose.config import Settings
from rose.errors import PoolError
from rose.memory.ledger import WORD_BYTES, Ledger
from rose.memory.wire import (
    BOARD_BYTES,
    MAX_LINE_BYTES,
    NUM_FDS,
    Bye,
    Hello,
    Kind,
    Refusal,
    Welcome,
    read_answer,
    socket_path,
)
from rose.types import Role

logger = logging.getLogger(__name__)

_RETRY_S = 0.05
"""While the daemon is starting or an engine's predecessor is being buried; both take tens of ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """What a pool consists of."""

    num_slabs: int
    slab_bytes: int
    headroom_slabs: int


class PoolClient:
    """An attached scheduler, worker or observer. Made by :meth:`attach` or :meth:`observe`."""

    def __init__(self, connection: socket.socket, welcome: Welcome, fds: list[int]) -> None:
        """Takes the connection over, not the descriptors. Raises: PoolError for an unknown ledger layout."""
        self._connection = connection
        self.slot = welcome.slot
        """This engine's slot in the ledger; 0 for an observer."""
        self.num_slabs = welcome.num_slabs
        self.slab_bytes = welcome.slab_bytes
        self.headroom_slabs = welcome.headroom_slabs
        self.daemon_pid = welcome.daemon_pid
        slabs_fd, ledger_fd, board_fd = fds
        self.slab_file = SlabFile.from_fd(slabs_fd, welcome.slab_bytes)
        self.ledger = Ledger(mmap.mmap(ledger_fd, welcome.ledger_words * WORD_BYTES))
        self.board_words = Words(mmap.mmap(board_fd, BOARD_BYTES))

    @classmethod
    def attach(
        cls,
        name: str,
        *,
        role: Role,
        engine_id: str,
        kind: Kind,
        rank: int = 0,
        world_size: int = 1,
        runtime_dir: Path | None = None,
        timeout_s: float = 5.0,
    ) -> Self:
        """Joins an engine's scheduler or worker to a pool, waiting for the daemon to listen.

        The engine keeps its slabs while any of its processes lives. ``runtime_dir`` None takes the
        environment's. Raises: PoolError, one line, if there is no daemon or it refuses.
        """
        hello = Hello(
            role=role, engine_id=engine_id, kind=kind, rank=rank, world_size=world_size, pid=os.getpid()
        )
        return cls._join(name, hello, runtime_dir, timeout_s)

    @classmethod
    def observe(cls, name: str, *, runtime_dir: Path | None = None, timeout_s: float = 5.0) -> Self:
        """Opens a pool to look at its ledger and board. Raises: PoolError if there is no daemon."""
        hello = Hello(engine_id="", kind=Kind.OBSERVER, pid=os.getpid())
        return cls._join(name, hello, runtime_dir, timeout_s)

    @classmethod
    def _join(cls, name: str, hello: Hello, runtime_dir: Path | None, timeout_s: float) -> Self:
        folder = runtime_dir if runtime_dir is not None else Settings.from_environment().runtime_dir
        path = socket_path(folder, name)
        deadline = time.monotonic() + timeout_s
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(max(deadline - time.monotonic(), _RETRY_S))
                answer, fds = _exchange(connection, path, hello)
                if isinstance(answer, Welcome):
                    client = cls._open(connection, answer, fds)
                    logger.info("attached pool=%s slot=%d kind=%s", name, client.slot, hello.kind)
                    return client
                reason, is_transient = answer.refused, answer.is_transient
            except (FileNotFoundError, ConnectionRefusedError):
                reason, is_transient = f"pool {name} has no daemon ({path}); start one with --num-slabs", True
            except OSError as error:
                connection.close()
                raise PoolError(f"pool {name}: the daemon at {path} does not answer ({error})") from error
            except BaseException:
                connection.close()
                raise
            connection.close()
            if not is_transient or time.monotonic() + _RETRY_S > deadline:
                raise PoolError(reason)
            time.sleep(_RETRY_S)

    @classmethod
    def _open(cls, connection: socket.socket, welcome: Welcome, fds: list[int]) -> Self:
        try:
            if len(fds) != NUM_FDS:
                raise PoolError(f"the pool daemon sent {len(fds)} descriptors, expected {NUM_FDS}")
            return cls(connection, welcome, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        """Leaves the pool. The caller has unmapped every slab: they may go to another engine right away.

        Idempotent. Without it the daemon waits for the process to end.
        """
        if self.slot:
            try:
                self._connection.sendall(Bye().to_line())
            except OSError as error:
                logger.debug("bye not delivered slot=%d error=%s", self.slot, error)
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def describe_pool(name: str, *, runtime_dir: Path | None = None, timeout_s: float = 5.0) -> PoolSize:
    """What a running pool consists of. Raises: PoolError if there is no daemon."""
    with PoolClient.observe(name, runtime_dir=runtime_dir, timeout_s=timeout_s) as client:
        return PoolSize(
            num_slabs=client.num_slabs, slab_bytes=client.slab_bytes, headroom_slabs=client.headroom_slabs
        )


def _exchange(connection: socket.socket, path: Path, hello: Hello) -> tuple[Welcome | Refusal, list[int]]:
    """Hello out, answer and descriptors in. Raises: OSError, PoolError."""
    connection.connect(str(path))
    connection.sendall(hello.to_line())
    line, fds, _, _ = socket.recv_fds(connection, MAX_LINE_BYTES, NUM_FDS, socket.MSG_CMSG_CLOEXEC)
    try:
        while not line.endswith(b"\n"):
            more = connection.recv(MAX_LINE_BYTES)
            if not more:
                raise ConnectionResetError("it hung up")
            line += more
        return read_answer(line), fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
