"""The names and tensors of a transformers model as its files have them, which engines read.

Since version 5, transformers' modules may keep a layer's experts in one tensor, and may have other names than
the files. transformers converts both when it loads and saves. The names here are transformers' own, and
tensors are views, so nothing is copied. Tensors that transformers converts in another way stay as the module
has them.
"""

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rose.transfer.publish.torch_source import TensorShard, shard_of

Pairs = list[tuple[str, TensorShard]]
_STACKED = (["MergeModulelist"], ["MergeModulelist", "Concatenate"])
"""How files' matrices of experts become one tensor: laid on each other, after gate and up were joined."""


def as_in_files(weights: Any, tensors: Mapping[str, Any] | None = None) -> Any:
    """Returns pairs of names and tensors, as a transformers model's files have them. Other models are
    returned as they are. tensors: what to take instead of the model's own tensors, by the names in its
    state_dict().
    """
    conversions = _conversions(weights)
    if not conversions:
        return weights if tensors is None else tensors
    tensors = tensors if tensors is not None else weights.state_dict(keep_vars=True)
    pairs: Pairs = []
    for name, value in tensors.items():
        pairs += _converted(weights, conversions, name, shard_of(value))
    return pairs


def names_in_files(model: Any) -> dict[str, list[str]]:
    """Returns, by the name of each tensor in state_dict(), under which names a transformers model's files
    have it."""
    conversions = _conversions(model)
    tensors = model.state_dict(keep_vars=True)
    if not conversions:
        return {name: [name] for name in tensors}
    return {
        name: [renamed for renamed, _ in _converted(model, conversions, name, shard_of(value))]
        for name, value in tensors.items()
    }


def _conversions(model: Any) -> list[Any]:
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return []
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # before version 5, modules were as the files are
        return []
    own = getattr(model, "_weight_conversions", None)
    return list(own) if own is not None else list(get_model_conversion_mapping(model, add_legacy=False))


def _converted(model: Any, conversions: list[Any], name: str, part: TensorShard) -> Pairs:
    from transformers.core_model_loading import revert_weight_conversion

    operations = _operations(conversions, name)
    if operations and [type(each).__name__ for each in operations] not in _STACKED:
        return [(name, part)]
    whole = part.part.new_empty(part.shape, device="meta")
    in_files = revert_weight_conversion(model, {name: whole})
    names = list(in_files)
    if not operations:
        return [(names[0], part)]
    num_experts = whole.shape[0]
    num_rows = whole.shape[1] * num_experts // len(names)
    if any(tuple(matrix.shape) != (num_rows, whole.shape[2]) for matrix in in_files.values()):
        return [(name, part)]  # joined along columns
    found: Pairs = []
    for index, renamed in enumerate(names):  # gates of all experts, then what was joined to them
        joined, expert = divmod(index, num_experts)
        cut = _cut(part, expert, joined * num_rows, num_rows)
        found += [(renamed, cut)] if cut is not None else []
    return found


def _operations(conversions: list[Any], name: str) -> list[Any]:
    """Returns what makes the tensor of the files' ones; nothing if only its name is another."""
    for conversion in conversions:
        if getattr(conversion, "operations", None) and any(
            re.search(pattern, name) for pattern in conversion.target_patterns
        ):
            return list(conversion.operations)
    return []


def _cut(part: TensorShard, expert: int, first_row: int, num_rows: int) -> TensorShard | None:
    """Returns what a shard holds of an expert's matrix, whose rows begin at first_row; None: nothing."""
    (at, row, column), (num_experts, num_held, _) = part.start, part.part.shape
    begin, end = max(first_row, row), min(first_row + num_rows, row + num_held)
    if not at <= expert < at + num_experts or begin >= end:
        return None
    return replace(
        part,
        index=(expert - at, slice(begin - row, end - row)),
        shape=(num_rows, part.shape[2]),
        start=(begin - first_row, column),
    )
