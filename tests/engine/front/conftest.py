"""One engine of rollouts, and `rose router` with a front before it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from front.running import ADAPTERS, OTHERS, PARSERS, SINGLE, ProxyThread, Setup, front_router
from real_engine import RealEngine, new_folder

from rose.measure.scripted import make_scripted_model
from rose.types import Role


@pytest.fixture(scope="session")
def scripted_model(engines_dir: Path) -> Path:
    return make_scripted_model(engines_dir / "scripted")


@pytest.fixture(scope="session")
def scripted_engine(engines_dir: Path, scripted_model: Path) -> Iterator[RealEngine]:
    folder = new_folder(engines_dir, "front")
    engine = RealEngine(scripted_model, Role.ROLLOUT, folder, *PARSERS, *OTHERS, *SINGLE, *ADAPTERS)
    try:
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="session")
def front(engines_dir: Path, scripted_model: Path, scripted_engine: RealEngine) -> Iterator[Setup]:
    with (
        ProxyThread(scripted_engine.url) as proxy,
        front_router(engines_dir, proxy.url, scripted_model, scripted_engine.wait_ready) as url,
    ):
        yield Setup(scripted_model, scripted_engine.url, url, proxy)
