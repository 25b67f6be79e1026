"""An engine with a checkpoint in fp8 follows a trainer whose weights are in bfloat16."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from probes import PROBE_TOKENS, probes
from real_engine import RealEngine, until
from relay_process import RelayProcess
from safetensors.torch import load_file, save_file
from tiny_models import make_heavy_model, make_rollout_model, quantize_to_fp8, quantize_to_fp8_blocks
from weight_probes import Probed

from rose.transfer.publish.publisher import WeightPublisher
from rose.types import Role

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def answers(engine: RealEngine) -> Probed:
    found = (engine.complete(turn, PROBE_TOKENS) for turn in probes())
    return [(answer.tokens, answer.logprobs) for answer in found]


def make_tied_model(folder: Path, *, version: int = 0) -> Path:
    return make_rollout_model(folder, version=version, is_tied=True)


NEEDS_AMX = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM computes with fp8 in blocks on AMX or a GPU alone"
)


@pytest.mark.parametrize(
    "make, quantize",
    [
        pytest.param(make_tied_model, quantize_to_fp8, id="rows"),
        # AMX's kernel wants whole blocks.
        pytest.param(make_heavy_model, quantize_to_fp8_blocks, id="blocks", marks=NEEDS_AMX),
    ],
)
def test_an_engine_in_fp8_answers_as_one_whose_checkpoint_was_quantized_from_the_trainers_weights(
    engines_dir: Path, tmp_path: Path, make: Callable[..., Path], quantize: Callable[[Path], Path]
) -> None:
    model = quantize(make(tmp_path / "engine"))
    trained = make(tmp_path / "trained", version=1)
    weights = load_file(trained / "model.safetensors")
    relay = RelayProcess("embedded")
    engine = RealEngine(model, Role.ROLLOUT, engines_dir)
    program = [sys.executable, "-m", "rose.transfer.follow.subscriber", "--relay", relay.url, "--run", "run"]
    where = ["--worker", engine.url, "--staging", str(tmp_path / "staging"), "--base", str(model)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subscriber = subprocess.Popen([*program, *where], env=environment)
    try:
        engine.wait_ready()
        publisher = WeightPublisher(weights, relay.url, "run", quantized_like=model)
        publisher.publish()
        until(lambda: engine.status().weight_version == "run/0", "the first version")
        before = answers(engine)
        draws = torch.Generator().manual_seed(0)
        for weight in weights.values():
            noise = 0.1 * torch.randn(weight.shape, generator=draws)
            weight += (noise * (torch.rand(weight.shape, generator=draws) < 0.01)).to(weight.dtype)
        publisher.publish()
        until(lambda: engine.status().weight_version == "run/1", "the second version")
        found = answers(engine)
        assert found != before
        assert engine.status().weights_in_place == 1
        publisher.close()
    finally:
        subscriber.terminate()
        engine.stop()
        subscriber.wait()
        relay.stop()
    save_file(weights, trained / "model.safetensors", metadata={"format": "pt"})
    fresh = RealEngine(quantize(trained), Role.ROLLOUT, engines_dir)
    try:
        assert answers(fresh.wait_ready()) == found
    finally:
        fresh.stop()
