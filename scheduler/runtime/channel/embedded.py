"""The control channel on one machine: a Unix socket, and SQLite for what must survive.

Owns the folder with lock, socket and database, and keeps the promises of protocol.py. After a crash of the
machine, not only of a process, the last commits may be missing, but each commit is kept or lost as a whole.
SQLite's WAL is not synced at each commit, because that would cost milliseconds per permit, and such a crash
ends the jobs as well.

A connection's first line is its client's name, and each later line is one message. Answers to an absent
client are dropped: it asks again when it comes back.
"""

import fcntl
import logging
import math
import os
import selectors
import socket
import sqlite3
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from rose.config import make_private_dir
from rose.errors import ChannelError
from rose.scheduler.runtime.channel.messages import NUM_EVENTS
from rose.scheduler.runtime.channel.protocol import COMMAND, Batch, Incoming

logger = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 16 << 20
"""The limit for one client. A status of thousands of jobs is smaller."""
RETRY_S = 0.2
"""The time between two attempts to commit what the state's file did not take."""
TELL_S = 60.0
"""The time between two lines of the log about the same error."""
GIVE_UP_S = 1800.0
"""The longest time for which a failing file is tried. A full disk is waited for without a limit."""
_MAX_SOCKET_PATH = 107
_MAY_PASS = {
    sqlite3.SQLITE_FULL: "make room on its disk",
    sqlite3.SQLITE_IOERR: "check its disk (dmesg, df, mount)",
    sqlite3.SQLITE_READONLY: "make the file, its folder and its disk writable again",
    sqlite3.SQLITE_CANTOPEN: "bring its folder and the file back, or mount its disk again",
    sqlite3.SQLITE_BUSY: "end the other program that has it open",
}
"""The errors that may pass, and what to do about each."""


class EmbeddedScheduler:
    """The scheduler's end."""

    def __init__(self, folder: str) -> None:
        path = make_private_dir(Path(folder), "choose another folder for the channel")
        self._lock = _take(path / "lock")
        self._path = path / "state.db"
        self._database = _open(self._path)
        self._listener = _listen(path / "control.sock")
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._by_name: dict[str, _Connection] = {}

    def load(self) -> Mapping[str, bytes]:
        try:
            return dict(self._database.execute("SELECT key, value FROM rows"))
        except sqlite3.DatabaseError as error:
            raise ChannelError(f"{self._path}: the jobs can't be read: {error}; {_fix(error)}") from error

    def events(self, last: int) -> Sequence[bytes]:
        try:
            rows = self._database.execute("SELECT body FROM events ORDER BY number DESC LIMIT ?", (last,))
            return [body for (body,) in reversed(rows.fetchall())]
        except sqlite3.DatabaseError as error:
            raise ChannelError(f"{self._path}: the events can't be read: {error}; jobs go on") from error

    def receive(self, timeout_s: float) -> Sequence[Incoming]:
        arrived: list[Incoming] = []
        for key, ready in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                connection = _Connection(self._listener.accept()[0])
                self._selector.register(connection.socket, selectors.EVENT_READ, connection)
                continue
            if ready & selectors.EVENT_WRITE:
                self._send(key.data, b"")
            if ready & selectors.EVENT_READ:
                arrived += self._read(key.data)
        return arrived

    def _read(self, connection: "_Connection") -> list[Incoming]:
        was_known = connection.client is not None
        lines = connection.read()
        if connection.client is not None and not was_known:
            self._by_name[connection.client] = connection
        if lines is None or connection.has_given_up():
            self._selector.unregister(connection.socket)
            connection.socket.close()
            if self._by_name.get(connection.client or "") is connection:
                del self._by_name[connection.client or ""]
            return []
        client = connection.client
        return [Incoming(client=client, body=line) for line in lines] if client is not None else []

    def commit(self, batch: Batch, handled: Sequence[Incoming]) -> None:
        """While the file can't be written, all clients wait, because no answer is given before it is stored.

        Raises: ChannelError when the file has failed for `GIVE_UP_S`, or is damaged.
        """
        if batch.rows or batch.events:
            self._store(batch)
        for outgoing in batch.outgoing:
            connection = self._by_name.get(outgoing.client)
            if connection is not None:
                self._send(connection, outgoing.body + b"\n")

    def _send(self, connection: "_Connection", data: bytes) -> None:
        is_done = connection.send(data)
        wanted = selectors.EVENT_READ if is_done else selectors.EVENT_READ | selectors.EVENT_WRITE
        if self._selector.get_key(connection.socket).events != wanted:
            self._selector.modify(connection.socket, wanted, connection)

    def _store(self, batch: Batch) -> None:
        began_s = time.monotonic()
        told_s = -math.inf
        while (error := self._try_to_store(batch)) is not None:
            now, code = time.monotonic(), error.sqlite_errorcode & 0xFF
            what = f"{self._path}: not written for {now - began_s:.0f} s: {error} ({error.sqlite_errorname})"
            if code not in _MAY_PASS or (code != sqlite3.SQLITE_FULL and now - began_s >= GIVE_UP_S):
                raise ChannelError(f"{what}; {_fix(error)}") from error
            if now - told_s >= TELL_S:
                told_s = now
                logger.error("%s; jobs and commands wait: %s", what, _MAY_PASS[code])
            time.sleep(RETRY_S)
            if code != sqlite3.SQLITE_FULL:
                self._open_again()
        if told_s > -math.inf:
            logger.info("%s: written again after %.0f s", self._path, time.monotonic() - began_s)

    def _try_to_store(self, batch: Batch) -> sqlite3.DatabaseError | None:
        """Returns why the batch was not stored; nothing of it is, then."""
        try:
            with self._database:  # one transaction
                self._write(batch)
        except sqlite3.DatabaseError as error:
            return error
        return None

    def _open_again(self) -> None:
        """Replaces the connection, because one that has had an I/O error may fail for ever.

        Never makes a new file: where a disk is no longer mounted, that would lose all jobs.
        """
        try:
            fresh = _connected(self._path, "rw")
        except sqlite3.Error:  # the next attempt to store says why
            return
        with suppress(sqlite3.Error):
            self._database.close()
        self._database = fresh

    def _write(self, batch: Batch) -> None:
        execute = self._database.execute
        for key, value in batch.rows.items():
            if value is None:
                execute("DELETE FROM rows WHERE key = ?", (key,))
            else:
                execute("INSERT OR REPLACE INTO rows VALUES (?, ?)", (key, value))
        for event in batch.events:
            number = execute("INSERT INTO events (body) VALUES (?)", (event,)).lastrowid
            execute("DELETE FROM events WHERE number <= ?", ((number or 0) - NUM_EVENTS,))

    def close(self) -> None:
        for connection in [key.data for key in self._selector.get_map().values() if key.data is not None]:
            connection.socket.close()
        self._selector.close()
        self._listener.close()
        self._database.close()
        self._lock.close()


class _Connection:
    """One client's socket. It never blocks the scheduler; a client that reads nothing is dropped."""

    def __init__(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        self.socket = accepted
        self.client: str | None = None
        self._rest = b""
        self._unsent = b""

    def read(self) -> list[bytes] | None:
        """Returns the whole lines that have arrived; None at the end."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except ConnectionError:
            data = b""
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self.client is None and lines:
            self.client = lines.pop(0).decode(errors="replace")
        return lines

    def has_given_up(self) -> bool:
        """Returns whether a command was here that has closed its end."""
        if self.client is None or not self.client.startswith(COMMAND):
            return False
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    def send(self, data: bytes) -> bool:
        """Sends ``data`` after what is still unsent. Returns whether everything was sent."""
        self._unsent += data
        try:
            self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            pass  # all of it stays unsent, for the next call
        except ConnectionError:  # reading will say so as well
            self._unsent = b""
        if len(self._unsent) > MAX_UNSENT_BYTES:  # it will read the end, connect again and ask again
            self._unsent = b""
            self.socket.shutdown(socket.SHUT_RDWR)
        return not self._unsent


class EmbeddedClient:
    """A client's end."""

    def __init__(self, folder: str, client: str) -> None:
        self._path = Path(folder) / "control.sock"
        self._client = client
        self._socket: socket.socket | None = None
        self._reader: IO[bytes] | None = None
        self._sending = threading.Lock()

    def connect(self) -> None:
        self.close()
        fresh = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            fresh.connect(str(self._path))
            fresh.sendall(self._client.encode() + b"\n")
        except OSError as error:
            fresh.close()
            raise ConnectionError(f"no scheduler at {self._path} ({error.strerror})") from error
        self._reader = fresh.makefile("rb")
        self._socket = fresh

    def send(self, body: bytes) -> None:
        with self._sending:
            if self._socket is None:
                raise ConnectionError(f"not connected to {self._path}")
            try:
                self._socket.sendall(body + b"\n")
            except OSError as error:
                raise ConnectionError(f"{self._path}: {error.strerror}") from error

    def receive(self) -> bytes:
        reader = self._reader
        if reader is None:
            raise ConnectionError(f"not connected to {self._path}")
        try:
            line = reader.readline()
        except (OSError, ValueError) as error:
            raise ConnectionError(f"{self._path}: {error}") from error
        if not line.endswith(b"\n"):
            raise ConnectionError(f"{self._path}: the scheduler is gone")
        return line[:-1]

    def close(self) -> None:
        if self._socket is not None:
            with suppress(OSError):  # the other side was faster
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self._socket = None


def _take(path: Path) -> IO[str]:
    """Takes the channel's lock and writes into it who we are. The kernel frees it however we end."""
    lock = path.open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise ChannelError(
            f"{path.parent}: a scheduler already serves this channel (pid {owner}); "
            "stop the command that started it, or choose another channel"
        ) from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}, started by pid {os.getppid()}\n")
    lock.flush()
    return lock


def _open(path: Path) -> sqlite3.Connection:
    try:
        database = _connected(path, "rwc")
        with database:
            database.execute("CREATE TABLE IF NOT EXISTS rows (key TEXT PRIMARY KEY, value BLOB)")
            database.execute(
                "CREATE TABLE IF NOT EXISTS events (number INTEGER PRIMARY KEY AUTOINCREMENT, body BLOB)"
            )
    except sqlite3.Error as error:
        raise ChannelError(f"{path}: {error}; {_fix(error)}") from error
    return database


def _fix(error: sqlite3.Error) -> str:
    """Returns what to do about the error."""
    # Python's own errors, such as that a text is no UTF-8, have no code.
    known = _MAY_PASS.get(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF)
    return f"{known}, and start again" if known else "move the file away to start without its jobs"


def _connected(path: Path, mode: str) -> sqlite3.Connection:
    """Opens the file. mode: "rw" if it must be there, "rwc" if it may be made. Raises: sqlite3.Error."""
    database = sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = NORMAL")
    return database


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise ChannelError(
            f"{path}: {len(os.fsencode(path))} bytes, but a socket's path has at most {_MAX_SOCKET_PATH}; "
            "choose a shorter folder"
        )
    path.unlink(missing_ok=True)  # of a scheduler that was killed: we hold the lock
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(128)
    listener.setblocking(False)
    return listener
