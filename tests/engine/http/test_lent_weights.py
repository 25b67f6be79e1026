"""Weights of another run never come under the turns of a job that a GPU is lent to."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from rose.engine.http.control import ServedEngine
from rose.engine.http.leases import Ask
from rose.engine.settings import EngineSettings
from rose.engine.status import StatusPage, page_path
from rose.errors import WorkerError
from rose.messages import WeightUpdate
from rose.types import Role

ASK = Ask(router="r", every_s=0.5, cap=4, lends="math", needs=True, run="math-run")


class LentMeanwhile:
    """An engine without a model, whose GPU is lent to a job while its ranks prepare an update."""

    output_processor = SimpleNamespace(request_states={})
    outputs_queue = asyncio.Queue[object]()
    is_running = False  # there are no outputs to process

    def __init__(self) -> None:
        self.engine_core = self
        self.control: Any = None
        self.calls: list[str] = []

    async def collective_rpc(self, method: str, *_: object, **__: object) -> list[object]:
        if method == "begin_weight_changes":
            self.control.leases.asked(ASK, time.monotonic())
            return [None]
        return [(True, None, None) if method == "loaded_weights" else (True, None)]

    async def reset_prefix_cache(self, **_: object) -> bool:
        self.calls.append("reset_prefix_cache")
        return True

    def __getattr__(self, name: str) -> Callable[..., Awaitable[None]]:
        async def call(*_: object, **__: object) -> None:
            self.calls.append(name)

        return call


@pytest.fixture
def engine(runtime_dir: Path) -> Iterator[LentMeanwhile]:
    page = StatusPage(page_path(runtime_dir, "e"), create=True)
    engine: Any = LentMeanwhile()
    engine.control = ServedEngine(engine, EngineSettings(role=Role.ROLLOUT, engine_id="e"), "m")
    yield engine
    page.close()


async def test_an_update_that_was_prepared_before_the_gpu_was_lent_to_another_runs_job_is_refused(
    engine: LentMeanwhile, staged: dict[str, Any]
) -> None:
    control = engine.control
    with pytest.raises(WorkerError, match="lent to a job of run math-run, and takes no weights of run"):
        await control.apply_weights(WeightUpdate(version="run/1", changes=["c"], **staged))
    assert engine.calls == []
    assert (control.status().is_updating, control.status().weight_version) == (False, None)
    await control.apply_weights(WeightUpdate(version="math-run/0", changes=["c"], **staged))
    assert "update_weights" in engine.calls
    assert control.status().weight_version == "math-run/0"
