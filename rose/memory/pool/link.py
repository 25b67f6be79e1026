"""A client's connection to the pool's daemon, which is renewed for as long as the client is attached.

One thread sleeps until the daemon hangs up. Then it tries to connect until a daemon is there again, and
presents the client and the memory that it holds. No act of the daemon, not even its death, raises in the
engine or makes it wait.
"""

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rose.errors import PoolError
from rose.memory.pool.passing import Inbox, send_line
from rose.memory.pool.pool_memory import PoolMemory
from rose.memory.pool.processes import is_readable
from rose.memory.pool.wire import Bye, ClientHello, Refusal, Welcome, read_answer

logger = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 1.0
"""The daemon answers within a round of events. close() may have to wait this long for the thread."""
_QUICK_RETRY_S = 0.1
_SLOW_RETRY_S = 1.0
_QUICK_FOR_S = 10.0
"""A daemon under a supervisor is back within seconds, and a failed attempt costs one system call."""
_MAX_FDS = 1 << 16


class DaemonLink:
    """One attached client's link. It is made with an open connection and closed once."""

    def __init__(
        self, path: Path, connection: socket.socket, hello: ClientHello, memory: PoolMemory, daemon_pid: int
    ) -> None:
        """Takes the connection over; ``hello`` is what the client presents when it comes back."""
        self.daemon_pid = daemon_pid
        self._path = path
        self._hello = hello
        self._memory = memory
        self._connection: socket.socket | None = connection
        self._closing_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="rose-pool-link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and says bye. Without a daemon now, the next one waits for the process to end."""
        os.eventfd_write(self._closing_fd, 1)
        self._thread.join()
        os.close(self._closing_fd)
        if self._connection is None:
            logger.debug("bye not delivered pool=%s slot=%d: no daemon", self._path.stem, self._hello.slot)
            return
        try:
            send_line(self._connection, Bye().to_line())
        except OSError as error:
            logger.debug(
                "bye not delivered pool=%s slot=%d error=%s", self._path.stem, self._hello.slot, error
            )
        self._connection.close()

    # In the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._wait_for_loss():
                logger.info(
                    "lost the daemon of %s slot=%d kind=%s rank=%d: the engine goes on without it",
                    *(self._path.stem, self._hello.slot, self._hello.kind, self._hello.rank),
                )
                if not self._come_back():
                    return
        except Exception:
            logger.exception("%s: the link to its daemon ended, the engine goes on", self._path.stem)

    def _wait_for_loss(self) -> bool:
        """Waits; returns True once the daemon has hung up, False when this side closes."""
        connection = self._connection
        assert connection is not None
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        poll.register(self._closing_fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._closing_fd in ready:
                return False
            try:
                if connection.recv(4096):
                    continue  # after its welcome a daemon has nothing to say
            except OSError as error:
                logger.debug("connection broke: %s", error)
            self._connection = None
            connection.close()
            return True

    def _come_back(self) -> bool:
        """Returns True once a daemon has this client again, False if this side closes or it is refused for
        good."""
        lost_at = time.monotonic()
        while True:
            is_quick = time.monotonic() - lost_at < _QUICK_FOR_S
            if is_readable(self._closing_fd, _QUICK_RETRY_S if is_quick else _SLOW_RETRY_S):
                return False
            refusal = self._knock()
            if refusal is None:
                logger.info(
                    "back at the daemon of %s slot=%d daemon_pid=%d after_s=%.1f",
                    *(self._path.stem, self._hello.slot, self.daemon_pid, time.monotonic() - lost_at),
                )
                return True
            if not refusal.is_transient:
                logger.warning(
                    "the daemon of %s refuses this engine, which goes on with the memory it holds: %s",
                    *(self._path.stem, refusal.refused),
                )
                return False

    def _knock(self) -> Refusal | None:
        """Tries once to come back; None if that worked."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_ANSWER_TIMEOUT_S)
            answer, _ = exchange(connection, self._path, self._hello, self._memory.fds)
            connection.settimeout(None)
        except (OSError, PoolError) as error:
            answer = Refusal(refused=str(error), is_transient=True)
        if isinstance(answer, Welcome):
            self.daemon_pid = answer.daemon_pid
            self._connection = connection
            return None
        connection.close()
        return answer


def exchange(
    connection: socket.socket, path: Path, hello: ClientHello, fds: Sequence[int] = ()
) -> tuple[Welcome | Refusal, list[int]]:
    """Connects, sends hello and descriptors, and returns the answer with its descriptors.

    Raises: OSError, PoolError.
    """
    connection.connect(str(path))
    with suppress(BrokenPipeError):  # it hung up without listening; it may have sent the reason
        send_line(connection, hello.to_line(), fds)
    inbox = Inbox(_MAX_FDS)
    try:
        while (line := inbox.take_line()) is None:
            if not inbox.receive(connection):
                raise ConnectionResetError("it hung up")
        answer = read_answer(line)
        if isinstance(answer, Welcome) and answer.num_fds != inbox.num_fds:
            raise PoolError(f"the daemon sent {inbox.num_fds} descriptors, but announced {answer.num_fds}")
        return answer, inbox.take_fds()
    finally:
        inbox.close()
