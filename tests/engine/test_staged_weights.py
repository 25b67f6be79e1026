"""Staged checkpoints on a model of two layers, without an engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

import safetensors.torch
import torch
from lib.transfer.pretended_rank import pretended_rank
from mirrored import Mirrored, prepare
from rank_models import without_weights
from vllm import ModelRegistry
from vllm.config import WeightTransferConfig
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from rose.engine.weights.weights import StagedUpdate, StagedWeightEngine, check_staged
from rose.errors import FrameError
from rose.messages import WeightUpdate
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


@pytest.fixture
def mirrored(tmp_path: Path) -> Iterator[Mirrored]:
    made = Mirrored(tmp_path / "mirror")
    yield made
    made.close()


def named(**tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": tensor for name, tensor in tensors.items()}


def deliver(engine: StagedWeightEngine, update: WeightUpdate) -> str | None:
    """Does what the engine's API server does; returns why the checkpoint was loaded whole."""
    reason = update.whole_because
    if reason is None:
        reason = prepare(engine, update.changes, update.state_hash)
    is_prepared = reason is None
    engine.receive_weights(
        StagedUpdate(path=update.path, state_hash=update.state_hash, is_prepared=is_prepared)
    )
    return reason if reason is not None else engine.why_whole


def test_what_changed_is_written_in_place_also_over_several_versions(
    engine: StagedWeightEngine, mirrored: Mirrored
) -> None:
    first, second = torch.arange(16.0).view(4, 4), torch.ones(4, 4)
    reason = deliver(engine, mirrored.put(named(first=first, second=second)))
    assert reason == "this is the first delivery to this engine"
    later = first.clone()
    later[1, 2] = float("nan")
    addresses = [layer.weight.data_ptr() for layer in (engine.model.first, engine.model.second)]
    assert deliver(engine, mirrored.put(named(first=later, second=second))) is None
    assert torch.equal(engine.model.first.weight.isnan().nonzero(), torch.tensor([[1, 2]]))
    behind = mirrored.version
    for value in (5.0, 7.0):
        later[1, 2], later[3, 3] = value, -value
        mirrored.put(named(first=later, second=second))
    assert deliver(engine, mirrored.update_from(behind)) is None
    assert torch.equal(engine.model.first.weight, later)
    assert torch.equal(engine.model.second.weight, second)
    assert addresses == [layer.weight.data_ptr() for layer in (engine.model.first, engine.model.second)]


def test_changes_are_taken_back_where_a_parameter_does_not_hold_the_old_bits(
    engine: StagedWeightEngine, mirrored: Mirrored, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.arange(16.0).view(4, 4)
    deliver(engine, mirrored.put(named(first=weight, second=weight + 1)))
    later = weight.clone()
    later[0, 0] = 7.0
    late = mirrored.put(named(first=later, second=later + 1))
    later[0, 1] = 8.0
    mirrored.put(named(first=later, second=later + 1))
    with torch.no_grad():
        engine.model.second.weight[0, 0] = 5.0
    with pytest.raises(FrameError, match=r"holds test/2 of state hash .*weights kept"):
        deliver(engine, late)
    assert torch.equal(engine.model.first.weight, weight)
    assert float(engine.model.second.weight[0, 0]) == 5.0

    def failing(*_: object) -> None:
        raise FrameError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "_load_whole", failing)
        with pytest.raises(FrameError, match="no memory"):
            deliver(engine, mirrored.update_from("test/0"))
    assert engine.why_whole == "second.weight does not hold the weights of the last update"
    assert not engine.is_mixed
    assert torch.equal(engine.model.first.weight, weight)
    assert float(engine.model.second.weight[0, 0]) == 5.0
    reason = deliver(engine, mirrored.update_from("test/0"))
    assert reason == "second.weight does not hold the weights of the last update"
    assert torch.equal(engine.model.first.weight, later)
    assert torch.equal(engine.model.second.weight, later + 1)


def test_changes_of_another_base_or_with_a_wrong_checksum_or_none_leave_the_whole_checkpoint(
    engine: StagedWeightEngine, mirrored: Mirrored
) -> None:
    def at(value: float) -> dict[str, torch.Tensor]:
        tensor = torch.arange(16.0).view(4, 4).clone()
        tensor[2, 2] = value
        return named(first=tensor, second=torch.ones(4, 4))

    deliver(engine, mirrored.put(at(1.0)))
    skipped = mirrored.put(at(2.0))
    last = mirrored.put(at(3.0))
    reason = engine.begin_changes(last.changes, last.state_hash)
    assert reason == "the changes don't lead from the weights in use to the new ones"
    assert "No such file" in str(engine.begin_changes([f"{last.changes[0]}x"], last.state_hash))
    path = Path(last.changes[0])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert "bucket 0 does not have its checksum" in str(
        prepare(engine, [*skipped.changes, *last.changes], last.state_hash)
    )
    path.write_bytes(b"short")
    assert "not a changes file" in str(engine.begin_changes(last.changes, last.state_hash))
    assert float(engine.model.first.weight[2, 2]) == 1.0


def test_where_much_changes_or_the_engine_is_far_behind_the_checkpoint_is_loaded_whole(
    engine: StagedWeightEngine, mirrored: Mirrored
) -> None:
    deliver(engine, mirrored.put(named(first=torch.ones(4, 4), second=torch.ones(4, 4))))
    far = mirrored.put(named(first=torch.zeros(4, 4), second=torch.zeros(4, 4)))
    assert deliver(engine, far) == "from test/0 to test/1, 32 of 32 elements change"
    assert engine.model.values() == [0.0, 0.0]
    mirrored.store.forget(set())
    assert deliver(engine, mirrored.update_from("test/0")) == "the changes since test/0 are not kept"


def test_a_mirror_that_has_moved_on_or_was_left_half_changed_is_not_loaded(
    engine: StagedWeightEngine, mirrored: Mirrored
) -> None:
    deliver(engine, mirrored.put(named(first=torch.full((4, 4), 1.0), second=torch.ones(4, 4))))
    late = mirrored.put(named(first=torch.full((4, 4), 2.0), second=torch.ones(4, 4)))
    mirrored.put(named(first=torch.full((4, 4), 3.0), second=torch.ones(4, 4)))
    with pytest.raises(FrameError, match=r"holds test/2 of state hash .*weights kept"):
        engine.receive_weights(StagedUpdate(path=late.path, state_hash=late.state_hash))
    assert engine.model.values() == [1.0, 1.0]
    data = Path(late.path).read_bytes()
    with Path(late.path).open("r+b") as file:
        file.seek(data.index(b"+test/2"))
        file.write(b"-")
    with pytest.raises(FrameError, match="its writer ended while it changed the weights"):
        engine.load()
    assert engine.model.values() == [1.0, 1.0]


def test_an_engine_that_becomes_active_has_the_mirrors_newest_version(
    engine: StagedWeightEngine, mirrored: Mirrored
) -> None:
    deliver(engine, mirrored.put(named(first=torch.full((4, 4), 1.0), second=torch.ones(4, 4))))
    engine.is_resident = False
    update = mirrored.put(named(first=torch.full((4, 4), 2.0), second=torch.ones(4, 4)))
    assert engine.begin_changes(["c"], update.state_hash) == "the weights are not on the device"
    deliver(engine, update)
    mirrored.put(named(first=torch.full((4, 4), 3.0), second=torch.ones(4, 4)))
    assert engine.model.values() == [1.0, 1.0]
    engine.load()
    engine.is_resident = True
    assert (engine.model.values(), engine.version) == ([3.0, 1.0], "test/2")
    later = torch.full((4, 4), 3.0)
    later[0, 0] = 19.0
    assert deliver(engine, mirrored.put(named(first=later, second=torch.ones(4, 4)))) is None
    assert engine.model.values() == [4.0, 1.0]


def test_a_model_without_a_plan_goes_on_loading_whole_checkpoints(
    engine_without_plan: StagedWeightEngine, mirrored: Mirrored
) -> None:
    engine = engine_without_plan
    reasons = []
    for value in (1.0, 2.0, 3.0):
        first = torch.full((4, 4), 1.0)
        first[0, 0] = value
        reasons.append(str(deliver(engine, mirrored.put(named(first=first, second=torch.zeros(4, 4))))))
        assert torch.equal(engine.model.first.weight, first)
    assert "no plan of this model" in reasons[1] and reasons[2] == reasons[1]


def test_only_the_very_file_that_was_checked_is_not_hashed_again(
    engine: StagedWeightEngine, tmp_path: Path
) -> None:
    first = stage(tmp_path, first=torch.full((4, 4), 1.0), second=torch.full((4, 4), 2.0))
    first.checked = check_staged(first.path, first.state_hash, is_active=True)
    with pytest.raises(FrameError, match="expected 0"):
        check_staged(first.path, "0", is_active=True)
    # The wrong hash shows that nobody compared it.
    engine.receive_weights(StagedUpdate(path=first.path, state_hash="0", checked=first.checked))
    assert engine.model.values() == [1.0, 2.0]
    other = stage(tmp_path, first=torch.full((4, 4), 3.0), second=torch.full((4, 4), 4.0))
    Path(other.path).replace(first.path)
    with pytest.raises(FrameError, match="weights kept"):
        engine.receive_weights(first)
    assert engine.model.values() == [1.0, 2.0]
