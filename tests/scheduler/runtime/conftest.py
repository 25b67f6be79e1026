"""Channels of both kinds for the runtime's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from lib.cluster.redis_server import RedisServer, why_no_redis


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis of the test's own."""
    reason = why_no_redis()
    if reason is not None:
        pytest.skip(reason)
    folder = tmp_path / "redis"
    folder.mkdir()
    with RedisServer(folder) as server:
        yield server


@pytest.fixture(params=["unix", "redis"])
def channel_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A channel of its own for each test."""
    if request.param == "unix":
        return f"unix:{tmp_path / 'ch'}"
    server: RedisServer = request.getfixturevalue("redis_server")
    return server.url
