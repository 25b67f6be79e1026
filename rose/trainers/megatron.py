"""Megatron-Core's parameters as shards of Hugging Face tensors, which a publisher takes.

Owns the names and the fused parts of models like Llama and Qwen, dense or with experts. What a rank holds is
read from the model's own sharded_state_dict(), where Megatron numbers layers and experts as in the whole
model, whatever the parallelism. Nothing is copied or gathered. A model with other parameters is refused.
Needs Megatron-Core.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory

from rose.transfer.publish.torch_source import TensorShard

Pair = tuple[str, TensorShard]

_EMBEDDING, _HEAD = "embedding.word_embeddings", "output_layer"
_QKV, _GATE_UP = "self_attention.linear_qkv", "mlp.linear_fc1"
_MODULES = {
    _EMBEDDING: "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    _HEAD: "lm_head",
}
_LAYER_MODULES = {
    "input_layernorm": ["input_layernorm"],
    f"{_QKV}.layer_norm": ["input_layernorm"],  # the layers of Transformer Engine join it to the projection
    _QKV: ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "self_attention.q_layernorm": ["self_attn.q_norm"],
    "self_attention.k_layernorm": ["self_attn.k_norm"],
    "self_attention.linear_proj": ["self_attn.o_proj"],
    "pre_mlp_layernorm": ["post_attention_layernorm"],
    f"{_GATE_UP}.layer_norm": ["post_attention_layernorm"],
    _GATE_UP: ["mlp.gate_proj", "mlp.up_proj"],
    "mlp.linear_fc2": ["mlp.down_proj"],
    "mlp.router": ["mlp.gate"],
}
_PARAMETER = re.compile(r"(?:decoder\.layers\.(?P<layer>\d+)\.)?(?P<module>.+)[._](?P<kind>weight|bias)")
_EXPERT = re.compile(r"mlp\.experts\.experts\.(\d+)\.(.+)")
_INSTEAD = "give the publisher TensorShards of your own"
_REFUSED = (
    "multi_latent_attention",
    "attention_output_gate",
    "layernorm_zero_centered_gamma",
    "rotary_interleaved",
)
"""Settings with which parameters hold other elements than those of a Hugging Face checkpoint."""


def megatron_shards(model: Any, *, vocab_size: int) -> list[Pair]:
    """Returns this rank's parameters, each part under its Hugging Face name, for WeightPublisher.

    ``model``: a GPTModel, with or without Megatron's wrappers, or the list of a rank's virtual pipeline
    stages. ``vocab_size``: that of the Hugging Face checkpoint; the rows with which Megatron pads it are left
    out. Megatron's parallel groups must have been initialized. Raises: ValueError, with the names, on a
    parameter or a setting that has no counterpart in a Hugging Face checkpoint.
    """
    chunks = model if isinstance(model, Sequence) else [model]
    return [pair for chunk in chunks for pair in _of_chunk(_unwrapped(chunk), vocab_size)]


def _unwrapped(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model


def _of_chunk(model: Any, vocab_size: int) -> Iterator[Pair]:
    refused = [name for name in _REFUSED if getattr(model.config, name, False)]
    if refused:
        raise ValueError(
            f"a Megatron model with {', '.join(refused)} can't be published under Hugging Face names: "
            f"{_INSTEAD}"
        )
    # Otherwise Megatron joins the parameters of all layers and experts, along dimensions of their own.
    state = model.sharded_state_dict(metadata={"singleton_local_shards": True})
    held = [part for part in state.values() if not isinstance(part, ShardedObject)]
    names = {part.key: _names(part.key) for part in held}
    unknown = [key for key, found in names.items() if not found]
    if unknown:
        raise ValueError(
            f"{len(unknown)} of {len(names)} Megatron parameters have no Hugging Face name, the first is "
            f"{unknown[0]}: {_INSTEAD}"
        )
    for part in held:
        yield from _pairs(part, names[part.key], model.config, vocab_size)


def _names(key: str) -> list[str]:
    """Returns the tensors that a parameter consists of; nothing if they are not known."""
    found = _PARAMETER.fullmatch(key)
    if found is None:
        return []
    module, kind, folder = found["module"], found["kind"], "mlp"
    if found["layer"] is None:
        return [f"{_MODULES[module]}.{kind}"] if module in _MODULES else []
    if expert := _EXPERT.fullmatch(module):
        module, folder = f"mlp.{expert[2]}", f"mlp.experts.{expert[1]}"
    inside = [re.sub("^mlp", folder, name) for name in _LAYER_MODULES.get(module, [])]
    return [f"model.layers.{found['layer']}.{name}.{kind}" for name in inside]


def _pairs(part: Any, names: list[str], config: Any, vocab_size: int) -> Iterator[Pair]:
    if isinstance(part, ShardedTensorFactory):  # gate and up, one after the other
        built = part.build()
        _require(len(built) == len(names), part.key, f"has {len(built)} parts instead of {len(names)}")
        begin = 0
        for name, half in zip(names, built, strict=True):
            size = half.local_shape[0]
            yield name, _rows(half, part.data, begin, size, half.global_shape[0], half.global_offset[0])
            begin += size
        return
    (begin, *_), (num_rows, *_), (total, *_) = part.global_offset, part.local_shape, part.global_shape
    if len(names) > 1:
        _require(_QKV in part.key, part.key, "is not gated, unlike those of Llama and Qwen")
        for which, at, size, row, of in _query_groups(part, config):
            yield names[which], _rows(part, part.data, at, size, of, row)
    elif part.key.startswith((_EMBEDDING, _HEAD)):
        _require(vocab_size <= total, part.key, f"has {total} rows, fewer than vocab_size={vocab_size}")
        if begin < vocab_size:
            yield names[0], _rows(part, part.data, 0, min(num_rows, vocab_size - begin), vocab_size, begin)
    else:
        yield names[0], _rows(part, part.data, 0, num_rows, total, begin)


def _query_groups(part: Any, config: Any) -> Iterator[tuple[int, int, int, int, int]]:
    """Yields the parts of linear_qkv that the rank holds. In it each group has its query heads, its key head
    and its value head. For each part, yields which of the three it is, its first row here, its number of
    rows, its first row in the Hugging Face tensor, and the number of rows of that tensor.
    """
    groups, head = config.num_query_groups, config.kv_channels
    sizes = (config.num_attention_heads // groups * head, head, head)
    rows = groups * sum(sizes)
    _require(part.global_shape[0] == rows, part.key, f"has {part.global_shape[0]} rows instead of {rows}")
    first, end = part.global_offset[0], part.global_offset[0] + part.local_shape[0]
    at = 0
    for group in range(groups):
        for which, size in enumerate(sizes):
            begin, stop = max(at, first), min(at + size, end)
            if begin < stop:  # a rank may hold a part of a group
                yield which, begin - first, stop - begin, group * size + begin - at, groups * size
            at += size


def _rows(part: Any, parameter: Any, at: int, size: int, total: int, start: int) -> TensorShard:
    """Returns rows of a parameter as those of a Hugging Face tensor that has this many of them."""
    return TensorShard(
        tensor=parameter,
        index=(slice(at, at + size),) if size < parameter.shape[0] else None,
        shape=(total, *part.global_shape[1:]),
        start=(start, *part.global_offset[1:]),
    )


def _require(holds: bool, key: str, fault: str) -> None:
    if not holds:
        raise ValueError(f"Megatron's parameter {key} {fault}: {_INSTEAD}")
