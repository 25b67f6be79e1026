"""Mixtures of experts with data- and expert-parallel ranks on a CPU, for which vLLM lacks three things.

vLLM 0.32 exchanges tokens by `all_gatherv` and `reduce_scatterv`, which its communicator for CPUs leaves to a
base class that raises. Its experts for CPUs ignore the map from all experts to those of a rank, and so read
behind the rank's weights.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

_apply = CPUUnquantizedExperts.apply


def _all_gatherv(
    self: Any, tensors: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: Sequence[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """Rows of all ranks, which have different numbers of them."""
    assert dim == 0
    if not isinstance(tensors, list):
        return _gathered(self, tensors, sizes)
    return [_gathered(self, each, sizes) for each in tensors]


def _gathered(self: Any, rows: torch.Tensor, sizes: Sequence[int] | None) -> torch.Tensor:
    counts = sizes if sizes is not None else [len(rows)] * self.world_size
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    distributed.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def _reduce_scatterv(
    self: Any, rows: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """This rank's rows of the sum over all ranks."""
    assert dim == 0
    counts = sizes if sizes is not None else [len(rows) // self.world_size] * self.world_size
    total = rows.contiguous().clone()
    distributed.all_reduce(total, group=self.device_group)
    first = sum(counts[: self.rank_in_group])
    return total[first : first + counts[self.rank_in_group]].clone()


def _apply_on_rank(self: Any, *, expert_map: torch.Tensor | None, **given: Any) -> None:
    """Leaves to other ranks what goes to their experts."""
    if expert_map is not None:
        own = expert_map[given["topk_ids"].long()]
        given["topk_weights"] = given["topk_weights"].masked_fill(own < 0, 0.0)
        given["topk_ids"] = own.clamp(min=0).to(given["topk_ids"].dtype)
    _apply(self, expert_map=expert_map, **given)


CpuCommunicator.all_gatherv = _all_gatherv
CpuCommunicator.reduce_scatterv = _reduce_scatterv
CPUUnquantizedExperts.apply = _apply_on_rank
