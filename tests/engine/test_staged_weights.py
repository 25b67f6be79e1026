"""Staged checkpoints on a model of two layers, without an engine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

import safetensors.torch
import torch
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from rose.engine.weights import StagedUpdate, StagedWeightEngine, check_staged
from rose.errors import FrameError
from rose.transfer.checkpoint import checkpoint_state_hash


class TwoLayers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4, bias=False)
        self.second = torch.nn.Linear(4, 4, bias=False)

    def load_weights(self, tensors: Any) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in tensors:
            loader = getattr(parameters[name], "weight_loader", default_weight_loader)
            loader(parameters[name], tensor)

    def values(self) -> list[float]:
        return [float(layer.weight.detach().mean()) for layer in (self.first, self.second)]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> StagedWeightEngine:
    """vLLM's half of the engine would need a whole configuration."""
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    made: Any = StagedWeightEngine.__new__(StagedWeightEngine)
    made.model, made.model_config = TwoLayers(), SimpleNamespace(dtype=torch.float32)
    made.is_resident, made._staged = True, None
    record_metadata_for_reloading(made.model)
    return made


def stage(folder: Path, **tensors: torch.Tensor) -> StagedUpdate:
    path = folder / f"weights-{len(list(folder.iterdir()))}.safetensors"
    safetensors.torch.save_file({f"{name}.weight": tensor for name, tensor in tensors.items()}, path)
    return StagedUpdate(path=str(path), state_hash=str(checkpoint_state_hash(path)))


def test_a_good_file_of_another_model_leaves_the_old_weights(
    engine: StagedWeightEngine, tmp_path: Path
) -> None:
    engine.receive_weights(stage(tmp_path, first=torch.full((4, 4), 1.0), second=torch.full((4, 4), 2.0)))
    assert engine.model.values() == [1.0, 2.0]
    with pytest.raises(Exception, match="Attempted to load weight"):
        engine.receive_weights(stage(tmp_path, first=torch.full((4, 4), 3.0), second=torch.ones(5, 4)))
    assert engine.model.values() == [1.0, 2.0]
    with pytest.raises(KeyError, match="third"):
        engine.receive_weights(stage(tmp_path, first=torch.full((4, 4), 3.0), third=torch.ones(4, 4)))
    assert engine.model.values() == [1.0, 2.0]
    engine.receive_weights(stage(tmp_path, first=torch.full((4, 4), 5.0), second=torch.full((4, 4), 6.0)))
    assert engine.model.values() == [5.0, 6.0]
    engine.shutdown()


def test_only_the_very_file_that_was_checked_is_not_hashed_again(
    engine: StagedWeightEngine, tmp_path: Path
) -> None:
    first = stage(tmp_path, first=torch.full((4, 4), 1.0), second=torch.full((4, 4), 2.0))
    first.checked = check_staged(first.path, first.state_hash)
    with pytest.raises(FrameError, match="expected 0"):
        check_staged(first.path, "0")
    # The wrong hash shows that nobody compared it.
    engine.receive_weights(StagedUpdate(path=first.path, state_hash="0", checked=first.checked))
    assert engine.model.values() == [1.0, 2.0]
    other = stage(tmp_path, first=torch.full((4, 4), 3.0), second=torch.full((4, 4), 4.0))
    Path(other.path).replace(first.path)
    with pytest.raises(FrameError, match="weights kept"):
        engine.receive_weights(first)
    assert engine.model.values() == [1.0, 2.0]
    engine.shutdown()
