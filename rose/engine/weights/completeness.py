"""Whether a run has tensors for all that an engine's own checkpoint fills.

Why: vLLM's loader does not report a parameter for which no tensor comes. Its layerwise reload keeps the old
weights of a layer that gets nothing, and computes with uninitialized memory if a layer gets its numbers
without their scales. Names may differ between the two, so what counts is which parts of which parameters are
written. Reads only the headers of files.
"""

import logging
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

from rose.engine.weights.reload import LiveModel
from rose.engine.weights.shard_recorder import RecordedLoading, record_loading
from rose.errors import FrameError
from rose.transfer.format.checkpoint import read_checkpoint
from rose.transfer.format.layout import TensorSpec

logger = logging.getLogger(__name__)


def require_complete(vllm_config: Any, model: LiveModel, tensors: Iterable[TensorSpec]) -> None:
    """Raises: FrameError where a run with these tensors leaves a part of the model as it is, which the
    model's own checkpoint fills.

    Does nothing where that checkpoint is not on this host, or where a loader can't be recorded.
    """
    own = _own_tensors(model.config)
    if not own:
        return
    given = [spec for spec in tensors if model.owns(spec.name)]
    try:
        expected, found = (record_loading(vllm_config, specs, model) for specs in (own, given))
    except Exception as error:  # a loader may fail in any way; if it does with the run's tensors, it will say
        logger.debug("no completeness known error=%r", error)
        return
    copied, sources, own_sources = _copied(found), _sources(found), _sources(expected)
    lacking = [name for name, size in _copied(expected).items() if copied.get(name, 0) < size]
    # Of what is computed from tensors only the names can be compared: some of the checkpoint's are too few.
    computed = {name for names in expected.computed.values() for name in names}
    lacking += [name for name in computed if sources.get(name, set()) < own_sources[name]]
    if lacking:
        needed = set().union(*(own_sources[name] for name in lacking))
        missing = sorted(needed - {spec.name for spec in given})
        wide = {spec.name for spec in own if not spec.is_publishable}.intersection(missing)
        fix = f"; {len(wide)} of them have dtypes that no run has, first {min(wide)}" if wide else ""
        raise FrameError(
            f"tensors of {model.config.model} that the run lacks: {len(missing)}, first {missing[:1]}; "
            f"parameters that would keep old bits: {len(lacking)}, first {lacking[0]}; weights kept{fix}"
            + (": give trainer and engines a checkpoint with int32 or float32 in their place" if wide else "")
        )


def _own_tensors(config: Any) -> list[TensorSpec]:
    """Returns those of the checkpoint from which the model was started; none if it is not on this host."""
    folder = Path(config.model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(config.model, revision=config.revision, local_files_only=True))
        except (OSError, ValueError):
            return []
    return [spec for spec, _ in read_checkpoint(folder).values()]


def _copied(loading: RecordedLoading) -> dict[str, int]:
    """Returns how many elements of each parameter are copied from tensors."""
    regions = {(copy.target.name, copy.target.offset, copy.target.shape) for copy in loading.plan.copies}
    copied: dict[str, int] = {}
    for name, _, shape in regions:
        copied[name] = copied.get(name, 0) + prod(shape)
    return copied


def _sources(loading: RecordedLoading) -> dict[str, set[str]]:
    """Returns the tensors from which something goes into each parameter."""
    found: dict[str, set[str]] = {}
    for copy in loading.plan.copies:
        found.setdefault(copy.target.name, set()).add(copy.source.name)
    for source, names in loading.computed.items():
        for name in names:
            found.setdefault(name, set()).add(source)
    return found
