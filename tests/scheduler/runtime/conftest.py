"""Channels of both kinds for the runtime's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis_process import RedisProcess


@pytest.fixture(params=["unix", "redis"])
def channel_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A channel of its own for each test."""
    if request.param == "unix":
        yield f"unix:{tmp_path / 'ch'}"
        return
    with RedisProcess(tmp_path) as server:
        yield server.url
