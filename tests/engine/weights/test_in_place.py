"""Changes written in place leave the model bit for bit as its loader would have made it."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed")

from lib.transfer.pretended_rank import pretended_rank
from mirrored import Mirrored, prepare
from rank_models import (
    KINDS,
    Checkpoint,
    after_a_step,
    dense,
    differing,
    int8,
    loaded_model,
)

from rose import _delta
from rose.engine.weights.in_place import InPlaceWriter, PreparedChanges, replace_on_device
from rose.engine.weights.reload import LiveModel
from rose.engine.weights.weights import StagedUpdate, StagedWeightEngine
from rose.errors import FrameError
from rose.transfer.format.shared_planes import PlanesFile


@pytest.fixture(scope="module", params=["untied", "tied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(tmp_path_factory.mktemp(request.param), dense(request.param == "tied"))


@pytest.fixture(params=[(0, 1), (0, 2), (1, 2), (3, 4)], ids=["tp1", "tp2-0", "tp2-1", "tp4-3"])
def rank_config(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Iterator[Any]:
    """Returns the configuration of one rank. The model has two KV heads, which four ranks hold copies of."""
    rank, size = request.param
    with pretended_rank(checkpoint.vllm_config, tp_rank=rank, tp_size=size) as config:
        yield config


def writer_of(model: torch.nn.Module, config: Any) -> InPlaceWriter:
    return InPlaceWriter([LiveModel(model, config.model_config)], config)


def prepared(writer: InPlaceWriter, planes: PlanesFile, paths: list[str], base: str) -> str | None:
    """Has the changes prepared from the state of that hash to the mirror's; returns why they can't be."""
    with planes.reading() as (_, state_hash):
        writer.begin(planes, paths, base, state_hash)
    while not writer.result()[0]:
        time.sleep(0.001)
    return writer.result()[1]


def written(writer: InPlaceWriter, planes: PlanesFile) -> PreparedChanges:
    """Writes what was prepared."""
    changes = writer.take()
    assert changes is not None
    changes.write()
    changes.finish(planes)
    return changes


def test_a_rank_ends_up_with_the_bits_that_its_loader_would_have_loaded(
    checkpoint: Checkpoint, rank_config: Any, mirrored: Mirrored
) -> None:
    first = mirrored.put(checkpoint.tensors)
    planes = PlanesFile(Path(first.path))
    model = loaded_model(rank_config, checkpoint.tensors)
    writer = writer_of(model, rank_config)
    later = after_a_step(checkpoint.tensors, 0.02, seed=7)
    update = mirrored.put(later)
    assert prepared(writer, planes, update.changes, first.state_hash) is None
    changes = written(writer, planes)
    assert 0 < changes.num_changed < 0.03 * sum(each.numel() for each in model.parameters())
    assert changes.num_loaded == 0
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
    paths = mirrored.update_from(behind).changes
    assert len(paths) == 2
    assert prepared(writer, planes, paths, update.state_hash) is None
    written(writer, planes)
    assert differing(model, loaded_model(rank_config, later)) == []
    writer.close()
    planes.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_a_model_that_is_ready_to_compute_ends_up_as_one_that_was_loaded_anew(
    kind: str, mirrored: Mirrored, tmp_path: Path
) -> None:
    """vLLM packs weights on a CPU, quantizes, and keeps products of weights, and no kind is loaded whole."""
    make, arguments = KINDS[kind]
    checkpoint = Checkpoint(tmp_path / "model", make(), is_finite=True, **arguments)
    size = 2 if "enable_expert_parallel" in arguments else 1
    with pretended_rank(checkpoint.vllm_config, tp_rank=size - 1, tp_size=size) as config:
        tensors = checkpoint.tensors
        update = mirrored.put(tensors)
        planes = PlanesFile(Path(update.path))
        model = loaded_model(config, tensors, is_processed=True)
        writer = writer_of(model, config)
        num_loaded = []
        for seed, only in enumerate(("layers.1.", "", "bias", "embed", "kv_b_proj"), start=1):
            base, tensors = update.state_hash, after_a_step(tensors, 0.05, seed, only=only, is_finite=True)
            update = mirrored.put(tensors)
            assert prepared(writer, planes, update.changes, base) is None
            num_loaded.append(written(writer, planes).num_loaded)
            assert differing(model, loaded_model(config, tensors, is_processed=True)) == [], only
        # Without AVX-512, vLLM packs no bfloat16.
        assert num_loaded[0] < max(num_loaded[1], 1)
        assert num_loaded[2:] == [0, 1 if kind == "float32" else 0, 0]
    writer.close()
    planes.close()


def test_a_mirror_that_moves_on_ahead_of_the_pause_leaves_the_old_weights(
    mirrored: Mirrored, tmp_path: Path
) -> None:
    """Layers that are loaded from the mirror would get other weights than the elements that are written."""
    checkpoint = Checkpoint(tmp_path / "model", int8(), is_finite=True)
    with pretended_rank(checkpoint.vllm_config) as config:
        first = mirrored.put(checkpoint.tensors)
        model = loaded_model(config, checkpoint.tensors, is_processed=True)
        engine = StagedWeightEngine(None, config, torch.device("cpu"), model)
        engine.receive_weights(StagedUpdate(first.path, first.state_hash))
        second = mirrored.put(after_a_step(checkpoint.tensors, 0.05, seed=1, is_finite=True))
        assert prepare(engine, second.changes, second.state_hash) is None
        newest = after_a_step(checkpoint.tensors, 0.05, seed=2, is_finite=True)
        mirrored.put(newest)
        with pytest.raises(FrameError, match=r"holds test/2 of state hash .*; weights kept"):
            engine.receive_weights(StagedUpdate(second.path, second.state_hash, is_prepared=True))
        assert differing(model, loaded_model(config, checkpoint.tensors, is_processed=True)) == []
        third = mirrored.update_from("test/0")
        assert prepare(engine, third.changes, third.state_hash) is None
        engine.receive_weights(StagedUpdate(third.path, third.state_hash, is_prepared=True))
        assert engine.why_whole is None
        assert differing(model, loaded_model(config, newest, is_processed=True)) == []
        engine.shutdown()


def test_changes_that_meet_another_element_are_taken_back_to_the_last_bit(
    checkpoint: Checkpoint, mirrored: Mirrored
) -> None:
    with pretended_rank(checkpoint.vllm_config) as config:
        first = mirrored.put(checkpoint.tensors)
        planes = PlanesFile(Path(first.path))
        model = loaded_model(config, checkpoint.tensors)
        writer = writer_of(model, config)
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
        writer = writer_of(model, config)
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
