"""A board's page, and real processes on it."""

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest
from board_setup import Players

from rose._shm import Words


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page"
    path.write_bytes(bytes(4096))
    return path


@pytest.fixture
def page_memory(page: Path) -> memoryview:
    with page.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 4096))


@pytest.fixture
def words(page_memory: memoryview) -> Words:
    return Words(page_memory)


@pytest.fixture
def players(page: Path) -> Iterator[Players]:
    started = Players(page)
    yield started
    started.stop()
