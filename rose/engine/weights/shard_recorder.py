"""Shard plans, recorded from vLLM's own loaders.

Owns the recording: a model is built without memory, its ``load_weights`` is fed tensors without memory, and
every copy between the two is noted. No weight is read or written, and the engine's own model is not touched.
Never guesses from names or shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.distributed import parallel_state
from vllm.utils.torch_utils import set_default_torch_dtype

from rose.transfer.format.layout import TensorSpec
from rose.transfer.format.shard_plan import ShardCopy, ShardPlan, StridedView

_TORCH_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def record_shard_plan(vllm_config: Any, tensors: Iterable[TensorSpec]) -> ShardPlan:
    """Returns what this process's rank copies out of a checkpoint with these tensors.

    Call it where vLLM's parallel groups are set up, or under :func:`pretended_rank`. Raises: ValueError on a
    dtype that no loader copies unchanged.
    """
    specs = list(tensors)
    model: Any = _model_without_memory(vllm_config)
    sources = {spec.name: torch.empty(spec.shape, dtype=_dtype(spec), device="meta") for spec in specs}
    recorder = _Recorder(_by_storage(sources.items()), _by_storage(_parameters(model)))
    with recorder, torch.no_grad():
        model.load_weights(iter(sources.items()))
    tp, pp = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    return ShardPlan(
        rank=f"pp{pp.rank_in_group}-tp{tp.rank_in_group}",
        shapes={spec.name: spec.shape for spec in specs},
        copies=recorder.copies,
        whole=sorted(recorder.whole),
    )


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Notes copies from the checkpoint's tensors into parameters; views of either share its storage."""

    def __init__(self, sources: Mapping[int, str], targets: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources = sources
        self._targets = targets
        self.copies: list[ShardCopy] = []
        self.whole: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read = [leaf for leaf in tree_leaves((args, kwargs)) if self._source(leaf) is not None]
        is_loading = func is torch.ops.aten.copy_.default and self._target(args[0]) is not None
        if not read:
            if is_loading:  # of what was computed from the parameter itself, as Mamba2 does with A_log
                name = self._target(args[0])
                self.whole.update(one.source.name for one in self.copies if one.target.name == name)
            return result
        if is_loading:
            self._note_copy(args[0], args[1])
        elif any(_storage(leaf) not in self._sources for leaf in tree_leaves(result)):
            # Something was computed from the tensor, so all of it may be needed.
            self.whole.update(name for leaf in read if (name := self._source(leaf)) is not None)
        return result

    def _note_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        source_name, target_name = self._source(source), self._target(target)
        assert source_name is not None and target_name is not None
        if source.numel() == 0:
            return  # this rank holds only padding
        if source.dtype != target.dtype or source.numel() != target.numel():
            self.whole.add(source_name)
            return
        self.copies.append(ShardCopy(source=_view(source_name, source), target=_view(target_name, target)))

    def _source(self, leaf: Any) -> str | None:
        return self._sources.get(_storage(leaf))

    def _target(self, leaf: Any) -> str | None:
        return self._targets.get(_storage(leaf))


def _storage(leaf: Any) -> int:
    return int(leaf.untyped_storage()._cdata) if isinstance(leaf, torch.Tensor) else 0


def _view(name: str, tensor: torch.Tensor) -> StridedView:
    return StridedView(
        name=name, offset=int(tensor.storage_offset()), shape=tuple(tensor.shape), stride=tensor.stride()
    )


def _by_storage(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[int, str]:
    """Returns names by storage; the first name where several tensors share one (a head tied to the
    embedding).
    """
    names: dict[int, str] = {}
    for name, tensor in tensors:
        names.setdefault(_storage(tensor), name)
    return names


def _parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _dtype(spec: TensorSpec) -> torch.dtype:
    if spec.dtype not in _TORCH_DTYPES:
        raise ValueError(
            f"tensor {spec.name} has dtype {spec.dtype}; plans support {', '.join(_TORCH_DTYPES)}"
        )
    return _TORCH_DTYPES[spec.dtype]


def _model_without_memory(vllm_config: Any) -> torch.nn.Module:
    from vllm.model_executor.model_loader.utils import initialize_model

    with set_default_torch_dtype(vllm_config.model_config.dtype), torch.device("meta"):
        return initialize_model(vllm_config=detached_config(vllm_config))


def detached_config(vllm_config: Any) -> Any:
    """Returns a copy under which a second model can be built: attention layers register by name, each
    once.
    """
    detached = copy.copy(vllm_config)
    detached.compilation_config = copy.copy(vllm_config.compilation_config)
    detached.compilation_config.static_forward_context = {}
    return detached


# Other ranks --------------------------------------------------------------------------------------------


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
