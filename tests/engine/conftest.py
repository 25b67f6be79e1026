"""The engines that the tests share: half a minute each to start, so one pair for the whole session."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_engine import RealEngine
from references import ModelDirs, StockAnswers
from shared_gpu import SharedGpu

from rose.transfer.format.checkpoint import checkpoint_state_hash
from rose.types import Role


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


@pytest.fixture
def gpu(_gpu: SharedGpu) -> SharedGpu:
    """The shared pair, both alive and idle."""
    _gpu.ensure_running()
    _gpu.settle()
    return _gpu


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
