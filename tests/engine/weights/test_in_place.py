"""Changes written in place leave the model bit for bit as its loader would have made it."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

pytest.importorskip("vllm", reason="vllm is not installed")

from mirrored import Mirrored, prepare
from rank_models import (
    Checkpoint,
    after_a_step,
    biased,
    dense,
    differing,
    experts,
    int8,
    latent,
    loaded_model,
    state_space,
    with_head,
)

from rose import _delta
from rose.engine.weights.in_place import InPlaceWriter, PreparedChanges, replace_on_device
from rose.engine.weights.reload import DRAFTER_PREFIX, LiveModel
from rose.engine.weights.shard_recorder import pretended_rank
from rose.engine.weights.weights import StagedUpdate, StagedWeightEngine
from rose.errors import FrameError
from rose.transfer.format.checkpoint import checkpoint_state_hash
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
        writer.begin(planes.layout, paths, base, state_hash)
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


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "untied": (lambda: dense(False), {}),
    "tied": (lambda: dense(True), {}),
    "float32": (lambda: dense(True), {"dtype": "float32"}),
    "biases": (biased, {}),
    "experts": (experts, {}),
    "expert parallel": (experts, {"enable_expert_parallel": True}),
    "latent": (latent, {}),
    "state space": (state_space, {}),
    "int8": (int8, {}),
}


@pytest.mark.parametrize("kind", KINDS)
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


def test_a_speculative_head_in_the_models_checkpoint_follows_with_it(
    mirrored: Mirrored, tmp_path: Path
) -> None:
    """It shares the model's embedding and output head, as vLLM has it share them."""
    speculation = {"method": "mtp", "num_speculative_tokens": 1}
    checkpoint = Checkpoint(tmp_path / "model", with_head(), is_finite=True, speculative_config=speculation)
    with pretended_rank(checkpoint.vllm_config) as config:
        draft_config = config.speculative_config.draft_model_config
        assert draft_config.model == config.model_config.model

        def pair(tensors: dict[str, torch.Tensor]) -> tuple[Any, Any]:
            model = loaded_model(config, tensors, is_processed=True)
            head = loaded_model(config, tensors, is_processed=True, model_config=draft_config)
            head.model.embed_tokens, head.lm_head = model.model.embed_tokens, model.lm_head
            return model, head

        tensors = checkpoint.tensors
        update = mirrored.put(tensors)
        planes = PlanesFile(Path(update.path))
        model, head = pair(tensors)
        models = [LiveModel(model, config.model_config), LiveModel(head, draft_config)]
        writer = InPlaceWriter(models, config)
        for seed, only in enumerate(("mtp_layers", ""), start=1):
            base, tensors = update.state_hash, after_a_step(tensors, 0.05, seed, only=only, is_finite=True)
            update = mirrored.put(tensors)
            assert prepared(writer, planes, update.changes, base) is None
            assert written(writer, planes).num_changed > 0
            fresh_model, fresh_head = pair(tensors)
            assert differing(model, fresh_model) == differing(head, fresh_head) == []
    writer.close()
    planes.close()


def test_a_drafter_with_a_checkpoint_of_its_own_follows_the_tensors_that_are_published_for_it(
    mirrored: Mirrored, tmp_path: Path
) -> None:
    drafts = Checkpoint(tmp_path / "drafter", dense(is_tied=True), is_finite=True)
    speculation = {"method": "draft_model", "model": str(tmp_path / "drafter"), "num_speculative_tokens": 1}
    checkpoint = Checkpoint(tmp_path / "model", biased(), is_finite=True, speculative_config=speculation)
    with pretended_rank(checkpoint.vllm_config) as config:
        draft_config = config.speculative_config.draft_model_config

        def loaded_drafter(tensors: dict[str, torch.Tensor]) -> Any:
            return loaded_model(drafts.vllm_config, tensors, is_processed=True)

        def published() -> dict[str, torch.Tensor]:
            return tensors | {f"{DRAFTER_PREFIX}{name}": each for name, each in drafter_tensors.items()}

        tensors, drafter_tensors = checkpoint.tensors, drafts.tensors
        model = loaded_model(config, tensors, is_processed=True)
        drafter = loaded_drafter(drafter_tensors)
        engine = StagedWeightEngine(None, config, torch.device("cpu"), model)
        engine.add_head(drafter, draft_config)
        alone = tmp_path / "alone.safetensors"
        safetensors.torch.save_file(tensors, alone)
        engine.receive_weights(StagedUpdate(str(alone), str(checkpoint_state_hash(alone))))
        assert f"the drafter {tmp_path / 'drafter'} keeps the weights" in str(engine.stale_drafter)
        assert differing(drafter, loaded_drafter(drafts.tensors)) == []
        update = mirrored.put(published())
        engine.receive_weights(StagedUpdate(update.path, update.state_hash))
        assert engine.stale_drafter is None
        for seed, only in enumerate(("layers.1.", ""), start=1):
            tensors = after_a_step(tensors, 0.05, seed, only=only, is_finite=True)
            drafter_tensors = after_a_step(drafter_tensors, 0.05, seed + 10, only=only, is_finite=True)
            update = mirrored.put(published())
            assert prepare(engine, update.changes, update.state_hash) is None
            engine.receive_weights(StagedUpdate(update.path, update.state_hash, is_prepared=True))
            assert engine.why_whole is None
            assert differing(model, loaded_model(config, tensors, is_processed=True)) == []
            assert differing(drafter, loaded_drafter(drafter_tensors)) == []
        assert engine.stale_drafter is None
        engine.shutdown()


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
