"""One process's connection to a slab pool: the shared memory it received, and its link to the daemon.

If there is no pool, or it refuses the client, a clear PoolError is raised. Everything that was received goes
on working while there is no daemon. Slabs are moved through the ledger and an address range, not here.
"""

import logging
import os
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rose.config import Settings
from rose.errors import PoolError
from rose.memory.pool.link import DaemonLink, exchange
from rose.memory.pool.pool_memory import PoolMemory, PoolSize
from rose.memory.pool.wire import ClientHello, Kind, Welcome, socket_path
from rose.memory.slabs.backend import Slabs
from rose.memory.slabs.fd_limit import ensure_fd_limit
from rose.types import Role

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 5.0
"""How long a daemon that is there may take to answer, however short the wait for one is: it answers at once,
but only when the machine lets it run."""
_RETRY_S = 0.05
"""Pause between attempts, while a daemon starts or an engine's predecessor ends; both take tens of ms."""


class PoolClient:
    """An attached scheduler, worker or observer. Made by :meth:`attach` or :meth:`observe`."""

    def __init__(
        self, path: Path, connection: socket.socket, hello: ClientHello, welcome: Welcome, memory: PoolMemory
    ) -> None:
        """Takes over the connection and the memory."""
        self.slot = welcome.slot
        """This engine's slot in the ledger; 0 for an observer."""
        self._memory = memory
        self._rank = hello.rank
        size = memory.size
        self.num_slabs, self.slab_bytes = size.num_slabs, size.slab_bytes
        self.headroom_slabs, self.num_shards = size.headroom_slabs, size.num_shards
        self.backend = size.backend
        self.ledger = memory.ledger
        self.board_words = memory.board_words
        self._link: DaemonLink | None = None
        if self.slot:
            attached = hello.model_copy(update={"slot": self.slot})
            self._link = DaemonLink(path, connection, attached, memory, welcome.daemon_pid)
        else:
            connection.close()  # an observer needs nothing more from the daemon

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

        The engine keeps its slabs while any of its processes lives. If ``runtime_dir`` is None, the
        environment says it. Raises: PoolError if there is no daemon or it refuses; ConfigError if the
        descriptor limit is too low for the pool.
        """
        hello = ClientHello(
            role=role, engine_id=engine_id, kind=kind, rank=rank, world_size=world_size, pid=os.getpid()
        )
        deadline = time.monotonic() + timeout_s
        # Asked first: descriptors beyond the limit would be lost on their way here.
        size = describe_pool(name, runtime_dir=runtime_dir, timeout_s=timeout_s)
        ensure_fd_limit(size.num_fds, f"pool {name} with {size.num_shards} x {size.num_slabs} slabs")
        return cls._join(name, hello, runtime_dir, max(0.0, deadline - time.monotonic()))

    @classmethod
    def observe(cls, name: str, *, runtime_dir: Path | None = None, timeout_s: float = 5.0) -> Self:
        """Opens a pool to look at its ledger and board. Raises: PoolError if there is no daemon."""
        hello = ClientHello(engine_id="", kind=Kind.OBSERVER, pid=os.getpid())
        return cls._join(name, hello, runtime_dir, timeout_s)

    @classmethod
    def _join(cls, name: str, hello: ClientHello, runtime_dir: Path | None, timeout_s: float) -> Self:
        folder = runtime_dir if runtime_dir is not None else Settings.from_environment().runtime_dir
        path = socket_path(folder, name)
        deadline = time.monotonic() + timeout_s
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(max(deadline - time.monotonic(), _ANSWER_TIMEOUT_S))
                answer, fds = exchange(connection, path, hello)
                if isinstance(answer, Welcome):
                    connection.settimeout(None)
                    client = cls(path, connection, hello, answer, PoolMemory(fds))
                    logger.info("attached pool=%s slot=%d kind=%s", name, client.slot, hello.kind)
                    return client
                reason, is_transient = answer.refused, answer.is_transient
            except (FileNotFoundError, ConnectionRefusedError):
                is_transient = True
                reason = (
                    f"pool {name} has no daemon ({path}); start it with `rose pool`, or share its folder "
                    f"if it runs in another container"
                )
            except BlockingIOError:
                reason, is_transient = f"pool {name}: too many clients wait for the daemon at {path}", True
            except ConnectionError as error:
                reason, is_transient = f"pool {name}: the daemon at {path} hung up ({error})", True
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

    def open_slabs(self, device: int = 0) -> Slabs:
        """Opens this rank's slabs; ``device`` is its GPU as this process counts. Not for observers.

        Raises: PoolError; ConfigError if the descriptor limit is too low.
        """
        return self._memory.open_slabs(self._rank, device)

    @property
    def daemon_pid(self) -> int | None:
        """The daemon that this client is or was attached to; None for an observer."""
        return self._link.daemon_pid if self._link is not None else None

    def close(self) -> None:
        """Leaves the pool. The caller must have unmapped every slab: they may go to another engine at once.

        Idempotent. Without this call the daemon waits for the process to end.
        """
        if self._link is not None:
            self._link.close()
            self._link = None
        self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def describe_pool(name: str, *, runtime_dir: Path | None = None, timeout_s: float = 5.0) -> PoolSize:
    """Asks a running pool for its size. Raises: PoolError if there is no daemon."""
    with PoolClient.observe(name, runtime_dir=runtime_dir, timeout_s=timeout_s) as client:
        return client._memory.size
