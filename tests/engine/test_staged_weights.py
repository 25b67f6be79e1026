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

from rose.engine.weights.in_place import InPlaceWriter
from rose.engine.weights.weights import StagedUpdate, StagedWeightEngine, check_staged
from rose.errors import FrameError
from rose.transfer.format.checkpoint import checkpoint_state_hash
from rose.transfer.format.shard_plan import ShardCopy, ShardPlan, StridedView


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
    made.is_resident, made._staged, made._in_place = True, None, None
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


@pytest.fixture
def in_place(engine: StagedWeightEngine) -> Any:
    """The engine's half that writes in place; the plan would need a model of vLLM's."""
    config = SimpleNamespace(model_config=SimpleNamespace(quantization=None))
    writer: Any = InPlaceWriter(engine.model, config, Path("unused"))
    names = [f"{layer}.weight" for layer in ("first", "second")]
    views = [StridedView(name=name, offset=0, shape=(4, 4), stride=(4, 1)) for name in names]
    copies = [ShardCopy(source=view, target=view) for view in views]
    writer._plan = ShardPlan(rank="0", shapes=dict.fromkeys(names, (4, 4)), copies=copies, whole=[])
    engine._in_place = writer
    return writer


def test_the_next_file_is_written_in_place_where_one_is_in_use(
    engine: StagedWeightEngine, in_place: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rose.engine")
    first, second = torch.arange(16.0).view(4, 4), torch.ones(4, 4)
    old = stage(tmp_path, first=first, second=second)
    assert not engine.begin_comparison(old.path)
    engine.receive_weights(old)
    later = first.clone()
    later[1, 2] = float("nan")
    new = stage(tmp_path, first=later, second=second)
    assert engine.begin_comparison(new.path)
    engine.receive_weights(new)
    assert torch.equal(engine.model.first.weight.isnan().nonzero(), torch.tensor([[1, 2]]))
    assert "in place elements=1" in caplog.text
    # Back again, and from there to a file that nobody compared.
    assert engine.begin_comparison(old.path)
    engine.receive_weights(old)
    assert torch.equal(engine.model.first.weight, first)
    engine.receive_weights(stage(tmp_path, first=second, second=first))
    assert torch.equal(engine.model.second.weight, first)
    assert caplog.text.count("in place elements=1") == 2
    engine.shutdown()


def test_where_the_old_weights_are_not_there_the_whole_file_is_loaded(
    engine: StagedWeightEngine, in_place: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.arange(16.0).view(4, 4)
    engine.receive_weights(stage(tmp_path, first=weight, second=weight + 1))
    later = weight.clone()
    later[0, 0] = 7.0
    new = stage(tmp_path, first=later, second=later + 1)
    assert engine.begin_comparison(new.path)
    with torch.no_grad():
        engine.model.second.weight[0, 0] = 5.0
    engine.receive_weights(new)
    assert torch.equal(engine.model.first.weight, later)
    assert torch.equal(engine.model.second.weight, later + 1)
    assert "second.weight did not hold the weights of the last update" in caplog.text
    engine.shutdown()


def test_a_file_that_changes_too_much_or_is_none_is_loaded_or_refused(
    engine: StagedWeightEngine, in_place: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rose.engine")
    engine.receive_weights(stage(tmp_path, first=torch.ones(4, 4), second=torch.ones(4, 4)))
    new = stage(tmp_path, first=torch.zeros(4, 4), second=torch.zeros(4, 4))
    assert engine.begin_comparison(new.path)
    engine.receive_weights(new)
    assert engine.model.values() == [0.0, 0.0] and "32 of 32 elements change" in caplog.text
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"none")
    assert not engine.begin_comparison(str(broken))
    assert not engine.begin_comparison(str(tmp_path / "missing.safetensors"))
    assert "can't compare" in caplog.text
    engine.shutdown()


def test_a_model_without_a_plan_goes_on_loading_whole_files(
    engine: StagedWeightEngine, in_place: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_place._plan = None  # and this configuration builds no model
    for value in (1.0, 2.0, 3.0):
        update = stage(tmp_path, first=torch.full((4, 4), value), second=torch.zeros(4, 4))
        assert not engine.begin_comparison(update.path)
        assert engine.has_compared()
        engine.receive_weights(update)
        assert engine.model.values() == [value, 0.0]
    assert caplog.text.count("no plan of this model") == 1
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
