"""Every engine holds one slab for good: what it says when the pool has none left."""

import tempfile
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from rose.engine.memory import kv_range
from rose.errors import PoolError
from rose.memory.daemon.daemon import start_daemon
from rose.memory.pool.pool import PoolClient
from rose.memory.pool.wire import Kind
from rose.types import Role


def test_a_pool_without_a_slab_for_another_engine_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_range, "PINNED_SLAB_TIMEOUT_S", 0.1)
    with (
        tempfile.TemporaryDirectory(prefix="rose-test-") as folder,
        start_daemon("p", num_slabs=4, headroom_slabs=1, runtime_dir=Path(folder)),
        attach(Path(folder), Role.SERVING) as serving,
        attach(Path(folder), Role.ROLLOUT) as rollout,
    ):
        slabs = serving.ledger.acquire(serving.slot, 4)
        with pytest.raises(
            PoolError, match=r"need 1 slab .*, 0 free of 4, held \{'serving': 4, 'rollout': 0\}"
        ):
            kv_range.pinned_slab(rollout, acquire=True)
        # Serving was asked to give one of its cached slabs.
        assert serving.ledger.rollout_lacks == 1
        serving.ledger.drain(slabs[2:3], 0)
        assert kv_range.pinned_slab(rollout, acquire=True) == 2


def attach(folder: Path, role: Role) -> PoolClient:
    return PoolClient.attach("p", role=role, engine_id=str(role), kind=Kind.WORKER, runtime_dir=folder)
