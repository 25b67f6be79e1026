"""Small checkpoints of random bits, and the configurations of engines that load them, without an engine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tiny_models import FP8_CONFIG, INT8_CONFIG, MTP_CONFIG, with_mtp_head

from rose.transfer.publish.torch_source import TorchSource

VOCABULARY = 330
"""Not a multiple of vLLM's padding."""


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_FIRST_OF_EXPONENT = {1: 0x40, 2: 0x4000, 4: 0x40000000}


def dense(is_tied: bool) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(tie_word_embeddings=is_tied, **shape())


def experts() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, **shape())


def routing_bias() -> Any:
    """A GLM-4 with experts, whose router has a bias in float32."""
    from transformers import Glm4MoeConfig

    sizes = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Glm4MoeConfig(first_k_dense_replace=1, num_nextn_predict_layers=0, **sizes, **shape())


def biased() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(**{**shape(), "head_dim": 8})


def with_head() -> Any:
    """A MiMo: a Qwen2 whose checkpoint has a head for multi-token prediction."""
    config = biased()
    config.num_nextn_predict_layers = 1
    return config


def latent() -> Any:
    """A DeepSeek-V2 with latent attention; a dense layer and experts beside shared ones."""
    from transformers import DeepseekV2Config

    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
    mixture = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    rest = {name: value for name, value in shape().items() if name not in ("head_dim", "num_key_value_heads")}
    return DeepseekV2Config(
        q_lora_rank=32, first_k_dense_replace=1, moe_intermediate_size=32, **sizes, **mixture, **rest
    )


def state_space() -> Any:
    from transformers import Mamba2Config

    sizes = {"num_heads": 4, "head_dim": 32, "state_size": 16, "expand": 2, "n_groups": 1}
    return Mamba2Config(num_hidden_layers=2, hidden_size=64, vocab_size=VOCABULARY, **sizes)


def int8() -> Any:
    """A dense model whose checkpoint has int8 weights and a scale for each row."""
    config = dense(is_tied=False)
    config.quantization_config = INT8_CONFIG
    return config


def fp8() -> Any:
    """The same with fp8 weights."""
    config = dense(is_tied=False)
    config.quantization_config = FP8_CONFIG
    return config


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


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "untied": (lambda: dense(False), {}),
    "tied": (lambda: dense(True), {}),
    "float32": (lambda: dense(True), {"dtype": "float32"}),
    "biases": (biased, {}),
    "experts": (experts, {}),
    "experts in one tensor": (experts, {"has_stacked_experts": True}),
    "expert parallel": (experts, {"enable_expert_parallel": True}),
    "expert parallel, experts in one tensor": (
        experts,
        {"enable_expert_parallel": True, "has_stacked_experts": True},
    ),
    "float32 among bfloat16": (routing_bias, {}),
    "latent": (latent, {}),
    "state space": (state_space, {}),
    "int8": (int8, {}),
    "fp8": (fp8, {}),
}
"""Makers of configurations, and arguments of the engines that load them."""


def without_weights(folder: Path, **arguments: Any) -> Any:
    """Returns the ``EngineArgs`` of a dense model of which there is only a configuration."""
    import inspecting  # noqa: F401
    from vllm.engine.arg_utils import EngineArgs

    config = dense(is_tied=False)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    return EngineArgs(model=str(folder), skip_tokenizer_init=True, enforce_eager=True, **arguments)


class Checkpoint:
    """A checkpoint of random bits and the configuration of an engine that loads it.

    is_finite: as in after_a_step(). has_stacked_experts: whether the tensors are those of transformers'
    modules, which keep a layer's experts in one, and not those of its files, which have one for each.
    """

    def __init__(
        self,
        folder: Path,
        config: Any,
        dtype: str = "auto",
        *,
        is_finite: bool = False,
        has_stacked_experts: bool = False,
        **arguments: Any,
    ) -> None:
        import inspecting  # noqa: F401
        import safetensors.torch
        from transformers import AutoModelForCausalLM
        from vllm.engine.arg_utils import EngineArgs

        quantization = config.__dict__.pop("quantization_config", None)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        (file,) = folder.glob("*.safetensors")
        tensors = safetensors.torch.load_file(file)
        for name in [name for name in tensors if name.endswith("e_score_correction_bias")]:
            tensors[name] = tensors[name].float()  # as published checkpoints have it
        if has_stacked_experts:
            tensors = dict(model.state_dict())
            assert any(each.ndim == 3 for each in tensors.values())
        if getattr(config, "num_nextn_predict_layers", 0):
            model.config.architectures = MTP_CONFIG["architectures"]
            model.config.save_pretrained(folder)
            tensors = with_mtp_head(tensors)
        if quantization is not None:
            model.config.quantization_config = quantization
            model.config.save_pretrained(folder)
            is_fp8 = quantization == FP8_CONFIG
            tensors = _quantized(tensors, torch.float8_e4m3fn if is_fp8 else torch.int8)
            safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
        self.tensors = after_a_step(tensors, 1.0, seed=0, is_finite=is_finite)
        self.specs = TorchSource(self.tensors, dtype=None).specs()
        engine = EngineArgs(
            model=str(folder), skip_tokenizer_init=True, enforce_eager=True, dtype=dtype, **arguments
        )
        self.vllm_config = engine.create_engine_config()


def _quantized(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns the tensors of which a checkpoint with weights of this type consists, without values."""
    made = {}
    for name, tensor in tensors.items():
        is_linear = name.endswith("proj.weight")
        made[name] = tensor.to(dtype) if is_linear else tensor
        if is_linear:
            made[f"{name}_scale"] = tensor[:, :1].clone()
    return made


def loaded_model(
    vllm_config: Any,
    tensors: dict[str, torch.Tensor],
    *,
    is_processed: bool = False,
    model_config: Any = None,
) -> Any:
    """is_processed: whether vLLM has made it ready to compute, with packed copies. model_config: a head's."""
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    from rose.engine.weights.shard_recorder import detached_config

    with set_default_torch_dtype(vllm_config.model_config.dtype):
        model: Any = initialize_model(vllm_config=detached_config(vllm_config), model_config=model_config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # the loader never writes padding
        model.load_weights(iter(tensors.items()))
        if is_processed:
            process_weights_after_loading(model, vllm_config.model_config, torch.device("cpu"))
    return model


def differing(model: torch.nn.Module, other: torch.nn.Module) -> list[str]:
    """Returns the parameters and buffers whose bits differ, and the linear layers that compute something
    else.
    """
    found, expected = (
        {name: _bits(each.detach()) for name, each in (*one.named_parameters(), *one.named_buffers())}
        for one in (model, other)
    )
    wrong = [name for name in expected if not torch.equal(expected[name], found[name])]
    for name, module in other.named_modules():
        scheme = getattr(module, "scheme", None)
        if "cpu_linear" in vars(module) or hasattr(scheme, "kernel") or hasattr(scheme, "fp8_linear"):
            outputs = [_outputs(each) for each in (module, model.get_submodule(name))]
            wrong += [name] if not torch.equal(*map(_bits, outputs)) else []
    return wrong


def _outputs(module: Any) -> torch.Tensor:
    """Returns what a layer makes of some inputs."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    parameters, _ = get_layerwise_info(module).restore_metadata
    is_float = parameters["weight"].dtype.is_floating_point and parameters["weight"].itemsize > 1
    inputs = torch.linspace(-1, 1, parameters["weight"].shape[1]).repeat(3, 1)
    inputs = inputs.to(parameters["weight"].dtype if is_float else torch.bfloat16)
    result: torch.Tensor = module.quant_method.apply(module, inputs, None)
    return result


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def after_a_step(
    tensors: dict[str, torch.Tensor], share: float, seed: int, *, only: str = "", is_finite: bool = False
) -> dict[str, torch.Tensor]:
    """Returns tensors in which this share of the elements has new random bits, with NaN, Inf and -0.

    only: a part of the names of the tensors that change. is_finite: all numbers are smaller than 2, so that
    what is computed with them shows each of them.
    """
    generator = torch.Generator().manual_seed(seed)
    later = {}
    for name, tensor in tensors.items():
        old = tensor.view(_INTEGERS[tensor.element_size()])
        limits = torch.iinfo(old.dtype)
        drawn = torch.randint(limits.min, limits.max + 1, old.shape, dtype=old.dtype, generator=generator)
        if is_finite and tensor.is_floating_point():
            drawn &= ~_FIRST_OF_EXPONENT[tensor.element_size()]
        is_new = torch.rand(old.shape, generator=generator) < share * (only in name)
        later[name] = torch.where(is_new, drawn, old).view(tensor.dtype)
    return later
