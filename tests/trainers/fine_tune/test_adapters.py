"""Adapters: the model's own weights stay, and what is published or saved is what the model computes with."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from safetensors.torch import load_file, save_file

from rose.errors import ConfigError
from rose.measure.models import numbered_words, word_tokenizer
from rose.node.fine_tune.options import FineTuneOptions
from rose.trainers.fine_tune.adapters import Adapters, MergingPublisher
from rose.trainers.fine_tune.command import Loaded, load, save
from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.publish.published_dtypes import PublishedDtypes
from rose.transfer.publish.torch_source import load_planes
from rose.transfer.relay.opening import open_relay
from tests.transfer.relay_process import RelayProcess


def test_only_adapters_are_trained_and_merged_weights_answer_like_the_model(model: Any) -> None:
    from transformers import Qwen3ForCausalLM

    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapters = Adapters(model, rank=4)
    assert set(adapters.weights) == set(before)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    tokens = torch.randint(0, 64, (4, 16))
    losses = []
    for _ in range(10):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.1
    assert torch.equal(
        adapters.weights["model.layers.1.mlp.up_proj.weight"], before["model.layers.1.mlp.up_proj.weight"]
    )
    adapters.merge()
    merged = Qwen3ForCausalLM(model.config)
    merged.load_state_dict({name: tensor.detach() for name, tensor in adapters.weights.items()})
    with torch.no_grad():
        assert torch.allclose(merged(input_ids=tokens).logits, model(input_ids=tokens).logits, atol=1e-5)
    assert torch.equal(
        adapters.weights["model.embed_tokens.weight"].detach(), before["model.embed_tokens.weight"]
    )


def test_a_rank_wider_than_every_layer_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="has no linear layer wider than that"):
        Adapters(model, rank=4096)


@pytest.mark.parametrize("is_adapted", [False, True])
def test_a_saved_model_answers_like_the_trained_one(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_adapted: bool
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setattr("signal.signal", lambda *_: None)
    if is_adapted:
        Adapters(model, rank=4)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(".up"):
                    parameter.normal_()
    tokens = torch.randint(0, 64, (4, 16))
    with torch.no_grad():
        trained = model(input_ids=tokens).logits
    tokenizer: Any = word_tokenizer(numbered_words(40), 64)
    nothing_to_learn: Any = None
    loaded = Loaded(
        model=model, tokenizer=tokenizer, published=PublishedDtypes("float32"), data=nothing_to_learn
    )
    save(loaded, tmp_path)
    saved: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.allclose(saved(input_ids=tokens).logits, trained, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path)("w1 w2")["input_ids"] == tokenizer("w1 w2")["input_ids"]


def renamed() -> Any:
    """A mixture whose files call its modules otherwise than transformers does."""
    from transformers import MixtralConfig, MixtralForCausalLM

    shape = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 24, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(num_local_experts=3, **shape, **heads))


def test_merged_weights_are_published_as_they_are_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    model, relay = renamed(), RelayProcess("embedded")
    adapters = Adapters(model, rank=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".up"):
                parameter.normal_()
    gate = "model.layers.0.block_sparse_moe.gate.weight"
    published = PublishedDtypes("bfloat16", frozenset([gate]))
    publisher = MergingPublisher(adapters, relay.url, "run", published)
    publisher.publish()
    client, mirror = open_relay(relay.url), WeightMirror()
    assert Follower(client, "run", mirror).advance() and mirror.planes is not None
    for each in (client, publisher):
        each.close()
    relay.stop()
    tokenizer: Any = word_tokenizer(numbered_words(40), 64)
    nothing_to_learn: Any = None
    save(Loaded(model=model, tokenizer=tokenizer, published=published, data=nothing_to_learn), tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved[gate].dtype == torch.float32
    assert {each.name for each in mirror.planes.layout.tensors} == saved.keys()
    held = {name: torch.zeros_like(each) for name, each in saved.items()}
    load_planes(mirror.planes, held)
    assert [name for name, each in saved.items() if not torch.equal(held[name], each)] == []


@pytest.mark.parametrize(
    ("is_renamed", "name"),
    [(False, "model.norm.weight"), (True, "model.layers.0.block_sparse_moe.gate.weight")],
)
def test_what_the_checkpoint_has_in_float32_is_trained_and_saved_with_all_its_bits(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_renamed: bool, name: str
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    before = tmp_path / "before"
    (renamed() if is_renamed else model).to(torch.bfloat16).save_pretrained(before)
    word_tokenizer(numbered_words(40), 64).save_pretrained(before)
    tensors = load_file(before / "model.safetensors")
    tensors[name] = torch.rand(tensors[name].shape)
    save_file(tensors, before / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "texts.jsonl").write_text('{"text": "w1 w2 w3"}\n')
    loaded = load(str(before), FineTuneOptions(data=tmp_path / "texts.jsonl"))
    assert {each.dtype for each in loaded.model.state_dict().values()} == {torch.float32}
    save(loaded, tmp_path / "after")
    saved = load_file(tmp_path / "after" / "model.safetensors")
    assert {key: each.dtype for key, each in saved.items()} == {k: e.dtype for k, e in tensors.items()}
    assert all(torch.equal(each, tensors[key]) for key, each in saved.items())
