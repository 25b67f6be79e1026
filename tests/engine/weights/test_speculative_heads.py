"""Speculative heads and drafters follow with their model, or the engine says that they don't."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

pytest.importorskip("vllm", reason="vllm is not installed")

from lib.transfer.pretended_rank import pretended_rank
from mirrored import Mirrored, prepare
from rank_models import Checkpoint, after_a_step, biased, dense, differing, loaded_model, with_head

from rose.engine.weights.reload import DRAFTER_PREFIX
from rose.engine.weights.weights import StagedUpdate, StagedWeightEngine
from rose.messages import WeightUpdate
from rose.transfer.format.checkpoint import checkpoint_state_hash

MTP = {"method": "mtp", "num_speculative_tokens": 1}


class WithHead:
    """An engine of a model whose checkpoint has a head.

    The head shares the model's embedding and output head, as vLLM has it share them.
    """

    def __init__(self, checkpoint: Checkpoint, config: Any) -> None:
        self.tensors = checkpoint.tensors
        self._config = config
        self._draft_config = config.speculative_config.draft_model_config
        self.model, self.head = self.loaded(self.tensors)
        self.engine = StagedWeightEngine(None, config, torch.device("cpu"), self.model)
        self.engine.add_head(self.head, self._draft_config)

    def loaded(self, tensors: dict[str, torch.Tensor]) -> tuple[Any, Any]:
        model = loaded_model(self._config, tensors, is_processed=True)
        head = loaded_model(self._config, tensors, is_processed=True, model_config=self._draft_config)
        head.model.embed_tokens, head.lm_head = model.model.embed_tokens, model.lm_head
        return model, head

    def load(self, update: WeightUpdate) -> str | None:
        """Loads all weights; returns why the head was not updated."""
        self.engine.receive_weights(StagedUpdate(update.path, update.state_hash))
        return self.engine.stale_drafter

    def change(self, update: WeightUpdate) -> None:
        assert prepare(self.engine, update.changes, update.state_hash) is None
        self.engine.receive_weights(StagedUpdate(update.path, update.state_hash, is_prepared=True))
        assert self.engine.why_whole is None

    def differing(self, of_model: dict[str, torch.Tensor], of_head: dict[str, torch.Tensor]) -> list[str]:
        return differing(self.model, self.loaded(of_model)[0]) + differing(self.head, self.loaded(of_head)[1])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("with-head")
    return Checkpoint(folder, with_head(), is_finite=True, speculative_config=MTP)


@pytest.fixture
def served(checkpoint: Checkpoint) -> Iterator[WithHead]:
    with pretended_rank(checkpoint.vllm_config) as config:
        made = WithHead(checkpoint, config)
        yield made
        made.engine.shutdown()


def test_a_speculative_head_in_the_models_checkpoint_follows_with_it(
    served: WithHead, mirrored: Mirrored
) -> None:
    tensors = served.tensors
    assert served.load(mirrored.put(tensors)) is None
    for seed, only in enumerate(("mtp_layers", ""), start=1):
        tensors = after_a_step(tensors, 0.05, seed, only=only, is_finite=True)
        served.change(mirrored.put(tensors))
        assert served.differing(tensors, tensors) == []


def test_a_head_without_tensors_in_the_run_keeps_its_weights_and_is_reported(
    served: WithHead, mirrored: Mirrored
) -> None:
    """Trainers that don't train the head leave its tensors out."""

    def without_head(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: each for name, each in tensors.items() if "mtp_layers" not in name}

    later = after_a_step(served.tensors, 0.05, 1, is_finite=True)
    stale = served.load(mirrored.put(without_head(later)))
    assert "the speculative head keeps the weights that it has" in str(stale)
    as_was = {name: served.tensors[name] if "mtp_layers" in name else each for name, each in later.items()}
    assert served.differing(later, as_was) == []
    later = after_a_step(later, 0.05, 2, is_finite=True)
    served.change(mirrored.put(without_head(later)))
    as_was = {name: as_was[name] if "mtp_layers" in name else each for name, each in later.items()}
    assert served.differing(later, as_was) == []
    assert served.engine.stale_drafter == stale


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
