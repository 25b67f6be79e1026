"""Which waiting rollouts stall: those whose memory serving has, and not those in line behind others."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from lone_schedulers import BLOCK_TOKENS, NUM_BLOCKS, POOL, STEP_TOKENS, pooled_scheduler, request_of
from vllm.v1.outputs import ModelRunnerOutput

from rose.engine.scheduling import rollout_scheduler
from rose.engine.scheduling import scheduler as scheduler_module
from rose.memory.pool.pool import PoolClient
from rose.memory.pool.wire import Kind
from rose.types import GateMode, Role, StopReason

pytestmark = pytest.mark.vllm

STALL_S = 10.0
SHARE = NUM_BLOCKS * 2 // 3
"""Two requests with so many blocks don't fit into one slab."""


class Engine:
    """A rollout engine's scheduler in a pool, and its clock."""

    def __init__(self, scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scheduler = scheduler
        self._now = time.monotonic()
        monkeypatch.setattr(rollout_scheduler, "time", SimpleNamespace(monotonic=lambda: self._now))
        monkeypatch.setattr(scheduler_module, "time", SimpleNamespace(monotonic=lambda: self._now))

    def ask(self, name: str, num_blocks: int, max_tokens: int) -> None:
        prompt = [len(name)] * (num_blocks * BLOCK_TOKENS - 1)  # so that no two have a common prefix
        self.scheduler.add_request(request_of(name, prompt, max_tokens))

    def step(self) -> set[str]:
        """Computes one step, and returns the requests that ended because of a stall."""
        self._now += STALL_S / 4
        output = self.scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        indices = {name: index for index, name in enumerate(names)}
        tokens = [[5] if self._ends_prefill(name) else [] for name in names]
        answers = self.scheduler.update_from_output(output, ModelRunnerOutput(names, indices, tokens))
        each = [one for many in answers.values() for one in many.outputs]
        return {one.request_id for one in each if one.stop_reason == str(StopReason.STALLED)}

    def _ends_prefill(self, name: str) -> bool:
        request = self.scheduler.requests[name]
        return bool(request.num_computed_tokens >= request.num_prompt_tokens)

    @property
    def running(self) -> set[str]:
        return {request.request_id for request in self.scheduler.running}


@pytest.fixture
def engine(runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Serving has the pool's other slabs, but for one."""
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # nothing is computed
    gate: dict[str, Any] = {"gate": GateMode.OFF, "stall_s": STALL_S}
    with (
        pooled_scheduler(tmp_path, Role.ROLLOUT, **gate, max_model_len=2 * STEP_TOKENS) as scheduler,
        PoolClient.attach(
            POOL, role=Role.SERVING, engine_id="serving", kind=Kind.SCHEDULER, world_size=1
        ) as serving,
    ):
        ledger = serving.ledger
        assert ledger.acquire(serving.slot, ledger.num_free) == ledger.owned(serving.slot)
        ledger.set_serving_use(serving.slot, used=ledger.num_owned(serving.slot), reserved=0)
        yield Engine(scheduler, monkeypatch)


def test_a_long_prompt_waits_in_line_for_the_memory_of_short_ones_and_gets_it_before_later_ones(
    engine: Engine,
) -> None:
    engine.ask("short", SHARE, max_tokens=20)
    engine.step()
    engine.ask("long", SHARE, max_tokens=2)
    engine.ask("later", 1, max_tokens=2)
    for _ in range(19):
        assert engine.step() == set()
        assert engine.running == {"short"}
    while "short" in engine.running:
        assert engine.step() == set()
    engine.step()
    assert "long" in engine.running


def test_a_prompt_whose_memory_serving_has_is_sent_away_after_the_stall_time(engine: Engine) -> None:
    engine.ask("short", 4, max_tokens=100)
    engine.step()
    engine.ask("long", NUM_BLOCKS, max_tokens=2)
    assert [engine.step() for _ in range(5)] == [set()] * 4 + [{"long"}]
    assert engine.running == {"short"}
