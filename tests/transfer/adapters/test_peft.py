"""What followers get of PEFT's own models is what PEFT would save. PEFT is in no extra: CONTRIBUTING.md."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from followed_adapter import Following
from safetensors.torch import load_file

from rose.transfer.adapters.description import CONFIG_FILE, TENSORS_FILE
from rose.transfer.adapters.publisher import AdapterPublisher

peft: Any = pytest.importorskip("peft")


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "all-linear"])
def test_a_trained_peft_model_arrives_as_peft_saves_it(
    embedded_url: str, tmp_path: Path, targets: list[str] | str
) -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = Qwen3Config(num_hidden_layers=2, hidden_size=64, intermediate_size=128, vocab_size=320, **heads)
    base: Any = AutoModelForCausalLM.from_config(config)
    lora = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=targets, rank_pattern={"v_proj": 2}, task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(base, lora)
    publisher = AdapterPublisher(model, embedded_url, "math", base="tiny", dtype=None)
    following = Following(embedded_url, "math", tmp_path / "staged")
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    ids = torch.arange(10)[None]
    for step in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        publisher.publish()
        _, folder, _ = following.newest()
        saved = tmp_path / f"saved-{step}"
        model.save_pretrained(saved)
        found, expected = load_file(folder / TENSORS_FILE), load_file(saved / TENSORS_FILE)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
        assert _config(folder) == {**_config(saved), "base_model_name_or_path": "tiny"}
    following.close()
    publisher.close()


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text())
    return {**config, "target_modules": sorted(config["target_modules"])}
