"""Changes written in place leave the model bit for bit as its loader would have made it."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed")

from mirrored import Mirrored
from rank_models import Checkpoint, after_a_step, dense, differing, experts, loaded_model
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.platforms import current_platform

from rose import _delta
from rose.engine.weights.in_place import InPlaceWriter, replace_on_device, why_not_in_place
from rose.engine.weights.shard_recorder import pretended_rank
from rose.errors import FrameError
from rose.transfer.format.shared_planes import PlanesFile


@pytest.fixture
def mirrored(tmp_path: Path) -> Iterator[Mirrored]:
    made = Mirrored(tmp_path / "mirror")
    yield made
    made.close()


@pytest.fixture(scope="module", params=["untied", "tied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp(request.param), dense(request.param == "tied"))


@pytest.fixture(params=[(0, 1), (0, 2), (1, 2), (3, 4)], ids=["tp1", "tp2-0", "tp2-1", "tp4-3"])
def rank_config(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Iterator[Any]:
    """Returns the configuration of one rank. The model has two KV heads, which four ranks hold copies of."""
    rank, size = request.param
    with pretended_rank(checkpoint.vllm_config, tp_rank=rank, tp_size=size) as config:
        yield config


def prepared(writer: InPlaceWriter, planes: PlanesFile, paths: list[str], base: str) -> str | None:
    """Has the changes prepared from the state of that hash to the mirror's; returns why they can't be."""
    with planes.reading() as (_, state_hash):
        writer.begin(planes.layout, paths, base, state_hash)
    while not writer.result()[0]:
        time.sleep(0.001)
    return writer.result()[1]


def written(writer: InPlaceWriter, planes: PlanesFile) -> int:
    """Writes what was prepared; returns the number of changed elements."""
    changes = writer.take()
    assert changes is not None and writer.plan is not None
    changes.write()
    changes.pack(planes, writer.plan)
    return changes.num_changed


def test_a_rank_ends_up_with_the_bits_that_its_loader_would_have_loaded(
    checkpoint: Checkpoint, rank_config: Any, mirrored: Mirrored
) -> None:
    first = mirrored.put(checkpoint.tensors)
    planes = PlanesFile(Path(first.path))
    model = loaded_model(rank_config, checkpoint.tensors)
    writer = InPlaceWriter(model, rank_config)
    assert writer.problem is None
    later = after_a_step(checkpoint.tensors, 0.02, seed=7)
    update = mirrored.put(later)
    assert prepared(writer, planes, update.changes, first.state_hash) is None
    assert 0 < written(writer, planes) < 0.03 * sum(each.numel() for each in model.parameters())
    assert differing(model, loaded_model(rank_config, later)) == []
    # The model no longer holds the weights that the changes start from.
    assert prepared(writer, planes, update.changes, first.state_hash) is None
    with pytest.raises(FrameError, match="does not hold the weights"):
        written(writer, planes)
    assert differing(model, loaded_model(rank_config, later)) == []
    behind = mirrored.version
    for seed in (8, 9):
        later = after_a_step(later, 0.02, seed=seed)
        mirrored.put(later)
    changes = mirrored.update_from(behind).changes
    assert len(changes) == 2
    assert prepared(writer, planes, changes, update.state_hash) is None
    written(writer, planes)
    assert differing(model, loaded_model(rank_config, later)) == []
    writer.close()
    planes.close()


@pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM's CPU platform packs weights")
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_layers_with_packed_copies_compute_with_the_new_weights(
    is_tied: bool, mirrored: Mirrored, tmp_path: Path
) -> None:
    """In float32, which oneDNN packs on every processor."""
    checkpoint = Checkpoint(tmp_path / "model", dense(is_tied), dtype="float32")
    generator = torch.Generator().manual_seed(1)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator) for name, tensor in checkpoint.tensors.items()
    }
    with pretended_rank(checkpoint.vllm_config) as config:
        first = mirrored.put(tensors)
        planes = PlanesFile(Path(first.path))
        model = loaded_model(config, tensors, is_processed=True)
        writer = InPlaceWriter(model, config)
        assert writer.problem is None
        later = dict(tensors)
        for name in ("model.layers.1.self_attn.k_proj.weight", "model.embed_tokens.weight"):
            later[name] = tensors[name].clone()
            later[name][::7, ::5] += 1.0
        update = mirrored.put(later)
        assert prepared(writer, planes, update.changes, first.state_hash) is None
        written(writer, planes)
        fresh, old = (loaded_model(config, each, is_processed=True) for each in (later, tensors))
    for name, module in model.named_modules():
        if getattr(module, "cpu_linear", None) is None:
            continue
        found, expected, before = (outputs(each.get_submodule(name)) for each in (model, fresh, old))
        assert torch.equal(found, expected), name
        is_changed = name in ("model.layers.1.self_attn.qkv_proj", "model.embed_tokens")
        assert torch.equal(found, before) != (is_changed or (is_tied and name == "lm_head")), name
    assert differing(model, fresh) == []
    writer.close()
    planes.close()


def outputs(module: Any) -> torch.Tensor:
    parameters, _ = get_layerwise_info(module).restore_metadata
    inputs = torch.linspace(-1, 1, parameters["weight"].shape[1]).repeat(3, 1)
    result: torch.Tensor = module.cpu_linear(inputs, module.weight, None)
    return result


def test_changes_that_meet_another_element_are_taken_back_to_the_last_bit(
    checkpoint: Checkpoint, mirrored: Mirrored
) -> None:
    with pretended_rank(checkpoint.vllm_config) as config:
        first = mirrored.put(checkpoint.tensors)
        planes = PlanesFile(Path(first.path))
        model = loaded_model(config, checkpoint.tensors)
        writer = InPlaceWriter(model, config)
        later = after_a_step(checkpoint.tensors, 0.02, seed=7)
        mirrored.put(later)
        mirrored.put(after_a_step(later, 0.02, seed=8))
        changes = mirrored.update_from("test/0").changes
        assert prepared(writer, planes, changes, first.state_hash) is None
        taken = writer.take()
        assert taken is not None
        with torch.no_grad():
            model.model.layers[-1].mlp.down_proj.weight.fill_(3.0)  # among the last to be written
        as_it_was = {name: each.detach().clone() for name, each in model.named_parameters()}
        with pytest.raises(FrameError, match=r"down_proj\.weight does not hold the weights"):
            taken.write()
        changed = {name: each.detach().view(torch.int16) for name, each in model.named_parameters()}
        assert any(not torch.equal(changed[name], old.view(torch.int16)) for name, old in as_it_was.items())
        assert taken.take_back() is None
        assert all(torch.equal(changed[name], old.view(torch.int16)) for name, old in as_it_was.items())
    writer.close()
    planes.close()


def test_memory_can_be_freed_after_an_update_and_is_not_written_then(
    checkpoint: Checkpoint, mirrored: Mirrored
) -> None:
    with pretended_rank(checkpoint.vllm_config) as config:
        first = mirrored.put(checkpoint.tensors)
        planes = PlanesFile(Path(first.path))
        model = loaded_model(config, checkpoint.tensors)
        writer = InPlaceWriter(model, config)
        changes = mirrored.put(after_a_step(checkpoint.tensors, 0.02, seed=7)).changes
        assert prepared(writer, planes, changes, first.state_hash) is None
        taken = writer.take()
        assert taken is not None
        taken.write()
        assert taken.take_back() is None
        model.model.layers[-1].mlp.down_proj.weight.untyped_storage().resize_(0)
        with pytest.raises(FrameError, match=r"down_proj\.weight has no memory: the engine is inactive"):
            taken.write()
        # Other ranks wait for this answer, whatever has failed.
        assert "has no memory" in str(taken.take_back())
    writer.close()
    planes.close()


@pytest.mark.parametrize("size", [20, 3000])
def test_a_device_exchanges_elements_as_the_processor_does(size: int) -> None:
    rng = np.random.default_rng(size)
    bits = rng.integers(0, 65536, size).astype(np.uint16)
    places = np.flatnonzero(rng.random(size) < 0.3).astype(np.int32)
    old, new = bits[places], rng.integers(0, 65536, places.size).astype(np.uint16)
    other = new.copy()
    other[-1] ^= 1
    found, expected = torch.zeros(size + 5, dtype=torch.int16), np.zeros(size + 5, np.uint16)
    found[5:], expected[5:] = torch.from_numpy(bits.view(np.int16)), bits
    for before, after, is_right in ((old, new, True), (new, old, True), (other, old, False)):
        assert replace_on_device(found, places, 5, before, after) is is_right
        assert _delta.exchange(expected, places, 5, before, after) is is_right
        np.testing.assert_array_equal(found.numpy().view(np.uint16), expected)


def test_models_that_compute_with_more_than_their_parameters_are_recognised(tmp_path: Path) -> None:
    mixture = Checkpoint(tmp_path, experts())
    with pretended_rank(mixture.vllm_config) as config:
        model = loaded_model(config, mixture.tensors)
    assert "experts is a" in str(why_not_in_place(model, None))
    assert why_not_in_place(model, "fp8") == "weights are quantized with fp8"
