"""Weights that were off the device come back bit for bit, and leave no packed copy there meanwhile."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed")

from lib.transfer.pretended_rank import pretended_rank
from mirrored import Mirrored
from rank_models import KINDS, Checkpoint, after_a_step, differing, loaded_model

from rose.engine.weights.device_weights import device_bytes, storages
from rose.engine.weights.pinned import PinnedWeightsBackend
from rose.engine.weights.sleep import HostWeightsBackend
from rose.engine.weights.weights import StagedUpdate, StagedWeightEngine
from rose.errors import FrameError


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_every_kind_come_back_bit_for_bit(kind: str, mirrored: Mirrored, tmp_path: Path) -> None:
    make, arguments = KINDS[kind]
    checkpoint = Checkpoint(tmp_path / "model", make(), is_finite=True, **arguments)
    with pretended_rank(checkpoint.vllm_config) as config:
        tensors = checkpoint.tensors
        model = loaded_model(config, tensors, is_processed=True)
        engine = StagedWeightEngine(None, config, torch.device("cpu"), model)
        backend = HostWeightsBackend()
        backend.attach(engine)
        num_bytes = device_bytes(model)
        for seed in (1, 2):
            update = mirrored.put(tensors)
            engine.receive_weights(StagedUpdate(update.path, update.state_hash))
            assert device_bytes(model) == num_bytes
            backend.suspend()
            assert device_bytes(model) == 0
            tensors = after_a_step(tensors, 0.05, seed, is_finite=True)
            mirrored.put(tensors)
            backend.resume()
            assert differing(model, loaded_model(config, tensors, is_processed=True)) == []
        engine.shutdown()


class Allocator:
    """Stands in for vLLM's allocator of GPU memory: what it frees is lost, and addresses stay."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._device = [torch.empty(0, dtype=torch.uint8).set_(each) for each in storages(model)]
        self._host: list[torch.Tensor] = []
        self.has_no_host_memory = False

    def sleep(self, offload_tags: Sequence[str]) -> None:
        if self.has_no_host_memory:
            raise MemoryError("no host memory can be pinned")
        assert "weights" in offload_tags and not self._host
        self._host = [each.clone() for each in self._device]
        for each in self._device:
            each.fill_(255)  # a NaN of every type

    def wake_up(self, tags: Sequence[str] | None) -> None:
        assert tags is None
        for each, saved in zip(self._device, self._host or self._device, strict=True):
            each.copy_(saved)
        self._host = []


def test_weights_of_a_gpu_come_back_from_host_memory_or_newer_ones_from_the_mirror(
    mirrored: Mirrored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, arguments = KINDS["float32"]
    checkpoint = Checkpoint(tmp_path / "model", make(), is_finite=True, **arguments)
    with pretended_rank(checkpoint.vllm_config) as config:
        old = checkpoint.tensors
        new = after_a_step(old, 0.05, 1, is_finite=True)
        model = loaded_model(config, old, is_processed=True)
        engine = StagedWeightEngine(None, config, torch.device("cpu"), model)
        allocator = Allocator(model)
        monkeypatch.setattr("vllm.device_allocator.get_mem_allocator_instance", lambda: allocator)
        backend = PinnedWeightsBackend(engine)
        load = engine.load

        def must_not_load() -> None:
            raise FrameError("the mirror holds half a version")

        def come_back() -> list[str]:
            residency = []
            for change in (backend.suspend, backend.suspend, backend.resume, backend.resume):
                change()
                residency.append(engine.is_resident)
            assert residency == [False, False, True, True]
            return differing(model, loaded_model(config, now, is_processed=True))

        monkeypatch.setattr(engine, "load", must_not_load)
        now = old
        allocator.has_no_host_memory = True
        with pytest.raises(MemoryError):
            backend.suspend()
        assert (backend.state(), engine.is_resident) == ("RUNNING", True)
        allocator.has_no_host_memory = False
        assert come_back() == []
        update = mirrored.put(old)
        engine.receive_weights(StagedUpdate(update.path, update.state_hash))
        assert come_back() == []
        backend.suspend()
        mirrored.put(new)
        with pytest.raises(FrameError, match="half a version"):
            backend.resume()
        assert (backend.state(), engine.is_resident) == ("SUSPENDED", False)
        mirrored.put(old)  # what an interrupted load has left is of no version, whatever the mirror has
        with pytest.raises(FrameError, match="half a version"):
            backend.resume()
        monkeypatch.setattr(engine, "load", load)
        backend.resume()
        now = new
        mirrored.put(new)
        assert come_back() == []
        engine.shutdown()
