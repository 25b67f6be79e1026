"""Run as a program: one rank of a Megatron-Core trainer on a processor, which publishes, trains a step, and
publishes again.

`python -m tests.trainers.megatron_rank KIND RANK FOLDER RELAY`; FOLDER holds a Hugging Face model, from which
the rank fills Megatron's parameters by formulas of its own. Rank 0 also follows the run, and writes what has
arrived to mirror-0.safetensors and mirror-1.safetensors. A kind that computes takes its step from a backward
pass, and leaves its last logits in logits.safetensors; others add NOISE to every element.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file, save_file
from torch import distributed
from torch.nn import functional

from rose.trainers.megatron import megatron_shards
from rose.transfer.follow.follower import Follower
from rose.transfer.follow.mirror import WeightMirror
from rose.transfer.publish.publisher import WeightPublisher
from rose.transfer.publish.torch_source import load_planes
from rose.transfer.relay.opening import open_relay

LAYERS, HIDDEN, WIDTH, HEADS, GROUPS, HEAD = 4, 32, 48, 8, 2, 8
VOCABULARY, PADDED = 72, 80
TOKENS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3]]
RUN = "megatron"
NOISE = 0.125

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A model and how it is spread."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    num_experts: int | None = None
    is_tied: bool = False
    computes: bool = False
    dtype: torch.dtype = torch.bfloat16
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return self.tensor * self.pipeline * self.expert


KINDS = {
    "qwen3": Kind(tensor=2, computes=True, dtype=torch.float32, settings={"qk_layernorm": True}),
    "qwen2": Kind(tensor=2, pipeline=2, is_tied=True, settings={"add_qkv_bias": True}),
    "qwen3_moe": Kind(
        expert=2, num_experts=4, settings={"qk_layernorm": True, "moe_ffn_hidden_size": WIDTH // 2}
    ),
    "llama": Kind(tensor=4),  # twice as many ranks as query groups
}

TOP = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
}
INSIDE = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "mlp.linear_fc2": "mlp.down_proj",
    "mlp.router": "mlp.gate",
}


class PlainAttention(MegatronModule):
    """Torch's attention; Megatron's own takes its buffer from a GPU."""

    def __init__(self, config: TransformerConfig, *_: Any, **__: Any) -> None:
        super().__init__(config)

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.permute(2, 0, 1, 3).flatten(2)


class HostModel(GPTModel):
    """Megatron's model on a processor. A tied head of another stage begins with what fill() writes."""

    def setup_embeddings_and_output_layer(self) -> None:
        """Does nothing; Megatron would move the head to a GPU to send it the embeddings."""


def made(kind: Kind) -> Any:
    settings = {"normalization": "RMSNorm", "gated_linear_unit": True, **kind.settings}
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        ffn_hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=HEAD,
        layernorm_epsilon=1e-6,
        activation_func=functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=kind.tensor,
        pipeline_model_parallel_size=kind.pipeline,
        expert_model_parallel_size=kind.expert,
        num_moe_experts=kind.num_experts,
        params_dtype=kind.dtype,
        pipeline_dtype=kind.dtype,
        bf16=kind.dtype == torch.bfloat16,
        use_cpu_initialization=True,
        **settings,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=kind.num_experts,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    spec.submodules.self_attention.submodules.core_attention = PlainAttention
    return HostModel(
        config,
        spec,
        vocab_size=PADDED,
        max_sequence_length=64,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=kind.is_tied,
        position_embedding_type="none",  # the rotary ones are computed on a GPU alone
    )


def filled(name: str, parameter: Any, first_layer: int, first_expert: int, hf: Weights) -> torch.Tensor:
    """Returns what a parameter must hold."""
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    module, kind = name.rsplit(".", 1)
    if module in TOP:
        hf_name = f"{TOP[module]}.{kind}"
        whole = hf[hf_name] if hf_name in hf else hf["model.embed_tokens.weight"]  # a tied head
        if module != "decoder.final_layernorm":
            whole = torch.cat([whole, torch.full((PADDED - VOCABULARY, HIDDEN), 7.0).to(whole.dtype)])
    else:
        _, _, number, module = module.split(".", 3)
        prefix = f"model.layers.{int(number) + first_layer}."
        if module.startswith("mlp.experts"):
            expert, module = module.removeprefix("mlp.experts.local_experts.").split(".")
            prefix, module = f"{prefix}mlp.experts.{int(expert) + first_expert}.", f"mlp.{module}"
            inside = {"mlp.linear_fc2": "down_proj"}
        else:
            inside = INSIDE
        if module == "self_attention.linear_qkv":
            parts = [hf[f"{prefix}self_attn.{each}_proj.{kind}"] for each in "qkv"]
            grouped = [part.view(GROUPS, -1, *part.shape[1:]) for part in parts]
            whole = torch.cat(grouped, dim=1).flatten(0, 1)
        elif module == "mlp.linear_fc1":
            at = prefix if "experts" in prefix else f"{prefix}mlp."
            return torch.cat([hf[f"{at}{each}_proj.{kind}"].chunk(tensor)[rank] for each in ("gate", "up")])
        else:
            whole = hf[f"{prefix}{inside[module]}.{kind}"]
    is_cut = getattr(parameter, "tensor_model_parallel", False)
    return whole.chunk(tensor, parameter.partition_dim)[rank] if is_cut else whole


def fill(model: Any, hf: Weights, kind: Kind) -> None:
    first_layer = model.decoder.layers[0].layer_number - 1
    num_held = (kind.num_experts or 0) // kind.expert
    first_expert = parallel_state.get_expert_model_parallel_rank() * num_held
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = filled(name, parameter, first_layer, first_expert, hf)
            assert value.shape == parameter.shape, name
            parameter.copy_(value)


def logits(model: Any) -> torch.Tensor:
    """Returns this rank's part of the vocabulary's logits for each token."""
    tokens = torch.tensor(TOKENS)
    positions = torch.arange(tokens.shape[1])
    angles = torch.outer(positions.float(), 10000.0 ** (-torch.arange(0, HEAD, 2).float() / HEAD))
    rotary = torch.cat([angles, angles], dim=-1)[:, None, None, :]
    hidden = model.decoder(model.embedding(tokens, positions[None]), None, rotary_pos_emb=rotary)
    found: torch.Tensor = model.output_layer(hidden)[0][:, 0]
    return found


def train(model: Any, kind: Kind) -> None:
    if not kind.computes:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += NOISE
        return
    logits(model).float().logsumexp(dim=-1).sum().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_layernorm" in name or "k_layernorm" in name:  # each rank has seen its own heads
                distributed.all_reduce(parameter.grad)
            parameter -= 0.01 * parameter.grad


def save_mirror(relay_url: str, folder: Path, number: int, hf: Weights) -> None:
    relay = open_relay(relay_url)
    follower = Follower(relay, RUN, WeightMirror())
    assert follower.advance()
    planes = follower.mirror.planes
    assert planes is not None and {spec.name for spec in planes.layout.tensors} == set(hf)
    arrived = {name: torch.zeros_like(tensor) for name, tensor in hf.items()}
    load_planes(planes, arrived)
    save_file(arrived, folder / f"mirror-{number}.safetensors")
    relay.close()


def main(name: str, rank: str, folder: str, relay_url: str) -> None:
    kind, path = KINDS[name], Path(folder)
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{path / 'world'}", rank=int(rank), world_size=kind.num_ranks
    )
    parallel_state.initialize_model_parallel(
        kind.tensor, kind.pipeline, expert_model_parallel_size=kind.expert
    )
    hf = load_file(path / "model.safetensors")
    model = made(kind)
    fill(model, hf, kind)
    trained = Float16Module(model.config, model) if kind.dtype == torch.bfloat16 else model
    publisher = WeightPublisher(
        megatron_shards([trained], vocab_size=VOCABULARY),
        relay_url,
        RUN,
        dtype=None if kind.computes else "auto",
        rank=int(rank),
        num_ranks=kind.num_ranks,
    )
    for number in range(2):
        publisher.publish()
        if int(rank) == 0:
            save_mirror(relay_url, path, number, hf)
        if number == 0:
            train(model, kind)
    if kind.computes:
        own = logits(model).detach()
        parts = [torch.empty_like(own) for _ in range(kind.num_ranks)]
        distributed.all_gather(parts, own)
        whole = torch.cat(parts, dim=-1)[:, :VOCABULARY].contiguous()
        save_file({"logits": whole}, path / "logits.safetensors")
    publisher.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
