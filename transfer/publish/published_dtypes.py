"""The floating-point types in which a trainer's weights are published.

An engine holds each tensor in the checkpoint's type: most in two bytes, and a few, such as a router's
correction bias or a state space's decay, in float32. A trainer may hold all of them in float32. Reads headers
of files, and never a weight.
"""

import logging
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rose.errors import FrameError
from rose.transfer.format.checkpoint import read_dtypes
from rose.transfer.publish.file_names import as_in_files
from rose.transfer.publish.torch_source import TensorShard, named_tensors, shard_of

logger = logging.getLogger(__name__)

AUTO = "auto"
_NARROW = {"BF16": "bfloat16", "F16": "float16"}
_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
_DEFAULT = "bfloat16"
"""vLLM, too, computes in it where a checkpoint has only wider floats."""


@dataclass(frozen=True, slots=True)
class PublishedDtypes:
    """most: the dtype, by torch's name, that floats are cast to. kept: the names of those that stay float32,
    because the checkpoint has them in no less."""

    most: str = _DEFAULT
    kept: frozenset[str] = frozenset()

    @classmethod
    def of_checkpoint(cls, checkpoint: str | Path | None) -> "PublishedDtypes | None":
        """Reads a folder, or a model of Hugging Face's hub that was downloaded before.

        Returns None if it has no files, or only wider floats. Raises: FrameError on a damaged file, OSError
        on one that can't be read.
        """
        folder = _folder(checkpoint)
        tensors = read_dtypes(folder) if folder is not None else {}
        num_bytes = Counter[str]()
        for dtype, size in tensors.values():
            num_bytes[dtype] += size
        if not num_bytes.keys() & _NARROW.keys():
            return None
        most = max(_NARROW, key=lambda dtype: num_bytes[dtype])
        return cls(
            _NARROW[most], frozenset(name for name, (dtype, _) in tensors.items() if dtype in ("F32", "F64"))
        )

    @classmethod
    def find(cls, checkpoint: str | Path | None, origin: str | Path | None) -> "PublishedDtypes | None":
        """Reads the checkpoint that is asked for, or else the one from which the model says that it was
        loaded.

        Returns None as of_checkpoint() does, and where the model's own can't be read, which it logs. Raises:
        FrameError or OSError if the one that is asked for can't be read.
        """
        if checkpoint is not None:
            return cls.of_checkpoint(checkpoint)
        try:
            return cls.of_checkpoint(origin)
        except (FrameError, OSError) as error:
            logger.warning("dtypes of the model's checkpoint are not known checkpoint=%s %s", origin, error)
            return None

    @classmethod
    def of_tensors(cls, pairs: Iterable[tuple[str, TensorShard]], model: Any) -> "PublishedDtypes":
        """Where no checkpoint is known: float32 stays beside narrower floats, and where transformers says so
        of the model's class."""
        num_elements, wide = Counter[str](), []
        for name, shard in pairs:
            dtype = str(shard.tensor.dtype).removeprefix("torch.")
            num_elements[dtype] += shard.tensor.numel()
            if dtype == "float32":
                wide.append(name)
        if num_elements.keys() & set(_NARROW.values()):
            most = max(_NARROW.values(), key=lambda dtype: num_elements[dtype])
            return cls(most, frozenset(wide))
        parts = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
        return cls(kept=frozenset(name for name in wide if any(part in name for part in parts)))

    def keeps(self, name: str, tensor: Any) -> bool:
        """Returns whether a trainer's tensor is published in float32."""
        return name in self.kept and str(tensor.dtype) == "torch.float32"


def require_checkpoint(checkpoint: str | Path) -> None:
    """Raises: ValueError if this is a path that leads to no folder. A name on Hugging Face's hub may be of a
    model that this machine has not downloaded."""
    is_name = isinstance(checkpoint, str) and _HUB_NAME.fullmatch(checkpoint) is not None
    if not is_name and not Path(checkpoint).is_dir():
        raise ValueError(
            f"checkpoint {checkpoint}: this machine has no such folder; give that of the checkpoint that the "
            "engines began with, or its name on Hugging Face's hub"
        )


def as_published(
    weights: Any, dtype: str | PublishedDtypes | None, checkpoint: str | Path | None
) -> tuple[Any, str | None]:
    """Returns a trainer's weights under the names of its files, and the dtype to which their floats are cast.

    dtype: the wanted one; with "auto" and PublishedDtypes, the tensors that stay float32 are marked.
    checkpoint: the one with which engines began; None: that of a transformers model, if it can be read.
    Raises: FrameError on a damaged file of a checkpoint that is given, OSError.
    """
    in_files = as_in_files(weights)
    if dtype != AUTO and not isinstance(dtype, PublishedDtypes):
        return in_files, dtype
    pairs = [(name, shard_of(value)) for name, value in named_tensors(in_files)]
    dtypes = dtype if isinstance(dtype, PublishedDtypes) else _found(weights, pairs, checkpoint)
    marked = [
        (name, replace(shard, keeps_dtype=shard.keeps_dtype or dtypes.keeps(name, shard.tensor)))
        for name, shard in pairs
    ]
    return marked, dtypes.most


def _found(
    weights: Any, pairs: list[tuple[str, TensorShard]], checkpoint: str | Path | None
) -> PublishedDtypes:
    own = getattr(getattr(weights, "config", None), "_name_or_path", None)
    found = PublishedDtypes.find(checkpoint, own)
    return found if found is not None else PublishedDtypes.of_tensors(pairs, weights)


def _folder(checkpoint: str | Path | None) -> Path | None:
    """Returns where a checkpoint lies on this machine; None if it doesn't."""
    if not checkpoint or Path(checkpoint).is_dir():
        return Path(checkpoint) if checkpoint else None
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(checkpoint), local_files_only=True))
    except (ImportError, OSError, ValueError):
        logger.info("checkpoint is not on this machine: the trainer's tensors tell dtypes: %s", checkpoint)
        return None
