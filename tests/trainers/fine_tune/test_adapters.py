"""Adapters: the model's own weights stay, and what is published or saved is what the model computes with."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from safetensors.torch import load_file, save_file

from rose.errors import ConfigError
from rose.measure.models import numbered_words, word_tokenizer
from rose.trainers.fine_tune.adapters import Adapters
from rose.trainers.fine_tune.command import Loaded, save


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
    loaded = Loaded(model=model, tokenizer=tokenizer, published="float32", data=nothing_to_learn)
    save(loaded, tmp_path)
    saved: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.allclose(saved(input_ids=tokens).logits, trained, atol=1e-4)
    assert AutoTokenizer.from_pretrained(tmp_path)("w1 w2")["input_ids"] == tokenizer("w1 w2")["input_ids"]


def test_what_the_checkpoint_has_in_float32_is_saved_in_float32(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("signal.signal", lambda *_: None)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "before")
    file = tmp_path / "before" / "model.safetensors"
    name, tensors = "model.norm.weight", load_file(file)
    save_file({**tensors, name: torch.rand(tensors[name].shape)}, file, metadata={"format": "pt"})
    trained: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "before", dtype=torch.float32)
    expected = {key: each.clone() for key, each in trained.state_dict().items()}
    nothing: Any = None
    tokenizer = word_tokenizer(numbered_words(40), 64)
    save(Loaded(model=trained, tokenizer=tokenizer, published="bfloat16", data=nothing), tmp_path / "after")
    saved = load_file(tmp_path / "after" / "model.safetensors")
    assert {key: each.dtype for key, each in saved.items()} == {
        key: torch.float32 if key == name else torch.bfloat16 for key in tensors
    }
    assert all(torch.equal(each, expected[key].to(each.dtype)) for key, each in saved.items())
