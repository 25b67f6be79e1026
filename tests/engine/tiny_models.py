"""Two tiny architectures with random weights, and successive versions of one of them.

The serving model is a Qwen2 in float32 with one KV block per slab, the rollout model a Qwen3 with two, so
that slabs mean different things to the two engines. Float32, which vLLM must be told as it would choose
bfloat16, for greedy comparisons under changing batches: two bfloat16 logits are often equal, and then the
batch decides.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rose.measure.models import numbered_words, word_tokenizer
from rose.messages import WeightUpdate
from rose.transfer.format.checkpoint import checkpoint_state_hash

SLAB_BYTES = 512 << 10
BLOCK_TOKENS = 128
"""vLLM's KV block on a CPU."""
VOCABULARY = 320
MAX_MODEL_LEN = 1024
MTP_CONFIG = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
INT8_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "linear": {
            "targets": ["Linear"],
            "weights": {
                **{"num_bits": 8, "type": "int", "strategy": "channel"},
                **{"symmetric": True, "dynamic": False},
            },
            "input_activations": {
                **{"num_bits": 8, "type": "int", "strategy": "token"},
                **{"symmetric": True, "dynamic": True},
            },
        }
    },
}
"""A checkpoint's quantization: a scale for each row of a weight, and one for each token's inputs."""
_LINEAR = INT8_CONFIG["config_groups"]["linear"]
FP8_CONFIG = {
    **INT8_CONFIG,
    "format": "float-quantized",
    "config_groups": {
        "linear": {
            "targets": ["Linear"],
            "weights": {**_LINEAR["weights"], "type": "float"},
            "input_activations": {**_LINEAR["input_activations"], "type": "float"},
        }
    },
}
"""The same in fp8, which vLLM also computes with on a CPU without AMX."""
FP8_BLOCK_CONFIG = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
"""The same with a scale for each block, with which vLLM computes on AMX or a GPU."""


def make_serving_model(folder: Path) -> Path:
    """A Qwen2 whose blocks take 384 KiB: one per slab."""
    from transformers import Qwen2Config

    return _write(folder, Qwen2Config(num_hidden_layers=6, **_shape(hidden_size=128)), seed=1)


def make_deep_model(folder: Path) -> Path:
    """A Qwen2 whose blocks take 2.5 MiB in bfloat16: more than a slab of a pool that knows no model has."""
    from transformers import Qwen2Config

    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    config = Qwen2Config(num_hidden_layers=20, **{**_shape(hidden_size=256), **heads})
    return _write(folder, config, seed=7)


def make_rollout_model(folder: Path, *, version: int = 0, is_tied: bool = False) -> Path:
    """A Qwen3; in float32 its blocks take 256 KiB: two per slab. Tied: bfloat16, head and embedding shared.

    Every version is its own draw of all weights, so no two have a tensor in common.
    """
    from transformers import Qwen3Config

    config = Qwen3Config(num_hidden_layers=4, tie_word_embeddings=is_tied, **_shape(hidden_size=64))
    return _write(folder, config, seed=100 + version, dtype="bfloat16" if is_tied else "float32")


def make_window_model(folder: Path) -> Path:
    """A Gemma3: four layers that see one KV block, two that see all; three cache groups of 128 KiB blocks."""
    from transformers import Gemma3TextConfig

    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = Gemma3TextConfig(
        num_hidden_layers=6,
        sliding_window=BLOCK_TOKENS,
        layer_types=kinds,
        query_pre_attn_scalar=32,
        **_shape(hidden_size=64),
    )
    return _write(folder, config, seed=3)


def make_moe_model(folder: Path) -> Path:
    """A Qwen3-MoE, two of four experts per token."""
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return _write(folder, Qwen3MoeConfig(num_hidden_layers=4, **experts, **_shape(hidden_size=64)), seed=4)


def make_mla_model(folder: Path, *, num_dense: int = 4) -> Path:
    """A DeepSeek-V2 with latent attention, in the sizes that vLLM's CPU kernel knows. The first layers have
    dense MLPs, the others experts."""
    from transformers import DeepseekV2Config

    shape = _shape(hidden_size=64)
    del shape["head_dim"], shape["num_key_value_heads"]
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    groups = {"n_group": 1, "topk_group": 1, "topk_method": "group_limited_greedy"}  # vLLM asks for them
    config = DeepseekV2Config(
        num_hidden_layers=4,
        q_lora_rank=None,
        first_k_dense_replace=num_dense,
        **latent,
        **experts,
        **groups,
        **shape,
    )
    return _write(folder, config, seed=5)


def make_int8_model(folder: Path) -> Path:
    """The Qwen3 in bfloat16 with int8 weights and a scale for each row, in compressed-tensors' format."""
    import torch

    def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
        return (weight.float() / scale).round().to(torch.int8), scale.to(torch.bfloat16)

    return _quantize(make_rollout_model(folder, is_tied=True), INT8_CONFIG, quantized)


def quantize_to_fp8(folder: Path) -> Path:
    """Gives the linear layers of a checkpoint fp8 weights with a scale for each row, in place."""
    import torch

    def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = weight.float().abs().amax(dim=1, keepdim=True) / torch.tensor(448.0)
        return (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    return _quantize(folder, FP8_CONFIG, quantized)


def quantize_to_fp8_blocks(folder: Path) -> Path:
    """Gives the linear layers of a checkpoint fp8 weights with a scale for each block, in place."""
    import torch
    from torch.nn.functional import pad

    def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = weight.shape
        padded = pad(weight.float(), (0, -columns % 128, 0, -rows % 128))
        blocks = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / torch.tensor(448.0)
        numbers = (blocks * (1.0 / scale)).to(torch.float8_e4m3fn).view(padded.shape)
        return numbers[:rows, :columns].contiguous(), scale[:, 0, :, 0].contiguous()

    return _quantize(folder, FP8_BLOCK_CONFIG, quantized, "_scale_inv")


def _quantize(
    folder: Path, quantization: dict[str, Any], quantized: Callable[[Any], Any], suffix: str = "_scale"
) -> Path:
    """Puts the numbers and scales that `quantized` makes in the place of a checkpoint's linear weights."""
    import json

    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in [each for each in tensors if each.endswith("proj.weight")]:
        tensors[name], tensors[f"{name}{suffix}"] = quantized(tensors[name])
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    return folder


def make_mamba_model(folder: Path) -> Path:
    """A Granite-hybrid: three Mamba2 layers beside one of attention; four cache groups of 64 KiB blocks."""
    from transformers import GraniteMoeHybridConfig

    shape = _shape(hidden_size=128)
    del shape["head_dim"]
    sizes = {"n_heads": 16, "d_head": 16, "d_state": 16, "n_groups": 1, "expand": 2, "d_conv": 4}
    config = GraniteMoeHybridConfig(
        num_hidden_layers=4,
        layer_types=["mamba", "mamba", "mamba", "attention"],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=128,
        position_embedding_type="rope",
        **{f"mamba_{name}": size for name, size in sizes.items()},
        **shape,
    )
    return _write(folder, config, seed=8)


def make_parallel_model(folder: Path) -> Path:
    """A Falcon-H1: each of two layers has a Mamba2 beside its attention; two groups of 128 KiB blocks."""
    from transformers import FalconH1Config

    sizes = {"n_heads": 16, "d_head": 16, "d_ssm": 256, "d_state": 16, "n_groups": 1, "d_conv": 4}
    config = FalconH1Config(
        num_hidden_layers=2,
        mamba_chunk_size=64,
        **{f"mamba_{name}": size for name, size in sizes.items()},
        **_shape(hidden_size=128),
    )
    return _write(folder, config, seed=12)


def make_delta_net_model(folder: Path) -> Path:
    """A Qwen3-Next in bfloat16, in the head size that vLLM's CPU kernel knows: three gated delta nets beside
    one layer of attention, whose blocks have 384 tokens to be as large as a state; four groups of 384 KiB."""
    from transformers import Qwen3NextConfig

    heads = {"key_head_dim": 128, "value_head_dim": 128, "num_key_heads": 2, "num_value_heads": 4}
    config = Qwen3NextConfig(
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        **{f"linear_{name}": size for name, size in heads.items()},
        **{**_shape(hidden_size=64), "head_dim": 128},
    )
    return _write(folder, config, seed=10, dtype="bfloat16")


def make_state_model(folder: Path) -> Path:
    """A Mamba2, whose layers keep a state and no KV."""
    from transformers import Mamba2Config

    sizes = {"num_heads": 4, "head_dim": 32, "state_size": 16, "expand": 2, "n_groups": 1}
    config = Mamba2Config(num_hidden_layers=2, hidden_size=64, vocab_size=VOCABULARY, **sizes)
    return _write(folder, config, seed=6)


def make_mtp_model(folder: Path, *, dtype: str = "bfloat16") -> Path:
    """A MiMo: a Qwen2 with a head for multi-token prediction in its checkpoint."""
    import json

    from safetensors.torch import load_file, save_file
    from transformers import Qwen2Config

    config = Qwen2Config(num_hidden_layers=2, **_shape(hidden_size=128))
    _write(folder, config, seed=11, dtype=dtype)
    path = folder / "model.safetensors"
    save_file(with_mtp_head(load_file(path)), path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **MTP_CONFIG}))
    return folder


def with_mtp_head(tensors: dict[str, Any]) -> dict[str, Any]:
    """Adds a MiMo's head to a Qwen2's tensors: a layer like the first one, and what leads into it."""
    head = "model.mtp_layers.0."
    layer, norm = "model.layers.0.", tensors["model.norm.weight"]
    made = {name.replace(layer, head): each.clone() for name, each in tensors.items() if layer in name}
    made |= {f"{head}{name}_layernorm.weight": norm.clone() for name in ("token", "hidden", "final")}
    output = tensors[f"{layer}self_attn.o_proj.weight"]
    made[f"{head}input_proj.weight"] = output.repeat(1, 2)[:, : 2 * norm.numel()].contiguous()
    return {**tensors, **made}


def make_eagle3_head(folder: Path) -> Path:
    """An EAGLE3 head for the Qwen3, with KV heads of the same size and random weights.

    It drafts every second token of the vocabulary, by a table that its checkpoint has in int64.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    shape = _shape(hidden_size=64)
    hidden, inner, heads = 64, shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * heads, shape["num_key_value_heads"] * heads
    rows = {
        "fc": (hidden, 3 * hidden),
        "lm_head": (VOCABULARY // 2, hidden),
        "midlayer.self_attn.q_proj": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, queries),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    }
    norms = [f"midlayer.{name}" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")]
    draws = torch.Generator().manual_seed(8)
    weights = {f"{name}.weight": 0.2 * torch.randn(size, generator=draws) for name, size in rows.items()}
    weights |= {f"{name}.weight": torch.ones(hidden) for name in [*norms, "norm"]}
    weights["d2t"] = torch.arange(VOCABULARY // 2)
    config = LlamaConfig(
        architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=1,
        draft_vocab_size=VOCABULARY // 2,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],  # vLLM's own choice names one of four layers twice
        **shape,
    )
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors")
    return folder


def make_heavy_model(folder: Path, *, version: int = 0) -> Path:
    """A tied Qwen3 whose weights, 50 MiB in bfloat16, show in the memory of its process."""
    from transformers import Qwen3Config

    config = Qwen3Config(num_hidden_layers=4, tie_word_embeddings=True, **_shape(hidden_size=1024))
    return _write(folder, config, seed=200 + version, dtype="bfloat16")


def staged_update(folder: Path, version: str) -> WeightUpdate:
    """What a subscriber posts once the checkpoint in ``folder`` is staged."""
    (path,) = folder.glob("*.safetensors")
    return WeightUpdate(version=version, path=str(path), state_hash=str(checkpoint_state_hash(path)))


def _shape(hidden_size: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": MAX_MODEL_LEN,
        "initializer_range": 0.2,
        "bos_token_id": None,
    }


def _write(folder: Path, config: Any, *, seed: int, dtype: str = "float32") -> Path:
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer: Any = word_tokenizer(numbered_words(VOCABULARY // 2), VOCABULARY)
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
