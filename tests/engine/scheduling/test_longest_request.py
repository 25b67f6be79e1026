"""A request of --max-model-len tokens gets its memory beside other engines, or the engine does not start."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from lone_schedulers import POOL, lone_scheduler, pooled_scheduler, request_of
from vllm.v1.outputs import ModelRunnerOutput

from rose.errors import ConfigError
from rose.memory.daemon.daemon import start_daemon
from rose.memory.pool.pool import PoolClient
from rose.memory.pool.wire import Kind
from rose.types import Role

pytestmark = pytest.mark.vllm

SEVEN_SLABS = (7 * 64 - 1) * 16
"""Tokens in as many slabs, without vLLM's null block."""
SMALL_SLAB = 1 << 18
"""Bytes of a slab with 16 blocks."""


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "cache"))
    # The model has no weights, and no request is longer than its engine's longest.
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")


@pytest.mark.parametrize("role", Role)
def test_a_length_that_fits_only_into_the_whole_pool_is_refused(
    runtime_dir: Path, tmp_path: Path, role: Role
) -> None:
    length = SEVEN_SLABS + 16
    with (
        pytest.raises(
            ConfigError,
            match=rf"--max-model-len {length}: such a request needs 8 slabs, and of the pool's 8 another "
            rf"engine keeps one for good: start the pool with --num-slabs 9 or more, or the engine with "
            rf"--max-model-len {SEVEN_SLABS} or less",
        ),
        pooled_scheduler(tmp_path, role, max_model_len=length),
    ):
        pass


def test_a_length_that_vllm_has_chosen_by_the_pools_bytes_is_lowered(
    runtime_dir: Path, tmp_path: Path
) -> None:
    with (
        start_daemon(POOL, num_slabs=2, slab_bytes=SMALL_SLAB, headroom_slabs=1),
        lone_scheduler(tmp_path, Role.SERVING, pool=POOL, max_model_len=-1) as serving,
    ):
        assert serving.max_model_len == serving.vllm_config.model_config.max_model_len == (16 - 1) * 16


def test_the_longest_request_is_served_beside_another_engine(runtime_dir: Path, tmp_path: Path) -> None:
    with (
        pooled_scheduler(tmp_path, Role.SERVING, max_model_len=SEVEN_SLABS) as serving,
        PoolClient.attach(POOL, role=Role.ROLLOUT, engine_id="other", kind=Kind.SCHEDULER) as other,
    ):
        assert other.ledger.acquire(other.slot, 1)
        serving.add_request(request_of("longest", [1] * (SEVEN_SLABS - 2), max_tokens=2))
        for _ in range(40):
            _step(serving)
        assert not serving.requests


def _step(scheduler: Any) -> None:
    planned = scheduler.schedule()
    names = list(planned.num_scheduled_tokens)
    prefilled = [not scheduler.requests[name].is_prefill_chunk for name in names]
    tokens = [[5] if done else [] for done in prefilled]
    scheduler.update_from_output(
        planned, ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, tokens)
    )
