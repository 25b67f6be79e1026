"""The tiny models: deterministic, loadable, of the promised geometry."""

import dataclasses
import hashlib
from pathlib import Path

import pytest
import torch
from forked_engines import Fork
from stock_engine import first_token
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from rose.demo import frozenlake
from rose.measure import models
from rose.measure.models import END, PAD, word_tokenizer

PROMPT = list(range(3, 43))
SMALL_SERVING_SPEC = dataclasses.replace(
    models.SERVING_SPEC, hidden_size=128, intermediate_size=256, num_layers=2, vocab_size=256
)


def _weights_hash(directory: Path) -> str:
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(tmp_path: Path) -> None:
    first = models.make_rollout_model(tmp_path / "a", seed=3)
    again = models.make_rollout_model(tmp_path / "b", seed=3)
    other = models.make_rollout_model(tmp_path / "c", seed=4)
    assert _weights_hash(first) == _weights_hash(again) != _weights_hash(other)


def test_the_two_models_have_different_architectures_and_load_in_bfloat16(tmp_path: Path) -> None:
    rollout = models.make_rollout_model(tmp_path / "rollout")
    serving = models.make_serving_model(tmp_path / "serving", SMALL_SERVING_SPEC)
    architectures = [AutoConfig.from_pretrained(each).architectures for each in (serving, rollout)]
    assert architectures == [["Qwen2ForCausalLM"], ["Qwen3ForCausalLM"]]
    for directory in (serving, rollout):
        model = AutoModelForCausalLM.from_pretrained(directory, local_files_only=True)
        assert {str(each.dtype) for each in model.parameters()} == {"torch.bfloat16"}


@pytest.mark.parametrize("spec", [models.SERVING_SPEC, models.ROLLOUT_SPEC], ids=["serving", "rollout"])
def test_blocks_of_all_layers_pack_into_a_slab(spec: models.ModelSpec) -> None:
    spec.check_fits_slab()
    assert spec.vocab_size % 64 == 0


def test_a_shape_that_does_not_pack_into_a_slab_is_refused(tmp_path: Path) -> None:
    too_deep = dataclasses.replace(models.ROLLOUT_SPEC, num_layers=100)
    with pytest.raises(ValueError, match="don't pack into a slab"):
        models.make_rollout_model(tmp_path, too_deep)


def test_every_text_of_the_game_is_one_known_token_per_word(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(models.make_rollout_model(tmp_path, words=frozenlake.WORDS))
    for start in frozenlake.STARTS:
        game = frozenlake.FrozenLakeGame(start)
        text = game.opening() + " " + game.play("up")
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(token_ids) == len(text.split())
        assert tokenizer.unk_token_id not in token_ids
        assert tokenizer.decode(token_ids) == text


def test_every_id_decodes_and_special_words_come_first() -> None:
    tokenizer = word_tokenizer(["a", "b"], vocab_size=8)
    assert tokenizer.convert_ids_to_tokens([0, 1]) == [PAD, END]
    assert len(tokenizer) == 8
    assert all(tokenizer.decode([index]) for index in range(8))


@pytest.mark.parametrize("words", [["a", "a"], ["a b"], [""], ["a", "b", "c"], [PAD]])
def test_bad_word_lists_are_refused(words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"word|vocabulary"):
        word_tokenizer(words, vocab_size=5)


@pytest.mark.vllm
@pytest.mark.parametrize("kind", ["serving", "rollout"])
def test_vllm_decodes_the_model_greedily_like_transformers(kind: str, tmp_path: Path) -> None:
    make = models.make_serving_model if kind == "serving" else models.make_rollout_model
    directory = make(tmp_path)
    fork = Fork(tmp_path, first_token, model=directory, prompt=PROMPT)
    try:
        token, logprob = fork.result()
    finally:
        fork.stop()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        logprobs = model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    # bfloat16 in the engine, float32 here: the same distribution up to rounding.
    assert logprob == pytest.approx(float(logprobs[token]), abs=0.05)
    assert float(logprobs.max() - logprobs[token]) < 0.05
