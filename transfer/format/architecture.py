"""The architecture of a model, as far as tensors and a few fields of config.json tell it.

Weights of one model must not go into an engine of another. vLLM's loader would not notice: it skips layers
for which a checkpoint has no tensors, and computes with the number of heads that its own config says. Never
imports torch or transformers.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from rose.errors import RelayError
from rose.transfer.format.checkpoint import read_checkpoint
from rose.transfer.format.layout import Layout
from rose.transfer.format.manifest import LayoutBody

_KEYS = (
    "model_type",
    "hidden_act",
    "hidden_size",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "num_experts_per_tok",
    "norm_topk_prob",
    "rms_norm_eps",
    "rope_theta",
    "layer_types",
    "sliding_window",
    "tie_word_embeddings",
)
"""Fields that change what the same weights compute."""
_HEAD, _IS_TIED = "lm_head.weight", "tie_word_embeddings"
"""Trainers may publish a tied head or leave it out."""
_BESIDE = re.compile(r"^drafter\.|(^|\.)mtp(_\w+)?\.|\brotary_emb\.inv_freq$")
"""What the main model does not compute with: drafters, speculative heads (MTP), and frequencies that follow
from config.json. A run may leave it out."""
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
"""Some checkpoints count a speculative head's layers on from the model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """That of the model which an engine serves."""

    shapes: Mapping[str, tuple[int, ...]]
    config: Mapping[str, JsonValue]
    kept: frozenset[str] = frozenset()
    """Tensors that are in no run, because publishers leave such integers out: engines keep their own."""

    @classmethod
    def known(cls, layout: Layout | None, checkpoint: Path | None) -> "Architecture | None":
        """Returns it from the weights that an engine has, or else from its checkpoint; None without both.

        Raises: FrameError, OSError on a checkpoint that can't be read.
        """
        if layout is not None:
            specs = list(layout.tensors)
        elif checkpoint is not None:
            specs = [spec for spec, _ in read_checkpoint(checkpoint).values()]
        else:
            return None
        path = checkpoint / "config.json" if checkpoint is not None else None
        config = json.loads(path.read_text()) if path is not None and path.is_file() else {}
        kept = frozenset(each.name for each in specs if each.dtype in ("I64", "U64"))
        return cls(shapes={each.name: each.shape for each in specs}, config=config, kept=kept)

    def require(self, run_id: str, body: LayoutBody) -> None:
        """Raises: RelayError unless a run's weights are of this architecture."""
        if (difference := self._difference(body)) is not None:
            raise RelayError(
                f"run {run_id} is of another architecture than this engine's model: {difference}"
            )

    def _difference(self, body: LayoutBody) -> str | None:
        found = {each.name: tuple(each.shape) for each in body.tensors}
        said = body.config if body.config is not None else {}
        for name in sorted(found.keys() ^ self.shapes.keys()):
            is_own = name in self.shapes
            if name == _HEAD:
                # An engine without a head has a tied one, unless the run says that it is not.
                may_differ = self.config.get(_IS_TIED) is True if is_own else said.get(_IS_TIED) is not False
            else:
                may_differ = name in self.kept or self._is_beside(name)
            if not may_differ:
                return f"{name} {'is missing' if is_own else 'is not known'}"
        for name, shape in found.items():
            if (own := self.shapes.get(name, shape)) != shape:
                return f"{name} has shape {list(shape)}, the model's has {list(own)}"
        for key in _KEYS:
            if key in said and key in self.config and said[key] != self.config[key]:
                return f"its {key} is {said[key]}, the model's is {self.config[key]}"
        return None

    def _is_beside(self, name: str) -> bool:
        """Whether a tensor is none of the main model's."""
        layer, num_layers = _LAYER.match(name), self.config.get("num_hidden_layers")
        if layer is not None and isinstance(num_layers, int) and self.config.get("num_nextn_predict_layers"):
            return int(layer[1]) >= num_layers or _BESIDE.search(name) is not None
        return _BESIDE.search(name) is not None


def architecture_of(weights: Any) -> dict[str, JsonValue] | None:
    """Returns what the config of a trainer's transformers module says of the architecture; None for anything
    else."""
    write = getattr(getattr(weights, "config", None), "to_json_string", None)
    if write is None:
        return None
    config = json.loads(write(use_diff=False))
    return {key: config[key] for key in _KEYS if config.get(key) is not None}
