"""A real redis-server of the tests' own, which can be killed and started again on its data."""

import shutil
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from rose.node.checks import free_port
from rose.node.processes import ServerProcess

PATIENCE_S = 60.0


class RedisProcess:
    """Keeps what it acknowledges: appendfsync always."""

    def __init__(self, folder: Path) -> None:
        """Skips the test where Redis or its client is not installed."""
        pytest.importorskip("redis", reason="needs the extra: vllm-rose[redis]")
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.skip("needs redis-server: apt install redis-server")
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder / "redis"
        self._folder.mkdir()
        self._argv = [binary, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        self._argv += ["--appendonly", "yes", "--appendfsync", "always", "--save", ""]
        self._server = self._new()

    def _new(self) -> ServerProcess:
        return ServerProcess(self._argv, "redis", self._folder.parent / "redis.log")

    @property
    def pid(self) -> int:
        return self._server.pid

    def start_again(self) -> None:
        """After it was killed; returns when it answers."""
        self._server.stop(0.0)
        self._server = self._new()
        self.__enter__()

    def _answers(self) -> bool:
        import redis

        try:
            with redis.Redis.from_url(self.url) as connection:
                return bool(connection.ping())
        except redis.ConnectionError:
            return False

    def __enter__(self) -> Self:
        self._server.start()
        try:
            self._server.wait_until(self._answers, "answer", PATIENCE_S)
        except BaseException:
            self._server.stop(0.0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()
