"""The engines that the tests share: half a minute each to start, so one pair for the whole session."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_engine import RealEngine, new_folder
from references import ModelDirs, StockAnswers
from shared_gpu import SharedGpu

from rose.transfer.format.checkpoint import checkpoint_state_hash
from rose.types import Role

LAST = ("test_worker_death.py", "test_parallel_ranks.py", "test_data_parallel.py")
"""Files that run after all others of this folder: one that kills engines of the shared pair, for whose
successors nobody need wait then, and two with engines of their own."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Moves the tests of ``LAST`` behind the other tests of this folder."""
    folder = Path(__file__).parent
    places = [at for at, item in enumerate(items) if folder in item.path.parents]
    ordered = sorted(
        (items[at] for at in places),
        key=lambda item: LAST.index(item.path.name) + 1 if item.path.name in LAST else 0,
    )
    for at, item in zip(places, ordered, strict=True):
        items[at] = item


@pytest.fixture(scope="session")
def engines_dir() -> Iterator[Path]:
    """Short, as a socket's path may have 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="rose-test-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)  # whoever ends late may be removing its own files


@pytest.fixture(scope="session")
def models(engines_dir: Path) -> ModelDirs:
    return ModelDirs(engines_dir / "models")


@pytest.fixture(scope="session")
def stock(engines_dir: Path, models: ModelDirs) -> Iterator[StockAnswers]:
    answers = StockAnswers(engines_dir, models)
    yield answers
    answers.close()


@pytest.fixture(scope="session")
def _gpu(engines_dir: Path, models: ModelDirs, stock: StockAnswers) -> Iterator[SharedGpu]:
    gpu = SharedGpu(engines_dir, {Role.SERVING: models.serving, Role.ROLLOUT: models.untied[0]})
    yield gpu
    gpu.close()


@pytest.fixture(scope="session")
def _late_gpu(engines_dir: Path, models: ModelDirs) -> Iterator[SharedGpu]:
    folder = new_folder(engines_dir, "late")
    gpu = SharedGpu(folder, {Role.SERVING: models.serving, Role.ROLLOUT: models.untied[0]}, is_late=True)
    yield gpu
    gpu.close()


@pytest.fixture
def late_gpu(_late_gpu: SharedGpu, request: pytest.FixtureRequest) -> SharedGpu:
    """A pair with async scheduling on late devices, both alive and idle."""
    return _settled(_late_gpu, request)


@pytest.fixture
def gpu(_gpu: SharedGpu, request: pytest.FixtureRequest) -> SharedGpu:
    """The shared pair, both alive and idle."""
    return _settled(_gpu, request)


def _settled(gpu: SharedGpu, request: pytest.FixtureRequest) -> SharedGpu:
    """Starts other engines for a test's second run: those of the first one have learnt from it."""
    if getattr(request.node, "execution_count", 1) > 1:
        gpu.stop_engines()
    gpu.ensure_running()
    gpu.settle()
    return gpu


@pytest.fixture
def serving(gpu: SharedGpu) -> RealEngine:
    return gpu.engine(Role.SERVING)


@pytest.fixture
def rollout(gpu: SharedGpu) -> RealEngine:
    return gpu.engine(Role.ROLLOUT)


@pytest.fixture
def staged(tmp_path: Path) -> dict[str, str]:
    """A checkpoint in a file, for updates of engines without a model."""
    import numpy as np
    from safetensors.numpy import save_file

    path = tmp_path / "weights.safetensors"
    save_file({"weight": np.zeros(4, np.float32)}, path)
    return {"path": str(path), "state_hash": str(checkpoint_state_hash(path))}
