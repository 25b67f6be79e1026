"""A run that lacks tensors of the model is refused with their names, and every old weight stays."""

from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vllm is not installed")

import torch
from lib.transfer.pretended_rank import pretended_rank
from mirrored import Mirrored
from rank_models import KINDS, Checkpoint, after_a_step, differing, loaded_model

from rose.engine.weights.weights import StagedUpdate, StagedWeightEngine
from rose.errors import FrameError

LAYER = "model.layers.1."
LACKING = {
    "untied": (f"{LAYER}self_attn.o_proj.weight", f"{LAYER}self_attn.o_proj.weight"),
    "tied": (f"{LAYER}self_attn.k_proj.weight", f"{LAYER}self_attn.qkv_proj.weight"),
    "biases": (f"{LAYER}self_attn.q_proj.bias", f"{LAYER}self_attn.qkv_proj.bias"),
    "experts": (f"{LAYER}mlp.experts.3.up_proj.weight", f"{LAYER}mlp.experts.routed_experts.w13_weight"),
    "int8": (f"{LAYER}mlp.up_proj.weight_scale", f"{LAYER}mlp.gate_up_proj.weight_scale"),
    "fp8": (f"{LAYER}mlp.down_proj.weight_scale", f"{LAYER}mlp.down_proj.weight_scale"),
    "state space": ("backbone.layers.1.mixer.A_log", "backbone.layers.1.mixer.A"),
}
"""A tensor of each kind of model, and the parameter that it goes into."""


@pytest.mark.parametrize("kind", LACKING)
def test_a_run_without_a_tensor_leaves_the_old_weights(kind: str, mirrored: Mirrored, tmp_path: Path) -> None:
    make, arguments = KINDS[kind]
    checkpoint = Checkpoint(tmp_path / "model", make(), is_finite=True, **arguments)
    missing, parameter = LACKING[kind]
    with pretended_rank(checkpoint.vllm_config) as config:
        model = loaded_model(config, checkpoint.tensors, is_processed=True)
        engine = StagedWeightEngine(None, config, torch.device("cpu"), model)
        later = after_a_step(checkpoint.tensors, 0.5, seed=1, is_finite=True)
        update = mirrored.put({name: each for name, each in later.items() if name != missing})
        said = (
            rf"the run lacks: 1, first \['{missing}'\]; .* keep old bits: 1, first {parameter}; weights kept"
        )
        with pytest.raises(FrameError, match=said):
            engine.receive_weights(StagedUpdate(update.path, update.state_hash))
        assert differing(model, loaded_model(config, checkpoint.tensors, is_processed=True)) == []
        engine.shutdown()


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_with_all_tensors_is_taken(kind: str, mirrored: Mirrored, tmp_path: Path) -> None:
    """Also where their names are others than those of the engine's own files."""
    make, arguments = KINDS[kind]
    checkpoint = Checkpoint(tmp_path / "model", make(), is_finite=True, **arguments)
    with pretended_rank(checkpoint.vllm_config) as config:
        model = loaded_model(config, checkpoint.tensors, is_processed=True)
        engine = StagedWeightEngine(None, config, torch.device("cpu"), model)
        later = after_a_step(checkpoint.tensors, 0.5, seed=1, is_finite=True)
        update = mirrored.put(later)
        engine.receive_weights(StagedUpdate(update.path, update.state_hash))
        assert differing(model, loaded_model(config, later, is_processed=True)) == []
        engine.shutdown()
