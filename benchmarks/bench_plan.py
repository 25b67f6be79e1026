"""Shard plans recorded from vLLM's own loaders: exact, quick, and each rank needs little more than its share.

`plan_exact` is the share of ranks whose plan fills every parameter of a small model bit for bit as the loader
does: Qwen3 dense (untied and tied) and mixture of experts, at TP 1, 2, 4, 8 and TP4 x PP2, with GQA replicas,
merged projections and a padded vocabulary. `plan_s` is the time to record one rank's plan of a full-size
model (built without memory). `pulled_share` is the largest part of the checkpoint that one rank would pull
alone. `host_share` is what the host of all ranks pulls, by whole buckets of a layout that is cut for them. It
is never less than everything, which is why a host's mirror is whole. Nothing is transferred.

    python benchmarks/bench_plan.py --json plan.json
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lib.harness import median_figure, run_benchmark
from lib.transfer.pretended_rank import pretended_rank
from lib.transfer.shard_check import wrong_parameters
from vllm.engine.arg_utils import EngineArgs

from rose.engine.weights.shard_recorder import record_loading
from rose.measure.figures import Figure
from rose.transfer.format.layout import Layout, TensorSpec
from rose.transfer.format.partition import cut_by_holdings
from rose.transfer.format.shard_plan import Box, ShardPlan

GRIDS = ((1, 1), (2, 1), (4, 1), (8, 1), (4, 2))
TINY = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 330,
}
FULL = {
    "Qwen3-8B": {
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "Qwen3-32B": {
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def measure(args: argparse.Namespace) -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        figures = [_exactness(Path(folder), args.seed)]
        for name, shape in FULL.items():
            if name == "Qwen3-32B" or not args.quick:
                figures += _full_size(Path(folder) / name, name, shape)
    return figures


def _exactness(folder: Path, seed: int) -> Figure:
    from transformers import Qwen3Config, Qwen3MoeConfig

    models = {
        "untied": Qwen3Config(tie_word_embeddings=False, **TINY),
        "tied": Qwen3Config(tie_word_embeddings=True, **TINY),
        "experts": Qwen3MoeConfig(**EXPERTS, **TINY),
    }
    exact: list[bool] = []
    for name, config in models.items():
        vllm_config = _engine_config(folder / name, config)
        generator = torch.Generator().manual_seed(seed)
        tensors = {
            spec.name: torch.randint(-32768, 32768, spec.shape, dtype=torch.int16, generator=generator).view(
                torch.bfloat16
            )
            for spec in _specs(config)
        }
        for ranks in (rank for grid in GRIDS for rank in _ranks(*grid)):
            with pretended_rank(vllm_config, **ranks) as rank_config:
                plan = record_loading(rank_config, _specs(config)).plan
                exact.append(not plan.whole and not wrong_parameters(rank_config, plan, tensors))
    return Figure(
        name="plan_exact",
        value=sum(exact) / len(exact),
        unit=f"of {len(exact)} ranks",
        target=">= 1",
    )


def _full_size(folder: Path, name: str, shape: dict[str, int]) -> list[Figure]:
    from transformers import Qwen3Config

    config = Qwen3Config(tie_word_embeddings=False, **shape)
    vllm_config, specs = _engine_config(folder, config), _specs(config)
    total = sum(spec.num_elements for spec in specs)
    figures: list[Figure] = []
    for tp_size, pp_size in GRIDS[1:]:
        times: list[float] = []
        plans: list[ShardPlan] = []
        for ranks in _ranks(tp_size, pp_size):
            with pretended_rank(vllm_config, **ranks) as rank_config:
                started = time.perf_counter()
                plan = record_loading(rank_config, specs).plan
                times.append(time.perf_counter() - started)
            plans.append(plan)
        case = f"{name}, TP{tp_size}" + (f" x PP{pp_size}" if pp_size > 1 else "")
        figures += [
            median_figure(f"plan_s[{case}]", times, "s", target="< 1"),
            Figure(
                name=f"pulled_share[{case}]",
                value=max(plan.held_elements() for plan in plans) / total,
                unit="of the checkpoint",
                peers={"even share": 1 / (tp_size * pp_size)},
            ),
            Figure(name=f"host_share[{case}]", value=_host_share(specs, plans), unit="of the checkpoint"),
        ]
    return figures


def _host_share(specs: list[TensorSpec], plans: list[ShardPlan]) -> float:
    """Returns what ranks with these plans need together."""
    ranks = [plan.boxes() for plan in plans]
    layout = Layout(specs, cuts=cut_by_holdings(specs, ranks))
    held = {
        part
        for part in layout.parts
        if any(Box.of(part.box).meets(box) for rank in ranks for box in rank.get(part.tensor.name, []))
    }
    needed = [
        bucket for bucket in layout.buckets if any(piece.part in held for piece in layout.pieces(bucket))
    ]
    return sum(bucket.num_elements for bucket in needed) / layout.num_elements


def _ranks(tp_size: int, pp_size: int) -> list[dict[str, int]]:
    return [
        {"tp_rank": tp_rank, "tp_size": tp_size, "pp_rank": pp_rank, "pp_size": pp_size}
        for pp_rank in range(pp_size)
        for tp_rank in range(tp_size)
    ]


def _engine_config(folder: Path, config: Any) -> Any:
    """An engine's configuration for a model of which only config.json exists."""
    config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    return EngineArgs(model=str(folder), skip_tokenizer_init=True, enforce_eager=True).create_engine_config()


def _specs(config: Any) -> list[TensorSpec]:
    """The checkpoint's tensors, under the names it is stored with: one per expert and projection."""
    h, heads, kv, width = (
        config.hidden_size,
        config.num_attention_heads * config.head_dim,
        config.num_key_value_heads * config.head_dim,
        config.head_dim,
    )
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, h)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        attention = {"q": (heads, h), "k": (kv, h), "v": (kv, h), "o": (h, heads)}
        for name, size in attention.items():
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = size
        for name in ("q", "k"):
            shapes[f"{prefix}self_attn.{name}_norm.weight"] = (width,)
        for name in ("input", "post_attention"):
            shapes[f"{prefix}{name}_layernorm.weight"] = (h,)
        if hasattr(config, "num_experts"):
            shapes[f"{prefix}mlp.gate.weight"] = (config.num_experts, h)
            for expert in range(config.num_experts):
                _add_mlp(shapes, f"{prefix}mlp.experts.{expert}.", config.moe_intermediate_size, h)
        else:
            _add_mlp(shapes, f"{prefix}mlp.", config.intermediate_size, h)
    shapes["model.norm.weight"] = (h,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, h)
    return [TensorSpec(name=name, dtype="BF16", shape=size) for name, size in shapes.items()]


def _add_mlp(shapes: dict[str, tuple[int, ...]], prefix: str, width: int, hidden_size: int) -> None:
    for name in ("gate", "up"):
        shapes[f"{prefix}{name}_proj.weight"] = (width, hidden_size)
    shapes[f"{prefix}down_proj.weight"] = (hidden_size, width)


if __name__ == "__main__":
    sys.exit(run_benchmark(__doc__ or "", measure))
