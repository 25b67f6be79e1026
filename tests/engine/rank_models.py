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


def loaded_model(vllm_config: Any, tensors: dict[str, torch.Tensor], *, is_processed: bool = False) -> Any:
    """is_processed: whether vLLM has made it ready to compute, with packed copies."""
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    from rose.engine.weights.shard_recorder import detached_config

    with set_default_torch_dtype(vllm_config.model_config.dtype):
        model: Any = initialize_model(vllm_config=detached_config(vllm_config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # the loader never writes padding
        model.load_weights(iter(tensors.items()))
        if is_processed:
            process_weights_after_loading(model, vllm_config.model_config, torch.device("cpu"))
    return model


def differing(model: torch.nn.Module, other: torch.nn.Module) -> list[str]:
    """Returns the parameters whose bits differ."""
    found, expected = (
        {name: each.detach().view(torch.int16) for name, each in one.named_parameters()}
        for one in (model, other)
    )
    return [name for name in expected if not torch.equal(expected[name], found[name])]


def after_a_step(tensors: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """Returns tensors in which this share of the elements has new random bits, with NaN, Inf and -0."""
    generator = torch.Generator().manual_seed(seed)
    later = {}
    for name, tensor in tensors.items():
        old = tensor.view(torch.int16)
        drawn = torch.randint(-32768, 32768, old.shape, dtype=torch.int16, generator=generator)
        is_new = torch.rand(old.shape, generator=generator) < share
        later[name] = torch.where(is_new, drawn, old).view(torch.bfloat16)
    return later
