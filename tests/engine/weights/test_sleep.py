"""Weights that were off the device come back bit for bit, and leave no packed copy there meanwhile."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vllm is not installed")

from mirrored import Mirrored
from rank_models import KINDS, Checkpoint, after_a_step, differing, loaded_model

from rose.engine.weights.device_weights import device_bytes
from rose.engine.weights.shard_recorder import pretended_rank
from rose.engine.weights.sleep import HostWeightsBackend
from rose.engine.weights.weights import StagedUpdate, StagedWeightEngine


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_every_kind_come_back_bit_for_bit(kind: str, mirrored: Mirrored, tmp_path: Path) -> None:
    make, arguments = KINDS[kind]
    checkpoint = Checkpoint(tmp_path / "model", make(), is_finite=True, **arguments)
    with pretended_rank(checkpoint.vllm_config) as config:
        tensors = checkpoint.tensors
        model = loaded_model(config, tensors, is_processed=True)
        engine = StagedWeightEngine(None, config, torch.device("cpu"), model)
        backend = HostWeightsBackend()
        backend.attach(engine)
        num_bytes = device_bytes(model)
        for seed in (1, 2):
            update = mirrored.put(tensors)
            engine.receive_weights(StagedUpdate(update.path, update.state_hash))
            assert device_bytes(model) == num_bytes
            backend.suspend()
            assert device_bytes(model) == 0
            tensors = after_a_step(tensors, 0.05, seed, is_finite=True)
            mirrored.put(tensors)
            backend.resume()
            assert differing(model, loaded_model(config, tensors, is_processed=True)) == []
        engine.shutdown()
