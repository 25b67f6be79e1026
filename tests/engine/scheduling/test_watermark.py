"""vLLM's watermark in a pool: a share of the blocks that the engine has, for which it takes slabs."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from lone_schedulers import BLOCK_TOKENS, NUM_BLOCKS, pooled_scheduler, request_of
from vllm.v1.outputs import ModelRunnerOutput

from rose.types import GateMode, Role

pytestmark = pytest.mark.vllm

WATERMARK = 0.9
"""Two short requests use more than the other tenth of one slab's blocks."""


def ask(scheduler: Any, name: str, token: int) -> None:
    scheduler.add_request(request_of(name, [token] * 3 * BLOCK_TOKENS, 9))


@pytest.mark.parametrize("role", Role)
def test_a_waiting_request_gets_blocks_as_soon_as_the_watermark_stays_free(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: Role
) -> None:
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "cache"))
    with pooled_scheduler(tmp_path, role, gate=GateMode.OFF, watermark=WATERMARK) as scheduler:
        ask(scheduler, "first", 1)
        step = scheduler.schedule()
        scheduler.update_from_output(step, ModelRunnerOutput(["first"], {"first": 0}, [[5]]))
        assert scheduler.tenant.num_owned == 1
        ask(scheduler, "second", 2)
        assert set(scheduler.schedule().num_scheduled_tokens) == {"first", "second"}
        pool = scheduler.tenant.pool
        assert pool.num_gpu_blocks == 2 * NUM_BLOCKS
        assert pool.get_num_free_blocks() >= WATERMARK * pool.num_gpu_blocks
