"""An adapter's way from a trainer's tensors to a folder as PEFT saves it, and what is refused on the way."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from followed_adapter import Following
from safetensors.torch import load_file

from rose.errors import RelayError
from rose.transfer.adapters.description import CONFIG_FILE, TENSORS_FILE, describe, pairs
from rose.transfer.adapters.publisher import AdapterPublisher
from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.format import manifest as keys
from rose.transfer.format.checkpoint import checkpoint_state_hash
from rose.transfer.format.layout import TensorSpec
from rose.transfer.publish.publisher import WeightPublisher
from rose.transfer.relay.opening import open_relay

CONFIG = {
    "peft_type": "LORA",
    "base_model_name_or_path": "base",
    "r": 2,
    "lora_alpha": 4,
    "target_modules": ["q_proj", "v_proj"],
}
MODULES = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj")


def tensors(*, rank: int = 2, seed: int = 0, infix: str = "") -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    made = {}
    for module in MODULES:
        made[f"base_model.model.{module}.lora_A{infix}.weight"] = torch.randn(rank, 6)
        made[f"base_model.model.{module}.lora_B{infix}.weight"] = torch.randn(4, rank)
    return made


class _Config:
    def to_dict(self) -> dict[str, Any]:
        return {**CONFIG, "target_modules": {"v_proj", "q_proj"}}


class _PeftModel:
    """What PEFT's models show: a base model's tensors, and those of two adapters."""

    def __init__(self) -> None:
        self.peft_config = {"default": _Config(), "other": _Config()}
        self.adapter = tensors(infix=".default")

    def state_dict(self, *, keep_vars: bool) -> dict[str, torch.Tensor]:
        base = {"base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight": torch.zeros(4, 6)}
        return {**base, **self.adapter, **tensors(infix=".other", seed=9)}


def test_each_version_of_a_peft_model_becomes_a_folder_with_the_same_bits_and_configuration(
    embedded_url: str, tmp_path: Path
) -> None:
    model = _PeftModel()
    publisher = AdapterPublisher(model, embedded_url, "math", dtype=None)
    following = Following(embedded_url, "math", tmp_path / "staged")
    for number in range(3):
        if number:
            for tensor in model.adapter.values():
                tensor[0, 0] += number
        publisher.publish()
        version, folder, state_hash = following.newest()
        assert (version, folder.name) == (f"math/{number}", f"math@{number}")
        found = load_file(folder / TENSORS_FILE)
        expected = {name.replace(".default", ""): each for name, each in model.adapter.items()}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert str(checkpoint_state_hash(folder / TENSORS_FILE)) == state_hash
        assert json.loads((folder / CONFIG_FILE).read_text()) == CONFIG
    following.folders.forget({"math/1"})
    assert {path.name for path in (tmp_path / "staged").iterdir()} == {"math@1", "math@2"}
    following.close()
    assert not list((tmp_path / "staged").iterdir())
    publisher.close()


def test_followers_of_whole_weights_never_take_an_adapter_and_the_reverse(
    embedded_url: str, tmp_path: Path
) -> None:
    adapter = AdapterPublisher(tensors(), embedded_url, "math", config=CONFIG)
    adapter.publish()
    relay = open_relay(embedded_url)
    assert not Follower(relay, "auto", WeightMirror()).advance()
    assert relay.get(keys.HEAD_RUN_KEY) is None
    with pytest.raises(RelayError, match="run math has a LoRA adapter of base, no whole weights"):
        Follower(relay, "math", WeightMirror()).advance()
    whole = WeightPublisher({"weight": torch.zeros(3)}, embedded_url, "whole")
    whole.publish()
    following = Following(embedded_url, "whole", tmp_path)
    with pytest.raises(RelayError, match="run whole has whole weights and no LoRA adapter"):
        following.follower.advance()
    following.close()
    relay.close()
    adapter.close()
    whole.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"r": 0}, "r is 0: the adapter's rank has to be a whole number from 1 on"),
        ({"peft_type": "IA3"}, "peft_type IA3: only LORA adapters can be published"),
        ({"use_dora": True}, "use_dora is True: vLLM takes no such adapter"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa': it changes the base model"),
        ({"bias": "all"}, "bias is 'all': vLLM takes adapters without biases alone"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path is not set: pass base=NAME"),
        ({"r": 3}, r"lora_A.weight has shape \(2, 6\), rank 3 needs \(3, inputs\) \(and 3 more\)"),
        ({"target_modules": ["q_proj", "k_proj"]}, "target_modules has 'k_proj', and none of the 2"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_before_anything_is_published(
    embedded_url: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        AdapterPublisher(tensors(), embedded_url, "math", config={**CONFIG, **change})
    relay = open_relay(embedded_url)
    assert relay.get(keys.head_key("math")) is None
    relay.close()


def test_tensors_that_are_no_adapters_are_refused(embedded_url: str) -> None:
    with pytest.raises(ValueError, match=r"lm_head\.weight is no lora_A or lora_B tensor"):
        given = {**tensors(), "lm_head.weight": torch.zeros(2, 2)}
        AdapterPublisher(given, embedded_url, "math", config=CONFIG)
    with pytest.raises(ValueError, match="the model has no adapter 'sft'; it has default, other"):
        AdapterPublisher(_PeftModel(), embedded_url, "math", peft_name="sft")


def test_ranks_of_single_modules_follow_pefts_pattern() -> None:
    description = describe({**CONFIG, "rank_pattern": {"v_proj": 5}})
    specs = [
        TensorSpec(name=f"base_model.model.{module}.lora_{side}.weight", dtype="F32", shape=shape)
        for module, rank in zip(MODULES, (2, 5), strict=True)
        for side, shape in (("A", (rank, 6)), ("B", (4, rank)))
    ]
    assert set(pairs(specs, description)) == set(MODULES)
    with pytest.raises(ValueError, match=r"v_proj.lora_A.weight has shape \(5, 6\), rank 2 needs"):
        pairs(specs, describe(CONFIG))
