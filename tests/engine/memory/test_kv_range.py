"""What a rank does with its address range: where the zeroing of new slabs has its place."""

import gc
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


def test_the_storage_of_the_window_ends_with_the_last_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connectors tell from its size that blocks have all layers side by side."""
    num_blocks, num_layers, page = 7, 3, 24 << 10
    with (
        tempfile.TemporaryDirectory(prefix="rose-test-") as folder,
        start_daemon("p", num_slabs=4, slab_bytes=128 << 10, headroom_slabs=1, runtime_dir=Path(folder)),
    ):
        monkeypatch.setenv("ROSE_RUNTIME_DIR", folder)
        kv = KVRange("p", role=Role.SERVING, engine_id="e", rank=0, world_size=1, device=torch.device("cpu"))
        blocks = torch.zeros(4 * (128 << 10), dtype=torch.int8)
        caches = {
            f"layer{layer}": blocks.as_strided((num_blocks, page), (num_layers * page, 1), layer * page)
            for layer in range(num_layers)
        }
        seen = kv.over_window(caches)
        assert {one.untyped_storage().nbytes() for one in seen.values()} == {num_blocks * num_layers * page}
        for name, cache in caches.items():
            one = seen[name]
            assert (one.shape, one.stride(), one.storage_offset()) == (
                cache.shape,
                cache.stride(),
                cache.storage_offset(),
            )
        kv.close()


def test_the_window_stays_mapped_for_a_connector_that_keeps_its_addresses_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="rose-test-") as folder,
        start_daemon("p", num_slabs=4, slab_bytes=128 << 10, headroom_slabs=1, runtime_dir=Path(folder)),
    ):
        monkeypatch.setenv("ROSE_RUNTIME_DIR", folder)
        kv = KVRange("p", role=Role.SERVING, engine_id="e", rank=0, world_size=1, device=torch.device("cpu"))
        address = kv.over_window({"layer": torch.zeros(4, 128 << 10, dtype=torch.int8)})["layer"].data_ptr()
        gc.collect()
        with open("/proc/self/maps") as maps:
            spans = [line.split()[0].split("-") for line in maps if "memfd:" in line]
        assert any(int(low, 16) <= address < int(high, 16) for low, high in spans)
        kv.close()
