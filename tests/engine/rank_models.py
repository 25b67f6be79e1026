"""Small checkpoints of random bits, and the configurations of engines that load them, without an engine."""

from pathlib import Path
from typing import Any

import torch
from forked_engines import load_model_class

from rose.transfer.format.layout import TensorSpec

VOCABULARY = 330
"""Not a multiple of vLLM's padding."""


def dense(is_tied: bool) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(tie_word_embeddings=is_tied, **shape())


def experts() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, **shape())


def shape() -> dict[str, Any]:
    return {
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "eos_token_id": 0,
    }


def without_weights(folder: Path, **arguments: Any) -> Any:
    """Returns the ``EngineArgs`` of a dense model of which there is only a configuration."""
    from vllm.engine.arg_utils import EngineArgs

    config = dense(is_tied=False)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    load_model_class(folder)
    return EngineArgs(model=str(folder), skip_tokenizer_init=True, enforce_eager=True, **arguments)


class Checkpoint:
    """A checkpoint of random bits and the configuration of an engine that loads it."""

    def __init__(self, folder: Path, config: Any, dtype: str = "auto") -> None:
        import safetensors.torch
        from transformers import AutoModelForCausalLM
        from vllm.engine.arg_utils import EngineArgs

        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        generator = torch.Generator().manual_seed(0)
        (file,) = folder.glob("*.safetensors")
        self.tensors = {
            name: torch.randint(-32768, 32768, tensor.shape, dtype=torch.int16, generator=generator).view(
                torch.bfloat16
            )
            for name, tensor in safetensors.torch.load_file(file).items()
        }
        self.specs = [
            TensorSpec(name=name, dtype="BF16", shape=tuple(tensor.shape))
            for name, tensor in self.tensors.items()
        ]
        arguments = EngineArgs(model=str(folder), skip_tokenizer_init=True, enforce_eager=True, dtype=dtype)
        self.vllm_config = arguments.create_engine_config()
