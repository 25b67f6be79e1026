"""ROLL's weights over a ROSE relay.

This module has a worker for ROLL's trainer that publishes where ROLL's own sends to its engines. ROLL's
pipeline and its FSDP2 strategy stay as they are: the strategy gathers each tensor on all ranks, and keeps the
publisher among its weight updaters. Other strategies are refused.

In ROLL's configuration: ``actor_train.worker_cls: rose.trainers.roll_weights.RelayActorWorker``, and
``weights: {relay_url: "embedded://relay:8400", run_id: my-run}`` beside ``router_url`` in the proxy_config of
``train_env_manager`` (roll.py). Tested with ROLL 0.3 at commit 8eb27cc (August 2026).
"""

from collections.abc import Iterator
from typing import Any

import torch
from roll.pipeline.agentic.agentic_actor_worker import ActorWorker
from roll.third_party.fsdp2.model_update import gather_fsdp2_weights

from rose.trainers.gathered import GatheredWeights

_PLACE = "train_env_manager.llm_proxy.proxy_config.weights"


class RelayActorWorker(ActorWorker):
    """ROLL's own worker, whose strategy publishes."""

    def setup_model_update(self, infer_cluster: Any, model_update_name: str) -> None:
        """Gives the strategy what start_model_update() calls. Raises: ValueError on a setting; FrameError or
        OSError on a checkpoint that is given and can't be read."""
        self.strategy.weight_updaters[model_update_name] = _RelayUpdater(self)


class _RelayUpdater:
    """One rank's share of the weights, in the place of ROLL's updater."""

    def __init__(self, worker: Any) -> None:
        strategy = worker.worker_config.strategy_args.strategy_name
        arguments = worker.worker_config.model_args
        if strategy != "fsdp2_train":
            raise ValueError(f"actor_train.strategy_args.strategy_name={strategy}: must be fsdp2_train")
        if arguments.lora_target is not None:
            raise ValueError(
                f"actor_train.model_args.lora_target={arguments.lora_target}: must be unset; whole weights "
                "are published"
            )
        proxy = worker.pipeline_config.train_env_manager.llm_proxy.proxy_config
        origin, routers = arguments.model_name_or_path, (proxy.get("router_url"), proxy.get("key"))
        self.weights = GatheredWeights(proxy.get("weights", {}), _PLACE, origin, "roll", *routers)
        self._model = worker.strategy.unwrap_model()
        self._buffer_bytes = worker.pipeline_config.model_update_buffer_size_mb << 20

    def model_update(self) -> dict[str, Any]:
        """Publishes a version; returns no metrics. All ranks call it together. Raises: RelayError,
        WorkerError, ValueError."""
        is_tied = self._model.config.tie_word_embeddings
        self.weights.publish(self._gathered(), has_tied_head=is_tied)
        return {}

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        for several in gather_fsdp2_weights(self._model, self._buffer_bytes):
            yield from several
