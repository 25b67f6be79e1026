"""Megatron-Core's own models publish their parameters, and the Hugging Face model arrives, bit for bit."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.transfer.relay_process import RelayProcess

pytest.importorskip("megatron.core", reason="Megatron-Core is not installed (CONTRIBUTING.md)")
pytest.importorskip("transformers", reason="transformers is not installed")

import transformers
from megatron.core import parallel_state
from torch import distributed

from rose.trainers.megatron import megatron_shards
from tests.trainers.megatron_rank import (
    GROUPS,
    HEAD,
    HEADS,
    HIDDEN,
    KINDS,
    LAYERS,
    NOISE,
    TOKENS,
    VOCABULARY,
    WIDTH,
    Kind,
    made,
)

pytestmark = [pytest.mark.clients, pytest.mark.slow]

CLASSES = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
}


@pytest.fixture
def relay() -> Iterator[RelayProcess]:
    relay = RelayProcess("embedded")
    yield relay
    relay.stop()


def hugging_face_model(name: str, kind: Kind) -> Any:
    """Returns a model in which every element is random, norms and biases too."""
    config_class, model_class = (getattr(transformers, each) for each in CLASSES[name])
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        moe_intermediate_size=WIDTH // 2,
        num_experts=kind.num_experts,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD,
        rms_norm_eps=1e-6,
        tie_word_embeddings=kind.is_tied,
    )
    torch.manual_seed(0)
    model = model_class(config).to(kind.dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand_like(parameter) - (0.5 if parameter.dim() > 1 else 0.0))
    return model


def train(name: str, folder: Path, relay: RelayProcess) -> None:
    program = [sys.executable, "-m", "tests.trainers.megatron_rank", name]
    ranks = [
        subprocess.Popen(
            [*program, str(rank), str(folder), relay.url],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(KINDS[name].num_ranks)
    ]
    try:
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), "\n".join(said)


@pytest.mark.parametrize("name", KINDS)
def test_what_arrives_is_the_hugging_face_model_bit_for_bit(
    name: str, tmp_path: Path, relay: RelayProcess
) -> None:
    kind = KINDS[name]
    model = hugging_face_model(name, kind)
    model.save_pretrained(tmp_path)
    train(name, tmp_path, relay)
    sent = load_file(tmp_path / "model.safetensors")
    before, after = (load_file(tmp_path / f"mirror-{number}.safetensors") for number in range(2))
    assert ("lm_head.weight" not in sent) == kind.is_tied
    for tensor, value in sent.items():
        assert torch.equal(before[tensor], value), tensor
        assert torch.equal(after[tensor], value + NOISE) != kind.computes, tensor
    if kind.computes:  # the trained weights, in the Hugging Face model, compute what Megatron computes
        model.load_state_dict(after)
        with torch.no_grad():
            expected = model(torch.tensor(TOKENS)).logits[0]
        computed = load_file(tmp_path / "logits.safetensors")["logits"]
        assert torch.allclose(computed, expected, atol=1e-4, rtol=1e-4), (computed - expected).abs().max()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """This process as Megatron's only rank."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'world'}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("settings", "vocab_size", "message"),
    [
        ({"rotary_interleaved": True}, VOCABULARY, "model with rotary_interleaved can't be published under"),
        ({"gated_linear_unit": False}, VOCABULARY, r"layers\.0\.mlp\.linear_fc1\.weight is not gated"),
        ({}, 81, r"word_embeddings\.weight has 80 rows, fewer than vocab_size=81"),
    ],
)
def test_a_model_without_a_counterpart_is_refused(
    settings: dict[str, Any], vocab_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        megatron_shards(made(Kind(settings=settings)), vocab_size=vocab_size)


@pytest.mark.usefixtures("alone")
def test_parameters_without_a_hugging_face_name_are_counted_and_one_is_named() -> None:
    model = made(Kind())
    model.register_parameter("value_head", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(ValueError, match=r"1 of \d+ Megatron parameters have no Hugging Face .*value_head"):
        megatron_shards(model, vocab_size=VOCABULARY)
