"""A Redis of a benchmark's own, for the control channel.

Owns: the server's process and its folder. Promises: leaving the ``with`` block ends it. Never: measures.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rose.node.checks import free_port
from rose.node.processes import ServerProcess


class RedisServer:
    """``fsync``: Redis's appendfsync; with "always", nothing that it has acknowledged is ever lost."""

    def __init__(self, binary: str, folder: Path, fsync: str) -> None:
        port = free_port()
        self.url = f"redis://127.0.0.1:{port}/0"
        self._argv = [binary, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder), "--save", ""]
        self._argv += ["--appendonly", "yes", "--appendfsync", fsync]
        self._log = folder / "redis.log"
        self.start()

    @property
    def pid(self) -> int:
        """Of the server that runs now."""
        return self._server.pid

    def start(self) -> None:
        """Again, after a kill."""
        self._server = ServerProcess(self._argv, "redis", self._log).start()

    def stop(self) -> None:
        """Also after a kill."""
        self._server.stop()


@contextmanager
def redis_server(binary: str, fsync: str = "always") -> Iterator[RedisServer | None]:
    """None where Redis or its Python client is not installed."""
    program = shutil.which(binary)
    try:
        import redis  # noqa: F401
    except ModuleNotFoundError:
        program = None
    if program is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="rose-redis-") as folder:
        server = RedisServer(program, Path(folder), fsync)
        try:
            yield server
        finally:
            server.stop()
