"""Changes written in place leave the model bit for bit as its loader would have made it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed")

import safetensors.torch
from rank_models import Checkpoint, dense, experts
from vllm.utils.torch_utils import set_default_torch_dtype

from rose.engine.weights.in_place import compare, why_not_in_place
from rose.engine.weights.shard_recorder import detached_config, pretended_rank, record_shard_plan
from rose.errors import FrameError
from rose.transfer.format.checkpoint import read_checkpoint
from rose.transfer.format.device_delta import HostDeltas


def loaded_model(vllm_config: Any, tensors: dict[str, torch.Tensor]) -> Any:
    from vllm.model_executor.model_loader.utils import initialize_model

    with set_default_torch_dtype(vllm_config.model_config.dtype):
        model: Any = initialize_model(vllm_config=detached_config(vllm_config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # the loader never writes padding
        model.load_weights(iter(tensors.items()))
    return model


def bits(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach().view(torch.int16) for name, each in model.named_parameters()}


def after_a_step(tensors: dict[str, torch.Tensor], share: float) -> dict[str, torch.Tensor]:
    """Returns tensors in which this share of the elements has new random bits, with NaN, Inf and -0."""
    generator = torch.Generator().manual_seed(7)
    later = {}
    for name, tensor in tensors.items():
        old = tensor.view(torch.int16)
        drawn = torch.randint(-32768, 32768, old.shape, dtype=torch.int16, generator=generator)
        is_new = torch.rand(old.shape, generator=generator) < share
        later[name] = torch.where(is_new, drawn, old).view(torch.bfloat16)
    return later


def staged(folder: Path, name: str, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    path = folder / f"{name}.safetensors"
    safetensors.torch.save_file(tensors, path)
    return read_checkpoint(path)


@pytest.fixture(scope="module", params=["untied", "tied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp(request.param), dense(request.param == "tied"))


@pytest.fixture(params=[(0, 1), (0, 2), (1, 2), (3, 4)], ids=["tp1", "tp2-0", "tp2-1", "tp4-3"])
def rank_config(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Iterator[Any]:
    """Returns the configuration of one rank. The model has two KV heads, which four ranks hold copies of."""
    rank, size = request.param
    with pretended_rank(checkpoint.vllm_config, tp_rank=rank, tp_size=size) as config:
        yield config


def test_a_rank_ends_up_with_the_bits_that_its_loader_would_have_loaded(
    checkpoint: Checkpoint, rank_config: Any, tmp_path: Path
) -> None:
    later = after_a_step(checkpoint.tensors, 0.02)
    plan = record_shard_plan(rank_config, checkpoint.specs)
    old, new = (staged(tmp_path, *each) for each in (("old", checkpoint.tensors), ("new", later)))
    model = loaded_model(rank_config, checkpoint.tensors)
    assert why_not_in_place(model, None) is None
    changes = compare(old, new, plan)
    assert 0 < changes.num_changed < 0.03 * plan.held_elements()
    changes.write(model, HostDeltas())
    expected, found = bits(loaded_model(rank_config, later)), bits(model)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    # The model no longer holds the weights that the changes start from.
    with pytest.raises(FrameError, match="did not hold the weights of the last update"):
        changes.write(model, HostDeltas())


def test_files_that_differ_too_much_or_in_shape_are_loaded_whole(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with pretended_rank(checkpoint.vllm_config) as config:
        plan = record_shard_plan(config, checkpoint.specs)
    old = staged(tmp_path, "old", checkpoint.tensors)
    with pytest.raises(FrameError, match="elements change"):
        compare(old, staged(tmp_path, "new", after_a_step(checkpoint.tensors, 0.5)), plan)
    with pytest.raises(FrameError, match="is not the same in both"):
        compare(old, dict(list(old.items())[1:]), plan)


def test_models_that_compute_with_more_than_their_parameters_are_recognised(tmp_path: Path) -> None:
    mixture = Checkpoint(tmp_path, experts())
    with pretended_rank(mixture.vllm_config) as config:
        model = loaded_model(config, mixture.tensors)
    assert "experts is a" in str(why_not_in_place(model, None))
    assert why_not_in_place(model, "fp8") == "weights are quantized with fp8"
    packed: Any = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert why_not_in_place(packed, None) is None
    packed[0].cpu_linear = lambda x, weight, bias: x
    assert why_not_in_place(packed, None) == "0 computes with a packed copy"
