"""vLLM's weight-transfer backend ``rose``: loads a checkpoint that the subscriber staged in shared memory.

Owns the step from a staged file to live weights. Fetching and decoding happen in the subscriber's process,
off the engine's path. Promises that the file's content is checked against the expected state hash *before*
the first parameter changes, so a bad file leaves the old weights serving.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rose.errors import FrameError
from rose.transfer.checkpoint import checkpoint_state_hash


@dataclass
class StagedInit(WeightTransferInitInfo):
    """Nothing to set up: the data plane is a file."""


@dataclass
class StagedUpdate(WeightTransferUpdateInfo):
    """Where the staged checkpoint lies (a .safetensors file) and the state hash it must have."""

    path: str
    state_hash: str


class StagedWeightEngine(WeightTransferEngine[StagedInit, StagedUpdate]):
    """Applies one staged checkpoint per update, through vLLM's layerwise reload.

    Layerwise reload because the CPU backend replaces linear weights by prepacked copies: patching the live
    parameters would answer success and change nothing (notes: transfer).
    """

    init_info_cls = StagedInit
    update_info_cls = StagedUpdate

    def init_transfer_engine(self, init_info: StagedInit) -> None:
        """No rendezvous is needed."""

    def start_weight_update(self) -> None:
        """Layerwise reload starts in :meth:`receive_weights`, once the file is known to be good."""

    def receive_weights(self, update_info: StagedUpdate) -> None:
        """Check, then load, every tensor of the staged checkpoint.

        Raises:
            FrameError: the file's state hash differs from the announced one; nothing was changed.
        """
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        _check(update_info)
        initialize_layerwise_reload(self.model)
        self.model.load_weights(_tensors(update_info.path))
        finalize_layerwise_reload(self.model, self.model_config)
        _repack_heads(self.model)

    def finish_weight_update(self) -> None:
        """Nothing is left to do: :meth:`receive_weights` finalizes."""

    def shutdown(self) -> None:
        """Holds no resources between updates."""


def _repack_heads(model: torch.nn.Module) -> None:
    """Rebuild each output head's packed copy from its weight.

    A head tied to the embedding has no tensor of its own in the checkpoint, so layerwise reload skips it, and
    on CPU it would keep computing with the old weights (seen: tokens equal, logprobs of mixed weights).
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _check(update: StagedUpdate) -> None:
    found = str(checkpoint_state_hash(Path(update.path)))
    if found != update.state_hash:
        raise FrameError(f"{update.path}: state hash {found}, expected {update.state_hash}; weights kept")


def _tensors(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt", device="cpu") as checkpoint:
        for name in checkpoint.keys():  # noqa: SIM118 - safe_open is no mapping
            yield name, checkpoint.get_tensor(name)
