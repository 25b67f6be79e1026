"""What a rank does with its address range: where the zeroing of new slabs has its place."""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

import torch

from rose.engine.memory.kv_range import KVRange, SlabOps
from rose.memory.daemon.daemon import start_daemon
from rose.types import Role

pytestmark = pytest.mark.vllm

STREAM = 7


class _Streams:
    """A range that notes on which stream its slabs are zeroed."""

    def __init__(self, kv_range: Any) -> None:
        self._range = kv_range
        self.seen: list[int | None] = []

    def map_many(self, positions: list[int], slabs: list[int], *, stream: int | None) -> None:
        self.seen.append(stream)
        self._range.map_many(positions, slabs)


def test_zeroing_is_queued_behind_the_model_unless_a_connector_may_load_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=STREAM))
    with (
        tempfile.TemporaryDirectory(prefix="rose-test-") as folder,
        start_daemon("p", num_slabs=4, headroom_slabs=1, runtime_dir=Path(folder)),
    ):
        monkeypatch.setenv("ROSE_RUNTIME_DIR", folder)
        device = torch.device("cpu")
        kv: Any = KVRange("p", role=Role.SERVING, engine_id="e", rank=0, world_size=1, device=device)
        streams = kv._range = _Streams(kv._range)
        kv._is_cuda = True
        kv.apply(SlabOps(map=[(1, 1)]))
        kv._is_cuda = False
        kv.over_window({})
        kv._is_cuda = True
        kv.apply(SlabOps(map=[(2, 2)]))
        assert streams.seen == [STREAM, None]
        kv.close()
