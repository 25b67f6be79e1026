"""A whole reload leaves a live model with what a fresh load of the same checkpoint has."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

from lib.transfer.pretended_rank import pretended_rank
from rank_models import Checkpoint, after_a_step, biased, differing, experts, latent, loaded_model

from rose.engine.weights.reload import LiveModel, load_layers


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("config", [experts(), biased(), latent()], ids=["experts", "biases", "latent"])
def test_every_parameter_is_that_of_a_fresh_load(config: Any, dtype: str, tmp_path: Path) -> None:
    """vLLM's CPU platform packs experts, and its reload has a rule of its own for biases."""
    checkpoint = Checkpoint(tmp_path, config, dtype=dtype)
    with pretended_rank(checkpoint.vllm_config) as rank:
        model = loaded_model(rank, checkpoint.tensors, is_processed=True)
        for seed in (7, 8):
            later = after_a_step(checkpoint.tensors, 0.5, seed=seed)
            assert differing(model, loaded_model(rank, later, is_processed=True)) != []
            load_layers(LiveModel(model, rank.model_config), [model], iter(later.items()))
            assert differing(model, loaded_model(rank, later, is_processed=True)) == []
