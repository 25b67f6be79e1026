"""A Redis of a benchmark's or a test's own, for the control channel; it can be killed and started again.

Owns: the server's process, on a folder of its data. Promises: it answers when ``start`` returns; leaving the
``with`` block ends it. Never: measures.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from rose.node.processes import ServerProcess
from rose.ports import free_port

START_S = 300.0


def why_no_redis(binary: str = "redis-server") -> str | None:
    """Returns what is missing on this machine, or None."""
    if shutil.which(binary) is None:
        return f"needs {binary}: apt install redis-server"
    try:
        import redis  # noqa: F401
    except ModuleNotFoundError:
        return "needs the extra `redis`"
    return None


class RedisServer:
    """``fsync``: Redis's appendfsync; with "always", nothing that it has acknowledged is ever lost."""

    def __init__(self, folder: Path, binary: str = "redis-server", fsync: str = "always") -> None:
        """``folder``: gets its data and its log; must exist. The binary must be there: `why_no_redis`."""
        port = free_port()
        self.url = f"redis://127.0.0.1:{port}/0"
        self._argv = [shutil.which(binary) or binary, "--port", str(port), "--bind", "127.0.0.1"]
        self._argv += ["--dir", str(folder), "--save", "", "--appendonly", "yes", "--appendfsync", fsync]
        self._log = folder / "redis.log"
        self._server = ServerProcess(self._argv, "redis", self._log)

    @property
    def pid(self) -> int:
        """The process id of the server that runs now."""
        return self._server.pid

    def start(self) -> None:
        """Runs it. Raises: WorkerError when it does not come up."""
        self._server.start()
        try:
            self._server.wait_until(self._answers, "answer", START_S)
        except BaseException:
            self._server.stop(0.0)
            raise

    def start_again(self) -> None:
        """Starts the server again on the same data, after a kill."""
        self._server.stop(0.0)
        self._server = ServerProcess(self._argv, "redis", self._log)
        self.start()

    def _answers(self) -> bool:
        import redis

        try:
            with redis.Redis.from_url(self.url) as connection:
                return bool(connection.ping())
        except redis.ConnectionError:  # loading its data is one as well
            return False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()


@contextmanager
def redis_server(binary: str, fsync: str = "always") -> Iterator[RedisServer | None]:
    """None where Redis or its Python client is not installed."""
    if why_no_redis(binary) is not None:
        yield None
        return
    with (
        tempfile.TemporaryDirectory(prefix="rose-redis-") as folder,
        RedisServer(Path(folder), binary, fsync) as server,
    ):
        yield server
