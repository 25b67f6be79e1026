"""Staged checkpoints on a model of two layers, without an engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

import safetensors.torch
import torch
from rank_models import without_weights
from vllm import ModelRegistry
from vllm.config import WeightTransferConfig
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from rose.engine.weights.shard_recorder import pretended_rank
from rose.engine.weights.weights import StagedUpdate, StagedWeightEngine, check_staged
from rose.errors import FrameError
from rose.transfer.format.checkpoint import checkpoint_state_hash


class TwoLayers(torch.nn.Module):
    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
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


class WithoutPlan(TwoLayers):
    """Can't be built without memory, so no plan of its loader can be recorded."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config)
        self.first.weight.numpy(force=True)


def engine_of(model_class: type[TwoLayers], folder: Path) -> Iterator[StagedWeightEngine]:
    """vLLM knows this model by its name, in the configuration of an engine with a single rank."""
    config = without_weights(folder, dtype="float32").create_engine_config()
    ModelRegistry.register_model(model_class.__name__, model_class)
    config.model_config.hf_config.architectures = [model_class.__name__]
    with pretended_rank(config) as ranked:
        model = initialize_model(ranked)
        made = StagedWeightEngine(WeightTransferConfig(backend="rose"), ranked, torch.device("cpu"), model)
        yield made
        made.shutdown()


@pytest.fixture
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StagedWeightEngine]:
    yield from engine_of(TwoLayers, tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine_without_plan(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StagedWeightEngine]:
    yield from engine_of(WithoutPlan, tmp_path_factory.mktemp("model"))


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


def test_the_next_file_is_written_in_place_where_one_is_in_use(
    engine: StagedWeightEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
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


def test_where_the_old_weights_are_not_there_the_whole_file_is_loaded(
    engine: StagedWeightEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
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


def test_a_file_with_many_changes_is_loaded_whole_and_a_broken_one_refused(
    engine: StagedWeightEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
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


def test_a_model_without_a_plan_goes_on_loading_whole_files(
    engine_without_plan: StagedWeightEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_without_plan
    for value in (1.0, 2.0, 3.0):
        update = stage(tmp_path, first=torch.full((4, 4), value), second=torch.zeros(4, 4))
        assert not engine.begin_comparison(update.path)
        assert engine.has_compared()
        engine.receive_weights(update)
        assert engine.model.values() == [value, 0.0]
    assert caplog.text.count("no plan of this model") == 1


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
