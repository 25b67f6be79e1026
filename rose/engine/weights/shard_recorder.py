"""Shard plans, recorded from vLLM's own loaders.

Owns the recording: a model is built without memory, its ``load_weights`` is fed tensors without memory, and
every copy between the two is noted. No weight is read or written, and the engine's own model is not touched.
Never guesses from names or shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.distributed import parallel_state
from vllm.utils.torch_utils import set_default_torch_dtype

from rose.engine.weights.reload import LiveModel
from rose.engine.weights.staged_file import TORCH_DTYPES
from rose.transfer.format.layout import TensorSpec
from rose.transfer.format.shard_plan import ShardCopy, ShardPlan, StridedView


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLoading:
    """What the loader of one rank does with a checkpoint."""

    plan: ShardPlan
    parameters: dict[str, torch.Tensor]
    """The parameters and buffers that it loads, without memory, as they are ahead of any processing."""
    computed: dict[str, set[str]]
    """The parameters into which more than a copy of a tensor goes, by the tensor's name."""


def record_loading(
    vllm_config: Any, tensors: Iterable[TensorSpec], live: LiveModel | None = None
) -> RecordedLoading:
    """Returns what this process's rank takes from a checkpoint with these tensors.

    live: the model whose loading is to be recorded, if it may be another than the engine's main one.

    Call it where vLLM's parallel groups are set up. Raises: ValueError on a dtype that no loader copies
    unchanged, and where the loader puts another tensor in a parameter's place.
    """
    specs = list(tensors)
    model: Any = _model_without_memory(vllm_config, live)
    sources = {spec.name: torch.empty(spec.shape, dtype=_dtype(spec), device="meta") for spec in specs}
    parameters = dict(_parameters(model))
    recorder = _Recorder(_by_storage(sources.items()), _by_storage(parameters.items()))
    with recorder, torch.no_grad():
        model.load_weights(live.own(sources.items()) if live is not None else iter(sources.items()))
    for name, tensor in _parameters(model):
        if name in parameters and _storage(parameters[name]) != _storage(tensor):
            raise ValueError(f"the loader puts another tensor in the place of {name}")
    tp, pp = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    plan = ShardPlan(
        rank=f"pp{pp.rank_in_group}-tp{tp.rank_in_group}",
        shapes={spec.name: spec.shape for spec in specs},
        copies=recorder.copies,
        whole=sorted(recorder.whole),
    )
    return RecordedLoading(plan=plan, parameters=parameters, computed=recorder.computed)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Notes what goes from the checkpoint's tensors into parameters; views of either share its storage."""

    def __init__(self, sources: Mapping[int, str], targets: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sources = sources
        self._targets = targets
        self._made_of = {storage: {name} for storage, name in sources.items()}
        self._results: list[torch.Tensor] = []
        """Computed tensors, which are kept because another storage could get the number of a freed one."""
        self.copies: list[ShardCopy] = []
        self.whole: set[str] = set()
        self.computed: dict[str, set[str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read: set[str] = set()
        for leaf in tree_leaves((args, kwargs)):
            read |= self._made_of.get(_storage(leaf), set())
        if func is torch.ops.aten.copy_.default and _storage(args[0]) in self._targets:
            self._note_copy(args[0], args[1], read)
        elif read:
            for leaf in tree_leaves(result):
                self._note_result(leaf, read)
        return result

    def _note_copy(self, target: torch.Tensor, source: torch.Tensor, read: set[str]) -> None:
        name = self._targets[_storage(target)]
        source_name = self._sources.get(_storage(source))
        if source.numel() == 0:
            return  # this rank holds only padding
        if source_name is None or source.dtype != target.dtype or source.numel() != target.numel():
            # What reads no tensor may be computed from the parameter itself, as Mamba2 does with A_log.
            self._note_computed(
                read or {each.source.name for each in self.copies if each.target.name == name}, name
            )
            return
        self.copies.append(ShardCopy(source=_view(source_name, source), target=_view(name, target)))

    def _note_result(self, leaf: Any, read: set[str]) -> None:
        storage = _storage(leaf)
        if storage in self._sources:
            return  # a view
        self.whole |= read  # all of them may be needed
        if storage in self._targets:
            self._note_computed(read, self._targets[storage])
        elif isinstance(leaf, torch.Tensor):
            self._made_of.setdefault(storage, set()).update(read)
            self._results.append(leaf)

    def _note_computed(self, sources: set[str], target: str) -> None:
        self.whole |= sources
        for source in sources:
            self.computed.setdefault(source, set()).add(target)


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
    if spec.dtype not in TORCH_DTYPES:
        raise ValueError(
            f"tensor {spec.name} has dtype {spec.dtype}; plans support {', '.join(TORCH_DTYPES)}"
        )
    return TORCH_DTYPES[spec.dtype]


def _model_without_memory(vllm_config: Any, live: LiveModel | None) -> torch.nn.Module:
    from vllm.model_executor.model_loader.utils import initialize_model

    config, model_config = detached_config(vllm_config), live.config if live is not None else None
    if live is not None and live.is_drafter and config.speculative_config.method == "draft_model":
        config.model_config = model_config  # such a drafter is a model like others, and no head
    with (
        set_default_torch_dtype(config.model_config.dtype),
        torch.device("meta"),
        _expert_maps(),
        _own_ropes(),
    ):
        return initialize_model(vllm_config=config, model_config=model_config)


@contextmanager
def _own_ropes() -> Iterator[None]:
    """A context whose new rotary embeddings vLLM does not keep: a later model would get them, without
    memory."""
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT

    before = dict(_ROPE_DICT)
    try:
        yield
    finally:
        _ROPE_DICT.clear()
        _ROPE_DICT.update(before)


@contextmanager
def _expert_maps() -> Iterator[None]:
    """A context in which models are built with real maps of experts to ranks: loaders read them.

    Why: vLLM makes a map on the default device, which is the one without memory here. vLLM 0.32.
    """
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    make: Any = ExpertMapManager.__init__

    def on_host(*args: Any, **kwargs: Any) -> None:
        with torch.device("cpu"):
            make(*args, **kwargs)

    ExpertMapManager.__init__ = on_host
    try:
        yield
    finally:
        ExpertMapManager.__init__ = make


def detached_config(vllm_config: Any) -> Any:
    """Returns a copy under which a second model can be built: attention layers register by name, each
    once.
    """
    detached = copy.copy(vllm_config)
    detached.compilation_config = copy.copy(vllm_config.compilation_config)
    detached.compilation_config.static_forward_context = {}
    return detached
