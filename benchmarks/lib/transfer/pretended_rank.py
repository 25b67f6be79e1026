"""One rank of a larger engine, in one process and without its peers.

Owns the stand-ins for vLLM's process groups, which building a model and loading its weights ask for their
size and their rank alone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed import parallel_state


class _PretendedPeers:
    """A process group that is asked only for its size and rank."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@dataclass(frozen=True, slots=True)
class _PretendedGroup:
    """The part of vLLM's GroupCoordinator that building a model and loading its weights needs."""

    rank_in_group: int
    world_size: int
    ranks: Sequence[int] = field(default=())
    local_rank: int = 0
    rank: int = 0
    cpu_group: None = None
    device_communicator: None = None

    @property
    def device_group(self) -> _PretendedPeers:
        return _PretendedPeers(self.rank_in_group, self.world_size)

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1


@contextmanager
def pretended_rank(
    vllm_config: Any, *, tp_rank: int = 0, tp_size: int = 1, pp_rank: int = 0, pp_size: int = 1
) -> Iterator[Any]:
    """Yields the configuration of one rank of a larger engine, in one process and without any peer.

    Inside, models can be built and loaded; nothing may communicate.
    """
    config = copy.copy(vllm_config)
    config.parallel_config = copy.copy(vllm_config.parallel_config)
    config.parallel_config.tensor_parallel_size = tp_size
    config.parallel_config.pipeline_parallel_size = pp_size
    config.parallel_config.world_size = tp_size * pp_size
    alone = _PretendedGroup(0, 1, ranks=(0,))
    # vLLM's own group would need a process group of all ranks, each in its own process.
    world_rank, world_size = pp_rank * tp_size + tp_rank, pp_size * tp_size
    groups: dict[str, Any] = {
        "_WORLD": _PretendedGroup(world_rank, world_size, ranks=range(world_size), rank=world_rank),
        "_TP": _PretendedGroup(tp_rank, tp_size, ranks=range(tp_size), rank=tp_rank),
        "_PP": _PretendedGroup(pp_rank, pp_size, ranks=range(pp_size), rank=pp_rank),
        # Without expert parallelism every rank holds its slice of all experts.
        "_EP": _PretendedGroup(tp_rank, tp_size, ranks=range(tp_size), rank=tp_rank),
        **dict.fromkeys(("_DP", "_PCP", "_DCP"), alone),
    }
    before = {name: getattr(parallel_state, name) for name in groups}
    try:
        for name, group in groups.items():
            setattr(parallel_state, name, group)
        yield config
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)
