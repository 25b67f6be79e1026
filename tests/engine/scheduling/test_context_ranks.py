"""Decode context parallelism in a pool: each rank keeps a part of a block's tokens."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from lone_schedulers import BLOCK_TOKENS, pooled_scheduler, request_of
from vllm.v1.outputs import ModelRunnerOutput

from rose.types import GateMode, Role

pytestmark = pytest.mark.vllm

CONTEXT_SIZE = 2
PROMPT_TOKENS = 3 * BLOCK_TOKENS
"""One and a half blocks of two ranks."""


def asked(name: str) -> Any:
    return request_of(name, [7] * PROMPT_TOKENS, 99, block_tokens=CONTEXT_SIZE * BLOCK_TOKENS)


@pytest.mark.parametrize("role", Role)
def test_a_request_takes_the_blocks_that_were_planned_for_it_and_reads_whole_ones_again(
    runtime_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: Role
) -> None:
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "cache"))
    with pooled_scheduler(
        tmp_path, role, gate=GateMode.OFF, max_model_len=256, context_size=CONTEXT_SIZE
    ) as scheduler:
        tenant, request = scheduler.tenant, asked("first")
        (group,) = scheduler.kv_cache_manager.coordinator.single_type_managers
        scheduler.add_request(request)
        held, most_wanted = 0, tenant.blocks_wanted((), [request])
        assert most_wanted == 2
        for num_new in range(1, 4 * BLOCK_TOKENS):
            step = scheduler.schedule()
            now_held = len(group.req_to_blocks["first"])
            assert now_held - held <= most_wanted
            assert now_held == -(-(PROMPT_TOKENS + num_new - 1) // (CONTEXT_SIZE * BLOCK_TOKENS))
            scheduler.update_from_output(step, ModelRunnerOutput(["first"], {"first": 0}, [[5]]))
            held, most_wanted = now_held, tenant.blocks_wanted([request], ())
        scheduler.add_request(asked("second"))
        step = scheduler.schedule()
        assert step.num_scheduled_tokens["second"] == PROMPT_TOKENS - CONTEXT_SIZE * BLOCK_TOKENS
