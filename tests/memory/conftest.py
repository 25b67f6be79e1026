"""A real pool daemon per test, and engines in processes of their own to attach to it."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pool_setup import EngineProcess, start_pool
from vmm_worlds import World, build_stand_in

from rose.memory.daemon.daemon import DaemonHandle
from rose.memory.slabs.backend import CUDA_DRIVER


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    """Short, as a socket's path may have 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="rose-test-"))
    yield path
    shutil.rmtree(path, ignore_errors=True)  # whoever ends late may be removing its own files


@pytest.fixture
def pool(runtime_dir: Path) -> Iterator[DaemonHandle]:
    """A running daemon of pool ``POOL``."""
    with start_pool(runtime_dir) as handle:
        yield handle


@pytest.fixture
def start_engine(runtime_dir: Path) -> Iterator[Callable[..., EngineProcess]]:
    """Starts engine processes: ``start_engine("rollout", "r0", "worker", rank=1, world_size=2)``."""
    started: list[EngineProcess] = []

    def start(role: str, engine_id: str, kind: str, rank: int = 0, world_size: int = 1) -> EngineProcess:
        started.append(EngineProcess(runtime_dir, [role, engine_id, kind, str(rank), str(world_size)]))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


@pytest.fixture(scope="session")
def stand_in_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in CUDA driver, compiled."""
    return build_stand_in(tmp_path_factory.mktemp("stand-in"))


@pytest.fixture(params=["host", "stand-in", pytest.param("gpu", marks=pytest.mark.gpu)])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Every backend in turn: host memory, CUDA on the stand-in driver, CUDA on a GPU."""
    if request.param == "stand-in":
        made = World(str(request.getfixturevalue("stand_in_library")))
    else:
        made = World(CUDA_DRIVER if request.param == "gpu" else None)
    yield made
    made.close()
